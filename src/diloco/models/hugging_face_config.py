"""A causal language model of `transformers`: its config, its files, here or on the Hub, and its class. No torch.

The architecture is the content of the model's `config.json`, and travels in the run's config: a run is evaluated
and exported without the directory that it began from, unless it has trained adapters alone.
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Self

from diloco.errors import FileError, UserError
from diloco.files import expanded, reading, require, requiring, sha256, writing
from diloco.hub import hub_file
from diloco.models.spec import ModelConfig
from diloco.schema import converted, read_bytes, read_json

with requiring("tyro", extra="train"):
    import tyro

if TYPE_CHECKING:
    from torch import nn

    from diloco.models.language_model import LanguageModel

WEIGHTS = ("model.safetensors", _INDEX := "model.safetensors.index.json")
"""Files of weights, in the order in which transformers looks for them."""
_FIXED = tyro.conf.Fixed
_MOST_BYTES = 1 << 20
"""Size of the largest file that is read: no config takes as much."""


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
        if self.lora is not None:
            parse_lora(self.lora)
            if not self.weights:
                raise UserError(
                    f"model.lora={self.lora} adapts weights, and model.hf={self.hf} has none: leave it out",
                    *("model.lora", "model.hf"),
                )

    def build(self, *, seed: int) -> "LanguageModel":
        """The model; the seed draws its weights, but where adapters alone are trained those are read from `hf`."""
        import torch

        is_read = self.lora is not None and torch.get_default_device().type != "meta"
        return self._built(is_read=is_read, seed=seed)

    def initial(self, *, seed: int) -> "LanguageModel":
        """The model with the weights of `hf`, if it has any.

        Raises:
            UserError: if they are gone, or others.
        """
        return self._built(is_read=bool(self.weights), seed=seed)

    def _built(self, *, is_read: bool, seed: int) -> "LanguageModel":
        import torch

        from diloco.models.hugging_face import HuggingFaceModel

        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _read(self) if is_read else _drawn(self)
            return HuggingFaceModel(model if self.lora is None else _with_adapters(model, self.lora))

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
        least = getattr(transformers_config(self.architecture).get_text_config(), name, None)
        if isinstance(least, int) and 0 < least < needed:
            raise UserError(
                f"model.hf={self.hf} has {name}={least}, fewer than the {needed} {unit}: choose another "
                f"{at_fault}",
                *(at_fault, "model.hf"),
            )

    @property
    def num_matrix_params(self) -> int:
        """All parameters but gains and biases, those of all experts included."""
        return sum(size for size, num_dims, _ in _sizes(self) if num_dims > 1)

    @property
    def num_params(self) -> int:
        """All parameters, those of all experts and of the adapters included."""
        return sum(size for size, _, _ in _sizes(self))

    @property
    def least_bytes(self) -> int:
        """The parameters take at least this memory: those that a library has quantized may have 4 bits."""
        is_quantized = "quantization_config" in json.loads(self.architecture)
        return super().least_bytes // (8 if is_quantized else 1)

    @property
    def num_trained_params(self) -> int:
        """The parameters that are trained, and so exchanged: those of the whole model, or of the adapters."""
        return sum(size for size, _, is_trained in _sizes(self) if is_trained)

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """The module of the model's class, and peft for adapters."""
        return (model_class(self.architecture).__module__, *(["peft"] if self.lora else []))

    def published_name(self, name: str) -> str:
        """The name of a parameter in the model of `transformers`, or in the file of adapters of peft."""
        name = name.removeprefix("model.")
        # An embedding's adapters are parameters, not modules: their names end with ".default".
        return f"{name}.".replace(".default.", ".")[:-1] if self.lora else name

    def published_files(self) -> dict[str, bytes]:
        """The files with which `transformers` or peft reads weights of these names, by name."""
        if self.lora is None:
            return {"config.json": self.architecture.encode()}
        with quiet(), TemporaryDirectory() as folder:
            _adapter_config(self.lora, base_model_name_or_path=self.hf, inference_mode=True).save_pretrained(
                folder
            )
            return {path.name: path.read_bytes() for path in Path(folder).glob("adapter_config.json")}

    def export(
        self, model: "LanguageModel", directory: Path, *, context: int, bos_id: int, merged: bool = False
    ) -> str:
        """Write the model as its own class, or its adapters as peft's; `merged` adds them to the weights."""
        if merged and self.lora is None:
            raise UserError("merged means nothing to a model that has no adapters: leave it out", "merged")
        inner: Any = model.model  # of `HuggingFaceModel`
        with quiet(), writing(directory):
            if self.lora is not None and not merged:
                inner.peft_config["default"].base_model_name_or_path = self.hf
                inner.save_pretrained(directory, save_embedding_layers=False)
                sentence = f"The adapters belong to the model `{self.hf}`, which peft reads from there."
            else:
                inner = _merged(self, self.lora, inner) if merged and self.lora else inner
                for one in filter(None, (inner.config, getattr(inner, "generation_config", None))):
                    one.bos_token_id = one.eos_token_id = bos_id
                inner.save_pretrained(directory)
                sentence = f"The class is `{type(inner).__name__}`."
            mode = next(directory.glob("*config.json")).stat().st_mode
            for path in directory.glob("*.safetensors"):
                path.chmod(mode)  # the library makes files that nobody else may read
        return sentence


def _merged(config: HuggingFaceConfig, lora: str, adapted: Any) -> Any:
    """The model with its adapters added to the weights; weights of 4 bits are widened to FP32 first."""
    values = json.loads(config.architecture)
    if values.pop("quantization_config", None) is None:
        return _added(adapted)
    import torch

    with torch.device("meta"):  # the library does not save a model that it has widened itself
        plain: Any = _drawn(replace(config, architecture=json.dumps(values)))
    widened: Any = _read(config)
    plain.load_state_dict(widened.dequantize().float().state_dict(), assign=True)
    plain.tie_weights()
    plain = _with_adapters(plain, lora)
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    plain.load_state_dict(trained, strict=False)
    return _added(plain)


def _added(adapted: Any) -> Any:
    """The whole model; a weight that is tied to one without an adapter first becomes a weight of its own."""
    from torch import nn

    for module in adapted.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.weight = nn.Parameter(module.base_layer.weight.detach().clone())
    return adapted.merge_and_unload()


@cache
def _sizes(config: HuggingFaceConfig) -> list[tuple[int, int, bool]]:
    """The elements and dimensions of each parameter, and True where it is trained."""
    import torch

    with torch.device("meta"):
        model = config.build(seed=0)
    return [(parameter.numel(), parameter.dim(), parameter.requires_grad) for parameter in model.parameters()]


def _drawn(config: HuggingFaceConfig) -> "nn.Module":
    """The model with initial parameters of its own."""
    import torch

    values = deepcopy(transformers_config(config.architecture))
    try:
        return model_class(config.architecture)._from_config(values, dtype=torch.float32)
    except Exception as error:  # each class checks its config itself, by errors of any class
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"model.hf={config.hf}: transformers can't build it ({reason})", "model.hf") from error


def _read(config: HuggingFaceConfig) -> "nn.Module":
    """The model with the weights that the run began with."""
    import torch
    from safetensors import safe_open

    files = weight_files(config.hf)
    if (digest := sha256(*files)) != config.weights:
        raise UserError(
            f"model.hf={config.hf} has other weights than those that the run began with (SHA-256 {digest:.16}, "
            f"and not {config.weights:.16}): bring them back",
            "model.hf",
        )
    for file in files:  # the library would not say which one is damaged
        with reading(file, "model.hf"), safe_open(file, framework="pt"):
            pass
    with reading(f"model.hf={config.hf}: its weights", "model.hf"):
        model, info = model_class(config.architecture).from_pretrained(
            files[0].parent,
            config=deepcopy(transformers_config(config.architecture)),
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model.hf={config.hf}: its weights lack {len(missing)} parameters, such as {missing[0]}", "model.hf"
        )
    if config.lora is None:
        _refuse_buffers(config, model)
        _refuse_untied(config, model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # an evaluation would repack weights, and end all gradients
    return model


def _refuse_buffers(config: HuggingFaceConfig, model: "nn.Module") -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := [name for name in model.state_dict() if name not in parameters]:
        raise UserError(
            f"model.hf={config.hf} keeps {buffers[0]} in a buffer, which is neither trained nor exchanged: take "
            "adapters, with model.lora",
            *("model.hf", "model.lora"),
        )


def _refuse_untied(config: HuggingFaceConfig, model: "nn.Module") -> None:
    import torch

    with torch.device("meta"):
        names = {name for name, _ in _drawn(config).named_parameters()}
    if untied := [name for name, _ in model.named_parameters() if name not in names]:
        raise UserError(
            f"model.hf={config.hf} has values of its own in {untied[0]}, which its config.json ties to another: "
            "set tie_word_embeddings to false there",
            "model.hf",
        )


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
    with reading(file):
        content = json.loads(read_bytes(file, most_bytes=_MOST_BYTES), object_hook=_number)
    values = converted(content, dict[str, Any], source=str(file))
    for key in ("_name_or_path", "transformers_version"):  # they say nothing about the model
        values.pop(key, None)
    architecture = json.dumps(values, sort_keys=True)
    try:
        model_class(architecture)
    except UserError as error:
        raise UserError(f"model.hf={name}: {error}", "model.hf") from error
    text = transformers_config(architecture).get_text_config()
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


def _number(part: dict[str, Any]) -> Any:
    """The number that transformers writes as {"__float__": "Infinity"}; any other part as it is."""
    return float(part["__float__"]) if [*part] == ["__float__"] else part


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


def weight_files(hf: str) -> list[Path]:
    """The files of a model's weights; those of the Hub are downloaded if they are not here.

    Args:
        hf: the model's directory, or its name on the Hub.

    Raises:
        UserError: if they are gone.
    """
    folder = expanded(hf)
    hub = None if folder.exists() else hf
    with reading(f"model.hf={hf}: its weights", "model.hf"):
        first = _file(folder, hub, *WEIGHTS)
        names = [first.name]
        if first.name == _INDEX:
            index = read_json(first, dict[str, Any])
            names = sorted({*converted(index.get("weight_map"), dict[str, str], source=str(first)).values()})
            if any(Path(shard).name != shard for shard in names):
                raise FileError(f"{first} can't be read: a shard lies outside of its directory")
        return [_file(folder, hub, shard) for shard in names]


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
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(architecture)
    if (kind := values.get("model_type")) not in CONFIG_MAPPING:
        raise UserError(f"transformers knows no model_type={kind!r:.80} here: its config.json must name one")
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # each config checks itself, by errors of any class
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers refuses its config.json: {reason}") from error


@cache
def model_class(architecture: str) -> Any:
    """The class of `transformers` that computes a causal language model of this architecture.

    Raises:
        UserError: if there is none.
    """
    config = transformers_config(architecture)
    from transformers.models.auto import modeling_auto as auto

    # The types that fill in masked tokens read those that follow, too, but where they are told not to.
    reads_ahead = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    is_known = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_known or reads_ahead or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"a model of type {config.model_type} is no causal language model: choose another")
    return auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@contextmanager
def quiet() -> Iterator[None]:
    """Have `transformers` and peft say nothing but errors."""
    from transformers.utils import logging

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


_OPTIONS = "rank=INTEGER, alpha=NUMBER, targets=NAME+NAME"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W + (alpha / rank) · B A in the place of each weight W of the targets; B and A are trained, and W is not."""

    rank: int
    """Rows of A, and columns of B."""
    alpha: float
    """Scale of the adapters, times the rank."""
    targets: tuple[str, ...] = ()
    """Last names of the modules that get adapters; none means every linear one but the head."""


def parse_lora(text: str) -> Lora:
    """The settings that a text names: the rank, and where they differ from the defaults, alpha and targets.

    Raises:
        UserError: naming the options that exist.

    >>> parse_lora("rank=8")
    Lora(rank=8, alpha=16.0, targets=())
    >>> parse_lora("rank=4,alpha=4,targets=q_proj+v_proj").targets
    ('q_proj', 'v_proj')
    """
    options: dict[str, str] = {}
    for option in text.split(","):
        key, _, value = option.partition("=")
        if key not in ("rank", "alpha", "targets") or key in options:
            raise _refusal(text, f"{option!r} is not an option of it, or given twice")
        options[key] = value
    try:
        rank = int(options["rank"])
        alpha = float(options.get("alpha", 2 * rank))
    except (KeyError, ValueError):
        raise _refusal(text, "it needs a rank, and numbers for rank and alpha") from None
    targets = tuple(options["targets"].split("+")) if "targets" in options else ()
    if not (1 <= rank < 1 << 16 and 0 < alpha < math.inf and all(targets)):
        raise _refusal(text, "rank must be from 1 to 65535, alpha above 0, and no target empty")
    return Lora(rank=rank, alpha=alpha, targets=targets)


def _refusal(text: str, reason: str) -> UserError:
    return UserError(f"model.lora={text}: {reason} (it has: {_OPTIONS})", "model.lora")


def _with_adapters(model: "nn.Module", text: str) -> Any:
    """The model of `transformers` as peft's, with adapters drawn by torch's generator; nothing else is trained.

    Raises:
        UserError: if peft is not installed, or the model has no such targets.
    """
    peft, settings = require("peft", extra="lora"), _adapter_config(text)
    modules = [f".{name}" for name, _ in model.named_modules()]
    for target in parse_lora(text).targets:  # peft passes over one beside others
        if not any(name.endswith(f".{target}") for name in modules):
            raise UserError(f"model.lora={text} does not suit the model, which has no {target!r}", "model.lora")
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        reason = str(error).splitlines()[0][:300]
        raise UserError(f"model.lora={text} does not suit the model: {reason}", "model.lora") from error


def _adapter_config(text: str, **options: Any) -> Any:
    peft, lora = require("peft", extra="lora"), parse_lora(text)
    targets = [*lora.targets] or "all-linear"
    sizes = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0}
    return peft.LoraConfig(**sizes, target_modules=targets, task_type="CAUSAL_LM", **options)
