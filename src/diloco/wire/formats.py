"""The wire formats without torch: their names, their options, and the lengths of their payloads.

`FORMATS` is the one registry. The classes of the same names in floats.py, integers.py and sparse.py add the maths.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from diloco.errors import UserError
from diloco.schema import from_spelling

HEADER_BYTES = 32
BASE_BYTES = slice(16, 24)
"""The place of the base in the header."""
VERY_LONG = 1 << 100
"""A number of elements at which rounding up to whole blocks and bytes does not show."""
VERSION = 4
"""The version of the wire format, which docs/reference/wire-format.md describes."""


@dataclass(frozen=True)
class Format(ABC):
    """A wire format; its fields are its options. docs/reference/wire-format.md explains every byte."""

    name: ClassVar[str]

    @abstractmethod
    def body_bytes(self, num_elements: int) -> int:
        """Length of the body of `num_elements`."""

    def payload_bytes(self, num_elements: int) -> int:
        """Length of the payload of `num_elements`, header included; it does not depend on their values."""
        return HEADER_BYTES + self.body_bytes(num_elements)

    def gain(self, num_elements: int) -> float:
        """The factor by which encoding multiplies what it keeps of `num_elements`."""
        return 1.0

    @property
    def bits_per_value(self) -> float:
        """Bits of the body for each element of a very long vector.

        >>> parse("e3m0").bits_per_value, parse("int4:block=64").bits_per_value
        (4.03125, 4.5)
        """
        return 8 * self.body_bytes(VERY_LONG) / VERY_LONG

    @property
    def spec(self) -> str:
        """The name with every option, as `parse` reads it."""
        return self._text([field.name for field in fields(self)])

    @property
    def format(self) -> str:
        """The name with the options that a decoder must know: the header holds its CRC-32."""
        return self._text([field.name for field in fields(self) if field.name != "stochastic"])

    def _text(self, options: list[str]) -> str:
        values = [(option, getattr(self, option)) for option in options]
        texts = [f"{option}={str(v).lower() if isinstance(v, bool) else v}" for option, v in values]
        return f"{self.name}:{','.join(texts)}" if texts else self.name


@dataclass(frozen=True)
class Unscaled(Format):
    """Each element in a floating-point format of its own."""

    element_bytes: ClassVar[int]
    """Bytes of an element."""

    def body_bytes(self, num_elements: int) -> int:
        """N times the bytes of an element."""
        return self.element_bytes * num_elements


@dataclass(frozen=True)
class Blocks(Format):
    """A scale for every K elements, and a code of a few bits for each element.

    The body is the scales of all blocks, then the codes, 8 / bits of them per byte, from the low bits up; the
    unused bits of the last byte are 0. Blocks run through the flat vector; the last may be shorter.
    """

    block: int = 256
    """K, elements that share a scale."""
    stochastic: bool = False
    """Round up or down at random, so that a decoded value is right on average, rather than to the nearest."""

    bits: ClassVar[int]
    """Bits of a code."""
    scale_bytes: ClassVar[int]
    """Bytes of a scale."""

    def __post_init__(self) -> None:
        """Refuse a block that ends within a byte."""
        codes_per_byte = 8 // self.bits
        if not 2 <= self.block <= 1 << 16 or self.block % codes_per_byte:
            multiple = f", a multiple of {codes_per_byte}" if codes_per_byte > 1 else ""
            raise UserError(f"{self.name}: block must be from 2 to 65536 elements{multiple}, not {self.block}")

    def body_bytes(self, num_elements: int) -> int:
        """Scales, then codes, each rounded up to whole bytes."""
        return self.scales_bytes(num_elements) + -(-num_elements * self.bits // 8)

    def scales_bytes(self, num_elements: int) -> int:
        """Length of the scales of all blocks."""
        return -(-num_elements // self.block) * self.scale_bytes


class Sparse(Format):
    """Some of N elements; the others are zero. The body is the places, if they are sent, then the values."""

    @property
    @abstractmethod
    def dense(self) -> Format:
        """The format of the kept elements."""

    @abstractmethod
    def num_values(self, num_elements: int) -> int:
        """The number of values that are sent of N elements, computed in double precision."""

    def body_bytes(self, num_elements: int) -> int:
        """The places, if they are sent, and the body of the values."""
        return self.places_bytes(num_elements) + self.dense.body_bytes(self.num_values(num_elements))

    def places_bytes(self, num_elements: int) -> int:
        """Length of the places; 0 where the receiver draws them from the key."""
        return 0


class Placed(Sparse):
    """The places are sent, in the code of Elias and Fano."""

    def places_bytes(self, num_elements: int) -> int:
        """Low bits, then the bit vector."""
        low_bytes, high_bits, _ = self.places_layout(num_elements)
        return low_bytes + -(-high_bits // 8)

    def places_layout(self, num_elements: int) -> tuple[int, int, int]:
        """Bytes of all low bits, bits of the bit vector, low bits of one place."""
        kept = self.num_values(num_elements)
        if not kept:
            return 0, 0, 0
        num_low = (num_elements // kept).bit_length() - 1
        return -(-kept * num_low // 8), kept + (num_elements - 1 >> num_low), num_low


@dataclass(frozen=True)
class Share(Sparse):
    """A share of N elements, in any dense format."""

    density: float = 0.05
    """The share of the elements that is kept, from 2^-32 to 1: exactly, or on average."""
    values: str = "fp32"
    """The name of the dense format of the kept elements; its options are the defaults."""

    def __post_init__(self) -> None:
        if not 2**-32 <= self.density <= 1:  # a mask's numbers have 32 bits
            raise UserError(f"{self.name}: density must be from 2^-32 to 1, not {self.density}")
        dense = [name for name, kind in FORMATS.items() if not issubclass(kind, Sparse)]
        if self.values not in dense:
            raise UserError(f"{self.name}: values={self.values} must be one of {', '.join(dense)}")
        object.__setattr__(self, "density", float(self.density))  # 1 and 1.0 are one format

    @property
    def dense(self) -> Format:
        """The format that `values` names."""
        return FORMATS[self.values]()


class FP32(Unscaled):
    """Four bytes per element, unchanged."""

    name, element_bytes = "fp32", 4


class BF16(Unscaled):
    """Two bytes per element: FP32's range, 8 bits of precision."""

    name, element_bytes = "bf16", 2


class FP16(Unscaled):
    """Two bytes per element: 11 bits of precision down to 6e-5, steps of 6e-8 below, up to ±65504."""

    name, element_bytes = "fp16", 2


class E4M3(Blocks):
    """Sign, 4 exponent and 3 mantissa bits, up to ±448 (the variant without infinities)."""

    name, bits, scale_bytes = "e4m3", 8, 1


class E5M2(Blocks):
    """Sign, 5 exponent and 2 mantissa bits, up to ±57344."""

    name, bits, scale_bytes = "e5m2", 8, 1


@dataclass(frozen=True)
class E2M1(Blocks):
    """Sign, 2 exponent and 1 mantissa bits, one scale for every 32: MXFP4."""

    name, bits, scale_bytes = "e2m1", 4, 1
    block: int = 32


class E3M0(Blocks):
    """Sign and 3 exponent bits."""

    name, bits, scale_bytes = "e3m0", 4, 1


class INT8(Blocks):
    """−127 … 127."""

    name, bits, scale_bytes = "int8", 8, 4


class INT4(Blocks):
    """−7 … 7."""

    name, bits, scale_bytes = "int4", 4, 4


class INT2(Blocks):
    """−1, 0, 1."""

    name, bits, scale_bytes = "int2", 2, 4


class TopK(Share, Placed):
    """The k = ⌈density·N⌉ largest magnitudes."""

    name = "topk"

    def num_values(self, num_elements: int) -> int:
        """k."""
        return min(num_elements, math.ceil(self.density * num_elements))


@dataclass(frozen=True)
class Pulse(TopK):
    """Elements that change the outer parameters as the model sees them, at most `density`·N."""

    name = "pulse"
    mask: Literal["bf16", "fp32"] = "bf16"
    """The dtype in which Θ must change."""


class Halves(Blocks):
    """Sign and half of each value between the smallest and the largest magnitude of its block; not by itself."""

    name, bits, scale_bytes = "halves", 2, 4


@dataclass(frozen=True)
class SparseLoCo(Placed):
    """The k largest magnitudes of each block, at 2 bits."""

    name = "sparseloco"
    block: int = 4096
    """Elements that are compared."""
    k: int = 64
    """Elements of each block that are kept."""

    def __post_init__(self) -> None:
        """Refuse what does not fill bytes, or fit a GPU's registers."""
        if not 4 <= self.k <= self.block <= 8192 or self.k % 4:
            raise UserError(
                f"{self.name}: k must be a multiple of 4 and at most block, and block at most 8192, not "
                f"k={self.k} and block={self.block}"
            )

    @property
    def dense(self) -> Format:
        """Two bits, and two bounds per block."""
        return Halves(block=self.k)

    def num_values(self, num_elements: int) -> int:
        """k per block, and of a shorter last one the same share, rounded up."""
        whole, rest = divmod(num_elements, self.block)
        return whole * self.k + -(-rest * self.k // self.block)


class FedDropout(Share):
    """A random subset, the same on all replicas: each element is kept with the probability `density`."""

    name = "feddropout"

    def num_values(self, num_elements: int) -> int:
        """The room for values: six standard deviations and 16 above the mean number that is kept.

        The number itself depends on the key; a receiver must know the length of a payload without it.
        """
        mean = self.density * num_elements
        return min(num_elements, math.ceil(mean + 6 * math.sqrt(mean)) + 16)


class DARE(FedDropout):
    """A random subset, the same on all replicas, rescaled."""

    name = "dare"

    def gain(self, num_elements: int) -> float:
        """1/density, so that a decoded value is right on average."""
        return 1 / self.density


FORMATS: dict[str, type[Format]] = {
    kind.name: kind
    for kind in (
        FP32,
        BF16,
        FP16,
        E4M3,
        E5M2,
        E2M1,
        E3M0,
        INT8,
        INT4,
        INT2,
        TopK,
        FedDropout,
        DARE,
        SparseLoCo,
        Pulse,
    )
}
"""Every format by its name."""


_OTHER_NAMES = {
    **dict.fromkeys(("4bit", "float4", "fp4"), "e3m0"),
    **dict.fromkeys(("8bit", "float8", "fp8"), "e4m3"),
    **{"mxfp4": "e2m1", "nf4": "int4", "float32": "fp32", "none": "fp32", "bfloat16": "bf16", "float16": "fp16"},
}
"""Names that other programs have for formats such as these."""


def parse(spec: str) -> Format:
    """The format of a name with options, such as `e3m0` or `topk:density=0.01,values=e3m0`.

    Raises:
        UserError: naming the formats, or the options of the format, that exist.

    >>> parse("e3m0:block=128").payload_bytes(1_000_000)
    507845
    """
    name, _, _ = spec.partition(":")
    if name not in FORMATS:
        meant = f"did you mean {_OTHER_NAMES[name]}? There are" if name in _OTHER_NAMES else "choose one of"
        raise UserError(f"{spec!r} is not a codec: {meant} {', '.join(FORMATS)}")
    return from_spelling(FORMATS[name], spec, words="CODEC")
