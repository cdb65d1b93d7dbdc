"""A run whose model is a causal language model of `transformers`, with the tokenizer that lies beside it."""

from dataclasses import replace

from diloco.data.tokenizers import FILES
from diloco.files import expanded
from diloco.models.hugging_face_config import HuggingFaceConfig, hugging_face_model
from diloco.training.config import TrainConfig


def with_hugging_face(config: TrainConfig, name: str) -> TrainConfig:
    """The config with another model, and the model's own tokenizer, if it has one.

    Args:
        config: a recipe's.
        name: of the model, as `hugging_face_model` takes it.

    Raises:
        UserError: as `hugging_face_model`.
    """
    path = expanded(name)
    has_tokenizer = any((path / file).is_file() for file in FILES) or not path.exists()
    data = replace(config.data, tokenizer=str(path.absolute()) if path.exists() else name)
    return replace(config, model=hugging_face_model(name), data=data if has_tokenizer else config.data)


def at_another_place(saved: TrainConfig, name: str) -> TrainConfig:
    """The config of a run to be resumed, with its model at another place; the run compares all but the place.

    Raises:
        UserError: as `hugging_face_model`.
    """
    lora = saved.model.lora if isinstance(saved.model, HuggingFaceConfig) else None
    return replace(saved, model=hugging_face_model(name, lora=lora))
