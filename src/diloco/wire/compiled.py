"""The block codecs' torch references, compiled into a few kernels for a GPU."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
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
def compiled(wire: Codec, method: str) -> Callable[..., Tensor]:
    """A codec's method, compiled for vectors of any length; the method itself where Triton can't be used."""
    import torch._inductor.config as inductor_config  # takes a second to import, and only a GPU needs it

    if importlib.util.find_spec("triton") is None or not hasattr(inductor_config, "eager_numerics"):
        warnings.warn(
            "Triton, or a PyTorch whose compiler can round as PyTorch itself does, is not installed: "
            "using slower PyTorch code with identical results",
            RuntimeWarning,
            stacklevel=2,
        )
        return getattr(wire, method)
    return compile_alone(wire, method, options=COMPILE_OPTIONS)


def compile_alone(wire: Codec, method: str, **options: Any) -> Callable[..., Tensor]:
    """torch.compile with a code object of its own for each codec and its options.

    torch.compile limits the number of graphs of one code object, and codecs share the code of their methods.
    """
    function = getattr(wire, method).__func__
    code = function.__code__.replace(co_name=f"{method}_{wire.name}")
    alone = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(MethodType(alone, wire), dynamic=True, fullgraph=True, **options)
