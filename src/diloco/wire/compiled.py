"""The block codecs' torch references, compiled into a few kernels for a GPU."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from diloco.wire.payload import Codec

COMPILE_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # no fused multiply-add
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""Options that make inductor round as eager torch does."""


@functools.cache
def compiled(kind: type[Codec], method: str) -> Callable[..., Tensor]:
    """A method of a codec's class, compiled; the method itself where Triton can't be used."""
    import torch._inductor.config as inductor_config  # takes a second to import, and only a GPU needs it

    if importlib.util.find_spec("triton") is None or not hasattr(inductor_config, "eager_numerics"):
        warnings.warn(
            "Triton, or a PyTorch whose compiler can round as PyTorch itself does, is not installed: "
            "using slower PyTorch code with identical results",
            RuntimeWarning,
            stacklevel=2,
        )
        return getattr(kind, method)
    return compile_alone(kind, method, options=COMPILE_OPTIONS)


def compile_alone(kind: type[Codec], method: str, **options: Any) -> Callable[..., Tensor]:
    """Compile a method for this class alone, for any block and length.

    torch.compile limits the graphs of one code object, and the codecs' classes share one: here each gets a copy.
    """
    function = getattr(kind, method)
    code = function.__code__.replace(co_name=f"{method}_{kind.name}")
    alone = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(alone, dynamic=True, fullgraph=True, **options)
