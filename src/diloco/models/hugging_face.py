"""A causal language model of `transformers` as one of ours, trained without dropout.

Shapes: B sequences, T tokens, V vocabulary, R rows taken from B.
"""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from diloco.fragments import block_paths
from diloco.models.language_model import LanguageModel


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
        is_recurrent = getattr(_whole(model), "_is_stateful", False)
        names = () if is_recurrent else ("cache", "past_key_values")  # from transformers 5.24 on, and before
        self._cache_name = next((name for name in names if name in takes), None)
        self._uses_cache = "use_cache" in takes
        self.register_state_dict_post_hook(_drop_what_is_not_trained)
        self.train()

    @property
    def blocks(self) -> nn.ModuleList:  # pyrefly: ignore[bad-override]
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
            assert self._cache_name is not None, "there is no cache"
            options[self._cache_name] = cache.values
        return self.model(input_ids=tokens_BxT, **options).logits

    def new_cache(self) -> "HuggingFaceCache | None":
        """An empty cache; None for a recurrent model."""
        if self._cache_name is None:
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
        selected.reorder_cache(rows_R)
        return HuggingFaceCache(selected)


def _whole(model: nn.Module) -> Any:
    """The model of `transformers`, inside of peft's if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyrefly: ignore[not-callable]


def _drop_what_is_not_trained(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    trained = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in trained]:
        del state[name]
