"""Floating-point codecs: fp32, bf16, fp16 without a scale; e4m3, e5m2, e2m1, e3m0 with one power of two per block.

E3M0 is the paper's four bits (arXiv 2501.18512, section 2.3); E2M1 with blocks of 32 is MXFP4 (OCP Microscaling
Formats, version 1.0). The classes with blocks are the reference, and what runs under stochastic rounding; else the
same bits are made by kernels/native.c on a CPU and by kernels/triton_blocks.py on a GPU.

Shapes: N elements, B blocks of K elements.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float32, Int32, UInt8
from torch import Tensor

from diloco.wire import formats
from diloco.wire.blocks import BlockCodec, power_of_two
from diloco.wire.kernels.gpu import gpu_casts
from diloco.wire.kernels.native import Native, native
from diloco.wire.payload import Codec, Key, is_finite


@dataclass(frozen=True)
class _Unscaled(formats.Unscaled, Codec):
    """Each element in one of torch's own formats, little-endian; rounded to nearest, ties to even; saturating."""

    dtype: ClassVar[torch.dtype]
    never_written = "NaN or an infinity"

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Write the vector's bytes in the format."""
        self.check_body(body, delta_N.numel())
        if delta_N.is_cuda and (kernels := gpu_casts(self.dtype)) is not None:
            return kernels.pack(delta_N, body)
        if (fast := self._native(delta_N, body)) is not None:
            all_finite = fast.cast_pack(self.name, delta_N, body)
            return torch.tensor(all_finite, dtype=torch.bool, device="cpu")
        largest, are_finite = torch.finfo(self.dtype).max, []
        for part_n, bytes_n in self._in_cache(delta_N, body):
            are_finite.append(is_finite(part_n))
            if self.dtype != torch.float32:
                part_n = part_n.clamp(-largest, largest).to(self.dtype)
            bytes_n.copy_(part_n.view(torch.uint8))
        return torch.stack(are_finite).all()

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """Read the bytes as FP32."""
        self.check_body(body, to_N.numel())
        if to_N.is_cuda and (kernels := gpu_casts(self.dtype)) is not None:
            return kernels.unpack(body, to_N, add=add)
        if (fast := self._native(to_N, body)) is not None:
            all_finite = fast.cast_unpack(self.name, body, to_N, add=add)
            return torch.tensor(all_finite, dtype=torch.bool, device="cpu")
        are_finite = []
        for part_n, bytes_n in self._in_cache(to_N, body):
            values = bytes_n.view(self.dtype)
            are_finite.append(is_finite(values))
            if add:
                part_n.add_(values.float())
            else:
                part_n.copy_(values)
        return torch.stack(are_finite).all()

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """True if the elements are finite."""
        self.check_body(body, num_elements)
        return is_finite(body.view(self.dtype))

    def _native(self, vector_N: Tensor, body: Tensor) -> Native | None:
        """The C functions, if they can reach these tensors."""
        on_cpu = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (vector_N, body))
        return native() if on_cpu and vector_N.numel() and not body.data_ptr() % self.element_bytes else None

    def _in_cache(self, vector_N: Tensor, body: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts with their bytes; on a CPU so short that a part's intermediate results stay in the cache."""
        most = 1 << 17 if vector_N.device.type == "cpu" else max(1, vector_N.numel())
        return zip(vector_N.split(most), body.split(most * self.element_bytes), strict=True)


@dataclass(frozen=True)
class FP32(formats.FP32, _Unscaled):
    """Four bytes per element, unchanged."""

    dtype = torch.float32


@dataclass(frozen=True)
class BF16(formats.BF16, _Unscaled):
    """Two bytes per element: FP32's range, 8 bits of precision."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class FP16(formats.FP16, _Unscaled):
    """Two bytes per element: 11 bits of precision down to 6e-5, steps of 6e-8 below, up to ±65504."""

    dtype = torch.float16


@dataclass(frozen=True)
class _Scaled(BlockCodec):
    """A small float times 2^(byte − 127), one E8M0 byte of 0 … 254 per block.

    Rounding is to the nearest in value, and saturates.
    """

    mantissa_bits: ClassVar[int]
    smallest_exponent: ClassVar[int]
    """Exponent of the smallest normal value; below it the steps stay the same."""
    top_exponent: ClassVar[int]
    """Exponent of the largest value."""
    top_mantissa: ClassVar[int]
    """Mantissa of the largest value, as the 23 bits of FP32."""
    ties_up: ClassVar[bool] = False
    """Ties go to the larger magnitude, not to the even code, in scales as well."""

    @property
    def constants(self) -> dict[str, int | float]:
        """The format's numbers; the last code is the number of magnitudes below the largest."""
        num_below = (self.top_exponent - self.smallest_exponent) << self.mantissa_bits
        last_binade = (0x800000 | self.top_mantissa) >> (23 - self.mantissa_bits)
        return {
            "FLOAT": True,
            "BITS": self.bits,
            "MANTISSA": self.mantissa_bits,
            "SMALLEST": self.smallest_exponent,
            "TOP": self.top_exponent,
            "TOP_MANTISSA": self.top_mantissa,
            "TOP_CODE": num_below + last_binade,
            "TIES_UP": self.ties_up,
            "MOST_SCALE": 0.0,
        }

    def quantize(
        self,
        delta_BxK: Float32[Tensor, "B K"],
        largest_B: Float32[Tensor, "B"],
        random_BxK: Tensor | None,
    ) -> tuple[UInt8[Tensor, "B"], UInt8[Tensor, "B K"]]:
        """Scale bytes, and the codes of the elements divided by their scales."""
        bits_B = largest_B.view(torch.int32)
        if random_BxK is None:
            byte_B = self.scale_bytes_of(bits_B)
        else:
            # The smallest scale under which nothing saturates: a saturated value is not right on average.
            byte_B = (bits_B >> 23) - self.top_exponent + ((bits_B & 0x7FFFFF) > self.top_mantissa)
        byte_B = byte_B.clamp(0, 254 - self.top_exponent)  # the largest value must be finite
        # Exact, being a power of two, but for products that are FP32 subnormals: these formats round them to 0.
        unit_BxK = delta_BxK * power_of_two(254 - byte_B)[:, None]
        if random_BxK is not None:
            unit_BxK = self._dither(unit_BxK, random_BxK)
        return byte_B.to(torch.uint8), self.codes(unit_BxK)

    def factors(self, scales: UInt8[Tensor, "B"]) -> Float32[Tensor, "B"]:
        """2^(byte − 127); infinity for a byte under which the largest value would not be finite."""
        byte_B = scales.int()
        return power_of_two(torch.where(byte_B > 254 - self.top_exponent, 255, byte_B))

    def scale_bytes_of(self, bits_B: Int32[Tensor, "B"]) -> Int32[Tensor, "B"]:
        """Scale bytes that give the largest magnitudes, whose bits these are, the largest value's exponent."""
        return (bits_B >> 23) - self.top_exponent

    @abstractmethod
    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """The codes of the nearest values."""

    def _dither(self, unit_BxK: Float32[Tensor, "B K"], random_BxK: Tensor) -> Float32[Tensor, "B K"]:
        """Round to one of the two neighbouring values, with the probabilities that make the mean right."""
        exponent_BxK = ((unit_BxK.view(torch.int32) & 0x7FFFFFFF) >> 23) - 127
        step_BxK = exponent_BxK.clamp(min=self.smallest_exponent) - self.mantissa_bits
        fraction_BxK = (random_BxK >> 8).float() * 2.0**-24
        num_steps_BxK = (unit_BxK.abs() * power_of_two(127 - step_BxK) + fraction_BxK).floor()
        return (num_steps_BxK * power_of_two(127 + step_BxK)).copysign(unit_BxK)


@dataclass(frozen=True)
class _Float8(_Scaled):
    """One of torch's 8-bit floats."""

    dtype: ClassVar[torch.dtype]

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """Round ties to even."""
        largest = torch.finfo(self.dtype).max
        return unit_BxK.clamp(-largest, largest).to(self.dtype).view(torch.uint8)

    def values(self, device: torch.device) -> Float32[Tensor, "256"]:
        """The values of all bytes; those of NaN and infinity are never written."""
        return torch.arange(256, dtype=torch.uint8, device=device).view(self.dtype).float()


@dataclass(frozen=True)
class E4M3(formats.E4M3, _Float8):
    """Sign, 4 exponent and 3 mantissa bits, up to ±448 (the variant without infinities)."""

    dtype = torch.float8_e4m3fn
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 3, -6, 8, 0x600000


@dataclass(frozen=True)
class E5M2(formats.E5M2, _Float8):
    """Sign, 5 exponent and 2 mantissa bits, up to ±57344."""

    dtype = torch.float8_e5m2
    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 2, -14, 15, 0x600000


@dataclass(frozen=True)
class E2M1(formats.E2M1, _Scaled):
    """Sign, 2 exponent and 1 mantissa bits: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} under one scale for every 32 (MXFP4).

    The code is sign·8 + the index of the magnitude; ties go to the even index.

    >>> wire = E2M1()
    >>> wire.decode(wire.encode(torch.tensor([6.0, -2.5, 0.7, 0.25])), 4)
    tensor([ 6.0000, -2.0000,  0.5000,  0.0000])
    """

    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 1, 0, 2, 0x400000

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """Count the midpoints below the magnitude; one that equals a midpoint goes to the even index."""
        magnitude_BxK = unit_BxK.abs()
        code_BxK = (unit_BxK.view(torch.int32) >> 28 & 8).to(torch.uint8)
        for index, midpoint in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]):
            code_BxK += magnitude_BxK >= midpoint if index % 2 else magnitude_BxK > midpoint
        return code_BxK

    def values(self, device: torch.device) -> Float32[Tensor, "16"]:
        """The positive values 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the negative ones; no copy from the host."""
        code = torch.arange(8, dtype=torch.int32, device=device)
        normal = (2 + (code & 1)) * power_of_two((code >> 1) + 125)
        positive = torch.where(code < 2, code * 0.5, normal)
        return torch.cat([positive, -positive])


@dataclass(frozen=True)
class E3M0(formats.E3M0, _Scaled):
    """Sign and 3 exponent bits: {0} ∪ {±S·2^(k−7), k = 1 … 7}, under one scale S = 2^(byte − 127) per block.

    A block's scale is its largest magnitude, rounded; it saturates at 2^127. Ties go to the larger magnitude;
    below half of the smallest magnitude, 0. The code is sign·8 + k, and 0 for zero.

    >>> wire = E3M0()
    >>> wire.decode(wire.encode(torch.tensor([1.0, -0.3, 0.75, 0.007])), 4)
    tensor([ 1.0000, -0.2500,  1.0000,  0.0000])
    """

    mantissa_bits, smallest_exponent, top_exponent, top_mantissa = 0, -6, 0, 0
    ties_up = True

    def scale_bytes_of(self, bits_B: Int32[Tensor, "B"]) -> Int32[Tensor, "B"]:
        """The exponent fields of the nearest powers of two, ties to the larger: half a mantissa is added first."""
        subnormal_B = (bits_B >= 0x600000).int()
        return torch.where(bits_B < 0x800000, subnormal_B, (bits_B + 0x400000) >> 23)

    def codes(self, unit_BxK: Float32[Tensor, "B K"]) -> UInt8[Tensor, "B K"]:
        """The nearest powers of two, as for the scale; 0 below half of the smallest."""
        bits_BxK = unit_BxK.view(torch.int32)
        magnitude_BxK = bits_BxK & 0x7FFFFFFF
        k_BxK = (((magnitude_BxK + 0x400000) >> 23) - (127 - 7)).clamp(0, 7)
        # From half of the smallest magnitude on, the nearest value is 2^-6, not 0: the format has no 2^-7.
        k_BxK += (k_BxK == 0) & (magnitude_BxK >= (127 - 7) << 23)
        sign_BxK = torch.where(k_BxK > 0, (bits_BxK >> 28) & 8, 0)
        return (sign_BxK | k_BxK).to(torch.uint8)

    def values(self, device: torch.device) -> Float32[Tensor, "16"]:
        """The positive values, then the negative ones; no copy from the host."""
        k = torch.arange(8, dtype=torch.int32, device=device)
        positive = torch.where(k > 0, power_of_two(k + 120), 0)
        return torch.cat([positive, -positive])


CODECS = (FP32, BF16, FP16, E4M3, E5M2, E2M1, E3M0)
