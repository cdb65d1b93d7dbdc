"""A causal language model of `transformers`: its config, its place, and the look-up of both. No torch.

The architecture is the content of the model's `config.json`, and travels in the run's config: a run is evaluated
and exported without the directory that it began from, unless it has trained adapters alone.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import tyro

from diloco.errors import UserError
from diloco.files import expanded, sha256
from diloco.models.pretrained import (
    WEIGHTS,
    config_file,
    model_class,
    parse_lora,
    text_config,
    transformers_config,
    weight_files,
)
from diloco.models.spec import ModelConfig
from diloco.schema import read_json

if TYPE_CHECKING:
    from diloco.models.language_model import LanguageModel

_FIXED = tyro.conf.Fixed
_MOST_BYTES = 1 << 20
"""Size of the largest file that is read: no config takes as much."""
_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig(ModelConfig):
    """A model of `transformers`, as `hugging_face_model` finds it; what is not to be chosen is no flag."""

    size_fields: ClassVar[tuple[str, ...]] = ("hf",)
    replayed_fields: ClassVar[tuple[str, ...]] = ("hf",)

    num_layers: _FIXED[tyro.conf.Suppress[int]]
    width: _FIXED[tyro.conf.Suppress[int]] = field(metadata={"column": "params"})
    vocab_size: _FIXED[tyro.conf.Suppress[int]] = 0
    architecture: _FIXED[tyro.conf.Suppress[str]]
    """The content of its `config.json`."""
    hf: _FIXED[tyro.conf.Suppress[str]] = field(
        default="", metadata={"incidental": True, "own_to_a_replica": True, "may_change_on_resume": True}
    )
    """The model's directory, its `config.json`, or its name on the Hugging Face Hub."""
    weights: _FIXED[tyro.conf.Suppress[str]] = ""
    """SHA-256 of the weights that training starts from; empty where the seed draws them."""
    lora: _FIXED[tyro.conf.Suppress[str | None]] = None
    """Train low-rank adapters alone, through peft: rank=8, or with all options
    rank=8,alpha=16,targets=q_proj+v_proj. Left out, alpha is twice the rank, and targets are all linear modules
    but the head. None trains all weights."""

    def __post_init__(self) -> None:
        """Refuse an architecture that is none, and adapters on no weights."""
        super().__post_init__()
        try:
            values = json.loads(self.architecture)
        except (ValueError, RecursionError):
            values = None
        if not (isinstance(values, dict) and isinstance(values.get("model_type"), str)):
            raise UserError("model.architecture is no config.json of transformers", "model.architecture")
        if self.num_layers > _MOST_LAYERS:
            raise UserError(
                f"model.num_layers={self.num_layers} must be at most {_MOST_LAYERS}", "model.num_layers"
            )
        if self.lora is not None:
            parse_lora(self.lora)
            if not self.weights:
                raise UserError(
                    f"model.lora={self.lora} adapts weights, and model.hf={self.hf} has none: leave it out",
                    *("model.lora", "model.hf"),
                )

    def build(self, *, seed: int) -> "LanguageModel":
        """The model; the seed draws its weights, but where adapters alone are trained those are read from `hf`."""
        from diloco.models.hugging_face import build  # with torch

        return build(self, seed=seed)

    def initial(self, *, seed: int) -> "LanguageModel":
        """The model with the weights of `hf`, if it has any."""
        from diloco.models.hugging_face import initial

        return initial(self, seed=seed)

    def fitted(self, *, vocab_size: int, sequence_length: int) -> Self:
        """This config, where the model can read the tokens and the length of the sequences."""
        self._check_fits("vocab_size", vocab_size, "entries of data.tokenizer", "data.tokenizer")
        if self.vocab_size > 2 * vocab_size:
            raise UserError(
                f"model.hf={self.hf} has a vocabulary of {self.vocab_size}, more than twice the tokenizer's "
                f"{vocab_size}, so that most of it would never be read: choose another data.tokenizer, or a model "
                "with another vocab_size in its config.json",
                *("model.hf", "data.tokenizer"),
            )
        self._check_fits(
            "max_position_embeddings", sequence_length, "tokens of sequence_length", "sequence_length"
        )
        return self

    def _check_fits(self, name: str, needed: int, unit: str, at_fault: str) -> None:
        least = getattr(text_config(transformers_config(self.architecture)), name, None)
        if isinstance(least, int) and 0 < least < needed:
            raise UserError(
                f"model.hf={self.hf} has {name}={least}, fewer than the {needed} {unit}: choose another "
                f"{at_fault}",
                *(at_fault, "model.hf"),
            )

    @property
    def num_matrix_params(self) -> int:
        """All parameters but gains and biases, those of all experts included."""
        from diloco.models.hugging_face import num_matrix_params

        return num_matrix_params(self, trained=False)

    @property
    def num_trained_params(self) -> int:
        """The parameters that are trained, and so exchanged: those of the whole model, or of the adapters."""
        from diloco.models.hugging_face import num_matrix_params

        return num_matrix_params(self, trained=True)

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """The module of the model's class, and peft for adapters."""
        return (model_class(self.architecture).__module__, *(["peft"] if self.lora else []))

    def export(
        self, model: "LanguageModel", directory: Path, *, context: int, bos_id: int, merged: bool = False
    ) -> str:
        """Write the model as its own class, or its adapters as peft's; `merged` adds them to the weights."""
        from diloco.models.hugging_face import export

        return export(self, model, directory, bos_id=bos_id, merged=merged)


def hugging_face_model(name: str, *, lora: str | None = None) -> HuggingFaceConfig:
    """The config of a model.

    Args:
        name: its directory, with `config.json` and, if training is to start from weights, safetensors; the path of
            a `config.json` alone; or the name of a repository on the Hugging Face Hub.
        lora: the adapters to train, if any.

    Raises:
        UserError: if there is no such model, or it is no causal language model.
    """
    file, is_here = config_file(name)
    values = read_json(file, dict[str, Any], most_bytes=_MOST_BYTES)
    for key in ("_name_or_path", "transformers_version"):  # they say nothing about the model
        values.pop(key, None)
    architecture = json.dumps(values, sort_keys=True)
    try:
        model_class(architecture)
    except UserError as error:
        raise UserError(f"model.hf={name}: {error}", "model.hf") from error
    text = text_config(transformers_config(architecture))
    config = HuggingFaceConfig(
        num_layers=int(getattr(text, "num_hidden_layers", None) or 1),
        width=int(getattr(text, "hidden_size", None) or 1),
        vocab_size=int(getattr(text, "vocab_size", None) or 0),
        architecture=architecture,
        hf=str(expanded(name).absolute()) if is_here else name,
    )
    is_alone = is_here and file == expanded(name)
    has_weights = not is_alone and (not is_here or any((file.parent / weights).exists() for weights in WEIGHTS))
    if not (is_alone or has_weights) and any(file.parent.glob("*.bin")):
        raise UserError(
            f"model.hf={name} has its weights as a pickle: save them as model.safetensors, which "
            "save_pretrained of transformers writes",
            "model.hf",
        )
    return replace(config, weights=sha256(*weight_files(config.hf)) if has_weights else "", lora=lora)
