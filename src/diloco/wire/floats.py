"""Floating-point codecs: fp32, bf16, fp16 as they are; e4m3, e5m2, e2m1, e3m0 under a power-of-two scale a block.

E3M0 is the paper's four bits (arXiv 2501.18512, section 3.3); E2M1 with blocks of 32 is MXFP4 (OCP Microscaling
Formats, version 1.0).

Shapes: N elements, B blocks of K elements.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float32, Int32, UInt8
from torch import Tensor

from diloco.errors import PayloadError
from diloco.wire.blocks import BlockCodec, power_of_two
from diloco.wire.payload import Codec, Key, is_finite, refuse_non_finite


@dataclass(frozen=True)
class _Unscaled(Codec):
    """Each element in one of torch's own formats, little-endian; rounded to nearest, ties to even; saturating."""

    dtype: ClassVar[torch.dtype]

    def body_bytes(self, num_elements: int) -> int:
        """N times the format's bytes."""
        return self.dtype.itemsize * num_elements

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> None:
        """The bytes of the vector in the format."""
        largest = torch.finfo(self.dtype).max
        for part_n, bytes_n in self._in_cache(delta_N, body):
            refuse_non_finite(part_n)
            if self.dtype != torch.float32:
                part_n = part_n.clamp(-largest, largest).to(self.dtype)
            bytes_n.copy_(part_n.view(torch.uint8))

    def unpack(self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool) -> None:
        """The bytes as FP32."""
        for part_n, bytes_n in self._in_cache(to_N, body):
            values = bytes_n.view(self.dtype)
            if not is_finite(values):
                raise PayloadError(f"a payload in {self.name} holds NaN or an infinity: it was damaged")
            if add:
                part_n.add_(values.float())
            else:
                part_n.copy_(values)

    def _in_cache(self, vector_N: Tensor, body: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts with their bytes, so short on a CPU that what is made of one is read again from its cache."""
        most = 1 << 17 if vector_N.device.type == "cpu" else max(1, vector_N.numel())
        return zip(vector_N.split(most), body.split(most * self.dtype.itemsize), strict=True)


@dataclass(frozen=True)
class FP32(_Unscaled):
    """Four bytes an element, unchanged."""

    name = "fp32"
    dtype = torch.float32


@dataclass(frozen=True)
class BF16(_Unscaled):
    """Two bytes an element: FP32's range, 8 bits of precision."""

    name = "bf16"
    dtype = torch.bfloat16


@dataclass(frozen=True)
class FP16(_Unscaled):
    """Two bytes an element: 11 bits of precision down to 6e-5, steps of 6e-8 below, ±65504 at the most."""

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True)
class _Scaled(BlockCodec):
    """A small float times 2^(byte − 127), one E8M0 byte a block; its largest value is top·2^top_exponent.

    The byte is 0 … 254. Rounding is to the nearest in value, and saturates.
    """

    scale_bytes = 1
    mantissa_bits: ClassVar[int]
    smallest_exponent: ClassVar[int]
    """Of the normal values; below it the steps stay the same."""
    top_exponent: ClassVar[int]
    top_mantissa: ClassVar[int]
    """Of the largest value, as the 23 bits of FP32."""

    def quantize(
        self,
        delta_BxK: Float32[Tensor, "B K"],
        largest_B: Float32[Tensor, "B"],
        random_BxK: Tensor | None,
    ) -> tuple[UInt8[Tensor, "B"], UInt8[Tensor, "B K"]]:
        """Scale bytes, and the codes of what is left when the scale is taken out."""
        bits_B = largest_B.view(torch.int32)
        if random_BxK is None:
            byte_B = self.scale_bytes_of(bits_B)
        else:
            # The smallest scale under which nothing saturates, which would not be right on average.
            byte_B = (bits_B >> 23) - self.top_exponent + ((bits_B & 0x7FFFFF) > self.top_mantissa)
        byte_B = byte_B.clamp(0, 254 - self.top_exponent)  # under which the largest value is finite
        # Exact where it matters: a power of two, and what falls among FP32's subnormals is 0 in these formats.
        unit_BxK = delta_BxK * power_of_two(254 - byte_B)[:, None]
        if random_BxK is not None:
            unit_BxK = self._dither(unit_BxK, random_BxK)
        return byte_B.to(torch.uint8), self.codes(unit_BxK)

    def factors(self, scales: UInt8[Tensor, "B"]) -> Float32[Tensor, "B"]:
        """2^(byte − 127), and infinity for byte 255."""
        return power_of_two(scales.int())

    def scale_bytes_of(self, bits_B: Int32[Tensor, "B"]) -> Int32[Tensor, "B"]:
        """From the bits of the largest magnitudes: these get the exponent of the format's largest value."""
        return (bits_B >> 23) - self.top_exponent

    @abstractmethod
    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """Codes of the nearest values."""

    def _dither(self, unit_BxK: Float32[Tensor, "B K"], random_BxK: Tensor) -> Float32[Tensor, "B K"]:
        """One of the two neighbouring values, each with a probability that makes the mean right."""
        exponent_BxK = ((unit_BxK.view(torch.int32) & 0x7FFFFFFF) >> 23) - 127
        step_BxK = exponent_BxK.clamp(min=self.smallest_exponent) - self.mantissa_bits
        fraction_BxK = (random_BxK >> 8).float() * 2.0**-24
        num_steps_BxK = (unit_BxK.abs() * power_of_two(127 - step_BxK) + fraction_BxK).floor()
        return (num_steps_BxK * power_of_two(127 + step_BxK)).copysign(unit_BxK)


@dataclass(frozen=True)
class _Float8(_Scaled):
    """One of torch's 8-bit floats."""

    bits = 8
    dtype: ClassVar[torch.dtype]

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """Ties to even."""
        largest = torch.finfo(self.dtype).max
        return unit_BxK.clamp(-largest, largest).to(self.dtype).view(torch.uint8)

    def values(self, device: torch.device) -> Float32[Tensor, "256"]:
        """As torch reads each byte; those that stand for NaN or infinity are never written."""
        return torch.arange(256, dtype=torch.uint8, device=device).view(self.dtype).float()


@dataclass(frozen=True)
class E4M3(_Float8):
    """Sign, 4 exponent and 3 mantissa bits, up to ±448 (the variant without infinities)."""

    name = "e4m3"
    dtype = torch.float8_e4m3fn
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 3, -6, 8, 0x600000


@dataclass(frozen=True)
class E5M2(_Float8):
    """Sign, 5 exponent and 2 mantissa bits, up to ±57344."""

    name = "e5m2"
    dtype = torch.float8_e5m2
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 2, -14, 15, 0x600000


@dataclass(frozen=True)
class E2M1(_Scaled):
    """Sign, 2 exponent and 1 mantissa bits: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} under one scale for every 32 (MXFP4).

    The code is sign·8 + the index of the magnitude; ties go to the even index.

    >>> wire = E2M1()
    >>> wire.decode(wire.encode(torch.tensor([6.0, -2.5, 0.7, 0.25])), 4)
    tensor([ 6.0000, -2.0000,  0.5000,  0.0000])
    """

    name = "e2m1"
    block: int = 32
    bits = 4
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 1, 0, 2, 0x400000

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """The number of midpoints that lie below, each belonging to the even index beside it."""
        magnitude_BxK = unit_BxK.abs()
        code_BxK = (unit_BxK.view(torch.int32) >> 28 & 8).to(torch.uint8)
        for index, midpoint in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]):
            code_BxK += magnitude_BxK >= midpoint if index % 2 else magnitude_BxK > midpoint
        return code_BxK

    def values(self, device: torch.device) -> Float32[Tensor, "16"]:
        """The positive ones, then the negative ones."""
        positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device=device)
        return torch.cat([positive, -positive])


@dataclass(frozen=True)
class E3M0(_Scaled):
    """Sign and 3 exponent bits: {0} ∪ {±S·2^(k−7), k = 1 … 7}, under one scale S = 2^(byte − 127) a block.

    A block's scale is its largest magnitude, rounded; it saturates at 2^127. Ties go to the larger magnitude;
    below half of the smallest magnitude, 0. The code is sign·8 + k, and 0 for zero.

    >>> wire = E3M0()
    >>> wire.decode(wire.encode(torch.tensor([1.0, -0.3, 0.75, 0.007])), 4)
    tensor([ 1.0000, -0.2500,  1.0000,  0.0000])
    """

    name = "e3m0"
    bits = 4
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 0, -6, 0, 0

    def scale_bytes_of(self, bits_B: Int32[Tensor, "B"]) -> Int32[Tensor, "B"]:
        """The nearest power of two, ties to the larger: with half a mantissa added, the exponent field is its."""
        subnormal_B = (bits_B >= 0x600000).int()
        return torch.where(bits_B < 0x800000, subnormal_B, (bits_B + 0x400000) >> 23)

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """The nearest power of two, as for the scale; 0 for everything too small."""
        bits_BxK = unit_BxK.view(torch.int32)
        magnitude_BxK = bits_BxK & 0x7FFFFFFF
        k_BxK = (((magnitude_BxK + 0x400000) >> 23) - (127 - 7)).clamp(0, 7)
        # From half of the smallest magnitude on, the neighbours are 0 and 2^-6, not 2^-7 and 2^-6.
        k_BxK += (k_BxK == 0) & (magnitude_BxK >= (127 - 7) << 23)
        sign_BxK = torch.where(k_BxK > 0, (bits_BxK >> 28) & 8, 0)
        return (sign_BxK | k_BxK).to(torch.uint8)

    def values(self, device: torch.device) -> Float32[Tensor, "16"]:
        """The positive ones, then the negative ones."""
        positive = torch.tensor([0.0] + [2.0 ** (k - 7) for k in range(1, 8)], dtype=torch.float32, device=device)
        return torch.cat([positive, -positive])
