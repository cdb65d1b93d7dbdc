"""The codecs by their names."""

from dataclasses import asdict

from diloco.wire import floats, integers, sparse
from diloco.wire.formats import FORMATS, parse
from diloco.wire.payload import Codec, Key

__all__ = ["CODECS", "Codec", "Key", "codec"]

_CLASSES = {kind.name: kind for family in (floats, integers, sparse) for kind in family.CODECS}

CODECS: dict[str, type[Codec]] = {name: _CLASSES[name] for name in FORMATS}
"""The class that encodes and decodes each format."""


def codec(spec: str) -> Codec:
    """The codec of a name with options, such as `e3m0` or `topk:density=0.01,values=e3m0`.

    Raises:
        UserError: naming the codecs, or the options of the codec, that exist.

    >>> codec("e3m0:block=128")
    E3M0(block=128, stochastic=False)
    """
    chosen = parse(spec)
    return CODECS[chosen.name](**asdict(chosen))
