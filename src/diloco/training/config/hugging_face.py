"""A run whose model is a causal language model of `transformers`, with the tokenizer that lies beside it."""

from dataclasses import replace

from diloco.data.tokenizers import FILES
from diloco.errors import UserError
from diloco.files import expanded
from diloco.models.hugging_face_config import HuggingFaceConfig, hugging_face_model
from diloco.training.config.config import TrainConfig


def with_hugging_face(config: TrainConfig, name: str | None, *, lora: str | None = None) -> TrainConfig:
    """The config of a new run with another model, and the model's own tokenizer, if it has one.

    Args:
        config: a recipe's.
        name: of the model, as `hugging_face_model` takes it; None leaves the config's.
        lora: the adapters to train; None leaves the config's.

    Raises:
        UserError: as `hugging_face_model`, or for adapters of our own models.
    """
    config = replace(config, model=_model(config, name, lora))
    if name is None:
        return config
    path = expanded(name)
    if path.exists() and not any((path / file).is_file() for file in FILES):
        return config
    return replace(config, data=replace(config.data, tokenizer=str(path.absolute()) if path.exists() else name))


def at_another_place(saved: TrainConfig, name: str | None, *, lora: str | None = None) -> TrainConfig:
    """The config of a run to be resumed, with its model at another place; the resume refuses all other changes.

    Args:
        saved: the run's.
        name: as of `with_hugging_face`.
        lora: as of `with_hugging_face`.

    Raises:
        UserError: as `with_hugging_face`.
    """
    return replace(saved, model=_model(saved, name, lora))


def _model(config: TrainConfig, name: str | None, lora: str | None) -> HuggingFaceConfig:
    own = config.model if isinstance(config.model, HuggingFaceConfig) else None
    lora = lora if lora is not None or own is None else own.lora
    if name is not None:
        return hugging_face_model(name, lora=lora)
    if own is None:
        raise UserError(
            f"model.lora={lora} adapts a model of transformers: name one by model.hf", "model.lora", "model.hf"
        )
    return replace(own, lora=lora)
