"""The code of a Triton kernel for a GPU, compiled where there is none."""

from collections.abc import Mapping
from typing import Any


def ptx_of(
    function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], *, capability: int, options: dict[str, Any]
) -> str:
    """PTX of a kernel with arguments of these types, `fixed` being those that are constants of the code."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    places = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(function, signature, constexprs=places)
    return compiled(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
