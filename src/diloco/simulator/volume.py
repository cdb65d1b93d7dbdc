"""How many bits a parameter takes on the wire, told without loading the codecs; headers apart."""

from diloco.errors import UserError

_UNSCALED = {"fp32": 32, "bf16": 16, "fp16": 16}
# Bits of a code, bits of a scale, elements a block.
_BLOCKS = {
    "e4m3": (8, 8, 256),
    "e5m2": (8, 8, 256),
    "e2m1": (4, 8, 32),
    "e3m0": (4, 8, 256),
    "int8": (8, 32, 256),
    "int4": (4, 32, 256),
    "int2": (2, 32, 256),
}
_SPARSE = ("topk", "feddropout", "dare")
WIRES = (*_UNSCALED, *_BLOCKS, *_SPARSE)


def bits_per_param(wire: str) -> float:
    """Of a codec by its name and options, as `diloco.codec` reads them.

    Raises:
        UserError: naming the codecs that there are, or the option that can't be read.

    >>> bits_per_param("e3m0"), bits_per_param("int4:block=64")
    (4.03125, 4.5)
    """
    name, _, text = wire.partition(":")
    options = {key: value for key, _, value in (option.partition("=") for option in text.split(",") if option)}
    try:
        return _bits(name, options)
    except (KeyError, ValueError, ZeroDivisionError):
        raise UserError(
            f"{wire!r} is no wire format with options that it has: choose one of {', '.join(WIRES)}"
        ) from None


def _bits(name: str, options: dict[str, str]) -> float:
    if name in _BLOCKS:
        code, scale, block = _BLOCKS[name]
        block = int(options.pop("block", block))
        known = 2 <= block <= 1 << 16 and block * code % 8 == 0
        known &= options.pop("stochastic", "false") in ("true", "false")
        bits = code + scale / block
    elif name in _SPARSE:
        density, values = float(options.pop("density", "0.05")), options.pop("values", "fp32")
        known = 0 < density <= 1 and values not in _SPARSE
        bits = density * _bits(values, {}) + (_place_bits(density) if name == "topk" else 0)
    else:
        known, bits = True, float(_UNSCALED[name])
    if options or not known:
        raise ValueError
    return bits


def _place_bits(density: float) -> float:
    """Of Top-K's places, in the code of Elias and Fano: a low part, and a bit vector for the rest."""
    low = int(1 / density).bit_length() - 1
    return density * (low + 1) + 2.0**-low
