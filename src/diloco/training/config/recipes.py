"""Recipes: functions that return a config. A variant calls one and changes the fields that differ.

The model of any of them may be another: a causal language model of `transformers`, with its own tokenizer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco.data.tokenizers import FILES
from diloco.errors import UserError
from diloco.files import expanded
from diloco.models.decoder_config import LADDER, SEQUENCE_LENGTH, DecoderConfig, ladder
from diloco.models.hugging_face_config import HuggingFaceConfig, hugging_face_model
from diloco.presets import Method
from diloco.training.config.config import (
    CheckpointConfig,
    DilocoConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from diloco.scaling.laws import Kind


def laptop() -> TrainConfig:
    """A 1M-parameter model of bytes on two CPU cores, in a few minutes."""
    return TrainConfig(
        num_tokens=700 * 16 * 256,
        global_batch=16,
        sequence_length=256,
        model=DecoderConfig(num_layers=6, num_heads=2, width=128),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        diloco=DilocoConfig(sync_every=30, layers_per_fragment=3),
        checkpoint=CheckpointConfig(every_steps=100),
    )


def tiny() -> TrainConfig:
    """A model too small to learn much, in seconds: to try out a setting."""
    return replace(
        laptop(),
        num_tokens=60 * 8 * 64,
        global_batch=8,
        sequence_length=64,
        model=DecoderConfig(num_layers=4, num_heads=2, width=32),
        diloco=DilocoConfig(sync_every=10, layers_per_fragment=2),
        evaluation=EvaluationConfig(num_tokens=32_768),  # about as many as it trains on
        checkpoint=CheckpointConfig(every_steps=20),
    )


def scaling_laws(
    scale: str, num_replicas: int = 2, method: Method = TrainConfig.method, *, fit: "Kind | None" = None
) -> TrainConfig:
    """A size of arXiv 2503.09799, 20 tokens a parameter, at the `hyperparameters` of a method and M.

    The batch is a power of two of sequences per replica, and the token budget a whole number of steps. Needs a
    tokenizer of 16,384 to 32,768 entries.

    Args:
        scale: a name in the paper's Table 3.
        num_replicas: M.
        method: Data-Parallel has laws of its own.
        fit: of the laws, as `hyperparameters` takes it.
    """
    # With the tables of the laws, which no other recipe needs.
    from diloco.scaling.hyperparameters import hyperparameters

    model = ladder(scale)
    num_params = model.num_matrix_params
    tuned = hyperparameters(method, num_params, num_replicas, fit=fit)
    global_batch = tuned.sequences(num_replicas, SEQUENCE_LENGTH)
    tokens_per_step = global_batch * SEQUENCE_LENGTH
    diloco = DilocoConfig(sync_every=30)
    if tuned.outer_learning_rate is not None:
        diloco = replace(diloco, outer_learning_rate=tuned.outer_learning_rate)
    return TrainConfig(
        method=method,
        num_replicas=num_replicas,
        num_tokens=round(20 * num_params / tokens_per_step) * tokens_per_step,
        global_batch=global_batch,
        sequence_length=SEQUENCE_LENGTH,
        model=model,
        optimizer=OptimizerConfig(learning_rate=tuned.learning_rate),
        diloco=diloco,
        checkpoint=CheckpointConfig(every_steps=500),
    )


def _scaling_laws_recipe(scale: str) -> Callable[..., TrainConfig]:
    def recipe(num_replicas: int = 2, method: Method = TrainConfig.method) -> TrainConfig:
        return scaling_laws(scale, num_replicas, method)

    recipe.__doc__ = (
        f"{scale} parameters, as in arXiv 2503.09799, at its hyperparameters for the method and the number of "
        "replicas; needs text in data.train and a data.tokenizer of 16,384 to 32,768 entries."
    )
    return recipe


PAPER_RECIPES = {scale.lower(): _scaling_laws_recipe(scale) for scale in LADDER}
"""The recipes of arXiv 2503.09799 by name, the smallest model first; their values follow from M and the method."""

RECIPES: dict[str, Callable[..., TrainConfig]] = {"laptop": laptop, "tiny": tiny} | PAPER_RECIPES
"""The recipes by name."""


def recipe(name: str, **followed: Any) -> TrainConfig:
    """The config of a recipe, with the recipe's name in it.

    Args:
        name: of the recipe.
        followed: num_replicas and method, from which the values of a paper's size follow, as they were asked for;
            the others have one config.
    """
    return replace(RECIPES[name](**followed if name in PAPER_RECIPES else {}), recipe=name)


def recipe_of(config: TrainConfig) -> TrainConfig:
    """The config of a config's recipe, at its method and replicas; with a rendezvous their number is open."""
    replicas = {"num_replicas": config.num_replicas} if config.rendezvous is None else {}
    return recipe(config.recipe, method=config.method, **replicas)


def with_hugging_face(config: TrainConfig, name: str | None, *, lora: str | None = None) -> TrainConfig:
    """The config of a new run with another model, and the model's own tokenizer, if it has one.

    Args:
        config: a recipe's.
        name: of the model, as `hugging_face_model` takes it; None leaves the config's.
        lora: the adapters to train; None leaves the config's.

    Raises:
        UserError: as `hugging_face_model`, or for adapters of our own models.
    """
    config = with_model_at(config, name, lora=lora)
    if name is None:
        return config
    path = expanded(name)
    if path.exists() and not any((path / file).is_file() for file in FILES):
        return config
    return replace(config, data=replace(config.data, tokenizer=str(path.absolute()) if path.exists() else name))


def with_model_at(config: TrainConfig, name: str | None, *, lora: str | None = None) -> TrainConfig:
    """The config with another model, or the same at another place; arguments and errors as `with_hugging_face`."""
    own = config.model if isinstance(config.model, HuggingFaceConfig) else None
    lora = lora if lora is not None or own is None else own.lora
    if name is not None:
        return replace(config, model=hugging_face_model(name, lora=lora))
    if own is None:
        raise UserError(
            f"model.lora={lora} adapts a model of transformers: name one by model.hf", "model.lora", "model.hf"
        )
    return replace(config, model=replace(own, lora=lora))
