"""Outer gradient ⇄ bytes: pure functions of tensors, one file per family of codecs.

A codec turns a flat FP32 vector of N elements into a payload, a flat uint8 tensor, and a payload back into the
FP32 vector that it stands for. Every replica decodes the same bytes to the same bits; every byte is explained in
docs/reference/wire-format.md. The names below are loaded when they are first used, so that `diloco.wire.formats`
needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.wire.codecs import CODECS, Codec, Key, codec

__all__ = ["CODECS", "Codec", "Key", "codec"]


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in __all__:
        raise AttributeError(f"module 'diloco.wire' has no attribute {name!r}")
    from diloco.wire import codecs

    return getattr(codecs, name)
