"""Outer gradient ⇄ bytes: pure functions of tensors, one file a family of codecs.

A codec turns a flat FP32 vector of N elements into a payload, a flat uint8 tensor, and a payload back into the
FP32 vector that it stands for. Every replica decodes the same bytes to the same bits. docs/wire-format.md tells
what each byte means.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

from diloco.errors import NonFiniteError, PayloadError, UserError
from diloco.wire.payload import Codec, Key
from diloco.wire.sparse import DARE, DENSE, FedDropout, TopK

__all__ = ["CODECS", "Codec", "Key", "NonFiniteError", "PayloadError", "codec"]

CODECS: dict[str, type[Codec]] = DENSE | {kind.name: kind for kind in (TopK, FedDropout, DARE)}


def codec(spec: str) -> Codec:
    """The codec of a name with options, such as `e3m0` or `topk:density=0.01,values=e3m0`.

    Raises:
        UserError: naming the codecs, or the options of the codec, that there are.

    >>> codec("e3m0:block=128")
    E3M0(block=128, stochastic=False)
    """
    name, _, options = spec.partition(":")
    if name not in CODECS:
        raise UserError(f"{spec!r} is not a wire format: choose one of {', '.join(CODECS)}")
    kind = CODECS[name]
    types = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    chosen: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in types or key in chosen:
            expected = ", ".join(f"{known}={_READ[types[known]][0]}" for known in types) or "none"
            raise UserError(
                f"{spec!r}: {option!r} is not an option of {name}, or given twice (it has: {expected})"
            )
        wanted, read = _READ[types[key]]
        try:
            chosen[key] = read(value)
        except (KeyError, ValueError):
            raise UserError(f"{spec!r}: {key} must be {wanted}, not {value!r}") from None
    return kind(**chosen)


_READ: dict[type, tuple[str, Callable[[str], Any]]] = {
    int: ("INTEGER", int),
    float: ("NUMBER", float),
    str: ("CODEC", str),
    bool: ("true|false", {"true": True, "false": False}.__getitem__),
}
