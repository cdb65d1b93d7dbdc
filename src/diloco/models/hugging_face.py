"""A causal language model of `transformers` as one of ours: trained without dropout, from its own weights.

Shapes: B sequences, T tokens, V vocabulary, R rows taken from B.
"""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diloco.errors import UserError
from diloco.files import sha256, writing
from diloco.fragments import block_paths
from diloco.models.language_model import LanguageModel
from diloco.models.pretrained import model_class, quiet, transformers_config, weight_files, with_adapters

if TYPE_CHECKING:
    from diloco.models.hugging_face_config import HuggingFaceConfig


class HuggingFaceModel(LanguageModel):
    """Tokens to the logits of the next token.

    Its state are the parameters that are trained, each once: no frozen weights, no buffers, no second name of a
    tied parameter.

    Args:
        model: of `transformers`, or of peft around one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(_whole(model).forward).parameters
        self._has_cache = "past_key_values" in takes and not getattr(_whole(model), "_is_stateful", False)
        self._uses_cache = "use_cache" in takes
        self.register_state_dict_post_hook(_drop_what_is_not_trained)
        self.train()

    @property
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The transformer blocks, where they can be found."""
        return nn.ModuleList(self.get_submodule(path) for path in block_paths(self))

    def train(self, mode: bool = True) -> "HuggingFaceModel":
        """Do nothing but leave dropout off, so that a run that is resumed has the bits of one that was not."""
        super().train(False)
        return self

    def forward(self, tokens_BxT: Tensor, cache: "HuggingFaceCache | None" = None) -> Tensor:
        """The logits (B, T, V) of the next token at each position; with a cache, they follow those before."""
        options: dict[str, Any] = {"use_cache": cache is not None} if self._uses_cache else {}
        if cache is not None:
            options["past_key_values"] = cache.values
        return self.model(input_ids=tokens_BxT, **options).logits

    def new_cache(self) -> "HuggingFaceCache | None":
        """An empty cache; None for a recurrent model."""
        if not self._has_cache:
            return None
        from transformers.cache_utils import DynamicCache

        return HuggingFaceCache(DynamicCache(config=_whole(self.model).config))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take up a state; what it does not hold stays as it is."""
        if strict and (missing := self.state_dict().keys() ^ state_dict.keys()):
            raise RuntimeError(f"the state of another model: {', '.join(sorted(missing)[:8])}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class HuggingFaceCache:
    """Keys and values of the tokens that a model has read in each of B sequences."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def select(self, rows_R: Tensor) -> "HuggingFaceCache":
        """A cache of R sequences, each a copy of one of the B."""
        selected = deepcopy(self.values)
        selected.batch_select_indices(rows_R)
        return HuggingFaceCache(selected)


def _whole(model: nn.Module) -> Any:
    """The model of `transformers`, inside of peft's if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def _drop_what_is_not_trained(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    trained = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in trained]:
        del state[name]


def build(config: "HuggingFaceConfig", *, seed: int) -> HuggingFaceModel:
    """The model of a config, its weights drawn; with adapters those of the config's place, but on `meta`."""
    is_read = config.lora is not None and torch.get_default_device().type != "meta"
    return _model(config, is_read=is_read, seed=seed)


def initial(config: "HuggingFaceConfig", *, seed: int) -> HuggingFaceModel:
    """The model with the weights from which training starts.

    Raises:
        UserError: if they are gone, or others.
    """
    return _model(config, is_read=bool(config.weights), seed=seed)


def _model(config: "HuggingFaceConfig", *, is_read: bool, seed: int) -> HuggingFaceModel:
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _read(config) if is_read else _drawn(config)
        return HuggingFaceModel(model if config.lora is None else with_adapters(model, config.lora))


def _drawn(config: "HuggingFaceConfig") -> nn.Module:
    values = deepcopy(transformers_config(config.architecture))
    try:
        return model_class(config.architecture)._from_config(values, dtype=torch.float32)
    except Exception as error:  # each class checks its config itself, by errors of any class
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"model.hf={config.hf}: transformers can't build it ({reason})", "model.hf") from error


def _read(config: "HuggingFaceConfig") -> nn.Module:
    files = weight_files(config.hf)
    if (digest := sha256(*files)) != config.weights:
        raise UserError(
            f"model.hf={config.hf} has other weights than those that the run began with (SHA-256 {digest:.16}, "
            f"and not {config.weights:.16}): bring them back",
            "model.hf",
        )
    try:
        model, info = model_class(config.architecture).from_pretrained(
            files[0].parent,
            config=deepcopy(transformers_config(config.architecture)),
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.hf={config.hf}: its weights can't be read: {reason}", "model.hf") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model.hf={config.hf}: its weights lack {len(missing)} parameters, such as {missing[0]}", "model.hf"
        )
    if config.lora is None:
        _refuse_buffers(config, model)
    return model


def _refuse_buffers(config: "HuggingFaceConfig", model: nn.Module) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := [name for name in model.state_dict() if name not in parameters]:
        raise UserError(
            f"model.hf={config.hf} keeps {buffers[0]} in a buffer, which is neither trained nor exchanged: take "
            "adapters, with model.lora",
            *("model.hf", "model.lora"),
        )


@cache
def num_matrix_params(config: "HuggingFaceConfig", *, trained: bool) -> int:
    """The parameters of two dimensions or more, or those that are trained."""
    with torch.device("meta"):
        model = build(config, seed=0)
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and (p.requires_grad or not trained))


def export(
    config: "HuggingFaceConfig", model: LanguageModel, directory: Path, *, bos_id: int, merged: bool
) -> str:
    """Write a model, or its adapters, as `transformers` or peft load them; see `ModelConfig.export`."""
    if merged and config.lora is None:
        raise UserError("merged means nothing to a model that has no adapters: leave it out", "merged")
    assert isinstance(model, HuggingFaceModel), "the config is of this family"
    inner: Any = model.model
    with quiet(), writing(directory):
        if config.lora is not None and not merged:
            inner.peft_config["default"].base_model_name_or_path = config.hf
            inner.save_pretrained(directory, save_embedding_layers=False)
            sentence = f"The adapters belong to the model `{config.hf}`, which peft reads from there."
        else:
            inner = inner.merge_and_unload() if merged else inner
            for one in filter(None, (inner.config, getattr(inner, "generation_config", None))):
                one.bos_token_id = one.eos_token_id = bos_id
            inner.save_pretrained(directory)
            sentence = f"The class is `{type(inner).__name__}`."
        mode = next(directory.glob("*config.json")).stat().st_mode
        for path in directory.glob("*.safetensors"):
            path.chmod(mode)  # the library makes files that nobody else may read
    return sentence
