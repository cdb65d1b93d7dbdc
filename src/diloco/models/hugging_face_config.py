"""A causal language model of `transformers`: its config, its place, and the look-up of both. No torch.

The architecture is the content of the model's `config.json`, and travels in the run's config: a run is evaluated
and exported without the directory that it began from, unless it has trained adapters alone.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import tyro

from diloco.errors import FileError, UserError
from diloco.files import expanded, require, sha256
from diloco.hub import hub_file
from diloco.models.lora import parse_lora
from diloco.models.spec import ModelConfig
from diloco.schema import read_json

if TYPE_CHECKING:
    from diloco.models.language_model import LanguageModel

_FIXED = tyro.conf.Fixed
_WEIGHTS = ("model.safetensors", _INDEX := "model.safetensors.index.json")
"""In the order in which transformers looks for them."""
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
        return self._module().build(self, seed=seed)

    def initial(self, *, seed: int) -> "LanguageModel":
        """The model with the weights of `hf`, if it has any."""
        return self._module().initial(self, seed=seed)

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
        least = getattr(_text(transformers_config(self.architecture)), name, None)
        if isinstance(least, int) and 0 < least < needed:
            raise UserError(
                f"model.hf={self.hf} has {name}={least}, fewer than the {needed} {unit}: choose another "
                f"{at_fault}",
                *(at_fault, "model.hf"),
            )

    @property
    def num_matrix_params(self) -> int:
        """All parameters but gains and biases, those of all experts included."""
        return self._module().num_matrix_params(self, trained=False)

    @property
    def num_trained_params(self) -> int:
        """The parameters that are trained, and so exchanged: those of the whole model, or of the adapters."""
        return self._module().num_matrix_params(self, trained=True)

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """The module of the model's class, and peft for adapters."""
        modules = (model_class(self.architecture).__module__, *(["peft"] if self.lora else []))
        return ("diloco.models.hugging_face", *modules)

    def export(
        self, model: "LanguageModel", directory: Path, *, context: int, bos_id: int, merged: bool = False
    ) -> str:
        """Write the model as its own class, or its adapters as peft's; `merged` adds them to the weights."""
        return self._module().export(self, model, directory, bos_id=bos_id, merged=merged)

    @staticmethod
    def _module() -> Any:
        # By name: it imports this file, and needs torch.
        return import_module("diloco.models.hugging_face")


def hugging_face_model(name: str, *, lora: str | None = None) -> HuggingFaceConfig:
    """The config of a model.

    Args:
        name: its directory, with `config.json` and, if training is to start from weights, safetensors; the path of
            a `config.json` alone; or the name of a repository on the Hugging Face Hub.
        lora: the adapters to train, if any.

    Raises:
        UserError: if there is no such model, or it is no causal language model.
    """
    file, is_here = _config_file(name)
    values = read_json(file, dict[str, Any], most_bytes=_MOST_BYTES)
    for key in ("_name_or_path", "transformers_version"):  # they say nothing about the model
        values.pop(key, None)
    architecture = json.dumps(values, sort_keys=True)
    try:
        model_class(architecture)
    except UserError as error:
        raise UserError(f"model.hf={name}: {error}", "model.hf") from error
    text = _text(transformers_config(architecture))
    config = HuggingFaceConfig(
        num_layers=int(getattr(text, "num_hidden_layers", None) or 1),
        width=int(getattr(text, "hidden_size", None) or 1),
        vocab_size=int(getattr(text, "vocab_size", None) or 0),
        architecture=architecture,
        hf=str(expanded(name).absolute()) if is_here else name,
    )
    if is_here and file != expanded(name) and not any((file.parent / weights).exists() for weights in _WEIGHTS):
        if any(file.parent.glob("*.bin")):
            raise UserError(
                f"model.hf={name} has its weights as a pickle: save them as model.safetensors, which "
                "save_pretrained of transformers writes",
                "model.hf",
            )
        return replace(config, lora=lora)
    if is_here and file == expanded(name):
        return replace(config, lora=lora)
    return replace(config, weights=sha256(*weight_files(config)), lora=lora)


def _config_file(name: str) -> tuple[Path, bool]:
    """The file of a model's config, and whether it is this machine's, not the Hub's."""
    path = expanded(name)
    sentence = (
        f"model.hf={name} is neither a directory with a config.json, nor such a file, nor the name of a model on "
        "the Hugging Face Hub"
    )
    if path.is_file():
        return path, True
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(sentence, "model.hf")
        return path / "config.json", True
    try:
        downloaded = hub_file(name, ("config.json",))
    except UserError as error:
        raise UserError(f"{sentence}; {error}", "model.hf") from error
    if downloaded is None:
        raise UserError(sentence, "model.hf")
    return downloaded, False


def weight_files(config: HuggingFaceConfig) -> list[Path]:
    """The files of the weights that training starts from; those of the Hub are downloaded if they are not here.

    Raises:
        UserError: if they are gone.
    """
    folder = expanded(config.hf)
    hub = None if folder.exists() else config.hf
    try:
        first = _file(folder, hub, *_WEIGHTS)
        names = [first.name]
        if first.name == _INDEX:
            index = read_json(first, dict[str, Any])
            names = sorted({str(shard) for shard in index.get("weight_map", {}).values()})
            if any(Path(shard).name != shard for shard in names):
                raise FileError(f"{first} can't be read: a shard lies outside of its directory")
        return [_file(folder, hub, shard) for shard in names]
    except UserError as error:
        raise UserError(f"model.hf={config.hf}: its weights can't be read: {error}", "model.hf") from error


def _file(folder: Path, hub: str | None, *names: str) -> Path:
    if hub is not None:
        downloaded = hub_file(hub, names)
        if downloaded is None:
            raise UserError("the directory is gone")
        return downloaded
    here = next((folder / name for name in names if (folder / name).is_file()), None)
    if here is None:
        raise UserError(f"{folder} has no {' or '.join(names)}")
    return here


@cache
def transformers_config(architecture: str) -> Any:
    """The config object of `transformers`; to be copied before it is changed.

    Raises:
        UserError: if `transformers` is not installed, does not know the model's type, or refuses a value.
    """
    require("transformers", extra="transformers")
    kinds = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    values = json.loads(architecture)
    if (kind := values.get("model_type")) not in kinds:
        raise UserError(f"transformers knows no model_type={kind!r:.80} here: its config.json must name one")
    try:
        with quiet():
            return kinds[kind].from_dict(values)
    except Exception as error:  # each config checks itself, by errors of any class
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers refuses its config.json: {reason}") from error


def _text(config: Any) -> Any:
    """The part of a config that describes its language model."""
    return config.get_text_config()


@cache
def model_class(architecture: str) -> Any:
    """The class of `transformers` that computes a causal language model of this architecture.

    Raises:
        UserError: if there is none.
    """
    config = transformers_config(architecture)
    auto = import_module("transformers.models.auto.modeling_auto")
    # The types that fill in masked tokens read those that follow, too, but where they are told not to.
    reads_ahead = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    is_known = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_known or reads_ahead or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"a model of type {config.model_type} is no causal language model: choose another")
    return auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@contextmanager
def quiet() -> Iterator[None]:
    """Have `transformers` and peft say nothing but errors."""
    logging = import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
