"""Outer gradient ⇄ bytes: pure functions of tensors, one file a family of codecs.

A codec turns a flat FP32 vector of N elements into a payload, a flat uint8 tensor, and a payload back into the
FP32 vector that it stands for. Every replica decodes the same bytes to the same bits.
"""

from dataclasses import fields
from typing import Protocol

from torch import Tensor

from diloco.wire.floats import BF16, E3M0, FP32

CODECS: dict[str, type[FP32] | type[BF16] | type[E3M0]] = {"fp32": FP32, "bf16": BF16, "e3m0": E3M0}


class Codec(Protocol):
    """What a wire format has to offer."""

    def encode(self, delta_N: Tensor) -> Tensor:
        """The payload of a flat, finite FP32 vector: uint8, `payload_bytes(N)` long, on the same device."""
        ...

    def decode(self, payload: Tensor, num_elements: int) -> Tensor:
        """The FP32 vector of `num_elements` that a payload stands for.

        Raises:
            ValueError: if the payload is not `payload_bytes(num_elements)` long.
        """
        ...

    def payload_bytes(self, num_elements: int) -> int:
        """Length of the payload of `num_elements`; it does not depend on their values."""
        ...


def codec(spec: str) -> Codec:
    """The codec of a name with options, such as `e3m0` or `e3m0:block=128`.

    Raises:
        ValueError: naming the codecs, or the options of the codec, that there are.

    >>> codec("e3m0:block=128")
    E3M0(block=128)
    """
    name, _, options = spec.partition(":")
    if name not in CODECS:
        raise ValueError(f"wire={spec!r} is not a wire format: choose one of {', '.join(CODECS)}")
    kind = CODECS[name]
    known = {field.name for field in fields(kind)}
    values: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in known or not value.isdecimal():
            expected = ", ".join(f"{field}=INTEGER" for field in sorted(known)) or "none"
            raise ValueError(f"wire={spec!r}: {option!r} is not an option of {name} (it has: {expected})")
        values[key] = int(value)
    return kind(**values)
