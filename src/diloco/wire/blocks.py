"""What the codecs with one scale a block have in common: the layout, the packing of codes, E8M0 scales.

Shapes: N elements, B blocks of K elements (the last may hold fewer).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float32, Int32, UInt8
from torch import Tensor

from diloco.wire.payload import Codec, Key, PayloadError, refuse_non_finite
from diloco.wire.random import random_bits


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A scale for every K elements, and a code of a few bits for each.

    The body is the scales of all blocks, then the codes, 8 / bits of them a byte, from the low bits up; what is
    left of the last byte is 0. Blocks run through the flat vector; the last may be shorter.
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
        codes_a_byte = 8 // self.bits
        if self.block < 2 or self.block % codes_a_byte:
            raise ValueError(
                f"{self.name}: block must be an even number of elements, at least 2"
                f"{f', a multiple of {codes_a_byte}' if codes_a_byte > 2 else ''}, not {self.block}"
            )

    def body_bytes(self, num_elements: int) -> int:
        """Scales, then codes, each rounded up to whole bytes."""
        return self._scales_end(num_elements) + -(-num_elements * self.bits // 8)

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> None:
        """Scales from the largest magnitudes, then codes under them."""
        num_elements = delta_N.numel()
        delta_BxK = _rows(delta_N, self.block)
        largest_B = delta_BxK.abs().amax(dim=1)
        refuse_non_finite(largest_B)
        random_BxK = None
        if self.stochastic:
            random_BxK = _rows(random_bits(key, num_elements, delta_N.device, common=False), self.block)
        scales, code_BxK = self.quantize(delta_BxK, largest_B, random_BxK)
        body[: self._scales_end(num_elements)] = scales.view(torch.uint8)
        body[self._scales_end(num_elements) :] = join(code_BxK.view(-1)[:num_elements], self.bits)

    def unpack(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Float32[Tensor, "N"]:
        """Each code's value times its block's scale."""
        end = self._scales_end(num_elements)
        code_N = split(body[end:], num_elements, self.bits)
        table = torch.tensor(self.values(), dtype=torch.float32, device=body.device)
        unit_BxK = _rows(table[code_N.int()], self.block)
        return (unit_BxK * self.factors(body[:end])[:, None]).view(-1)[:num_elements]

    def _scales_end(self, num_elements: int) -> int:
        return -(-num_elements // self.block) * self.scale_bytes

    @abstractmethod
    def quantize(
        self,
        delta_BxK: Float32[Tensor, "B K"],
        largest_B: Float32[Tensor, "B"],
        random_BxK: Tensor | None,
    ) -> tuple[Tensor, UInt8[Tensor, "B K"]]:
        """Scales, in their own dtype, and codes; 32 random bits an element decide where rounding is stochastic."""

    @abstractmethod
    def factors(self, scales: UInt8[Tensor, "bytes"]) -> Float32[Tensor, "B"]:
        """What each block's values are multiplied by.

        Raises:
            PayloadError: for a scale that is never written.
        """

    @abstractmethod
    def values(self) -> list[float]:
        """The value of each of the 2^bits codes under scale 1."""


def _rows(vector_N: Tensor, block: int) -> Tensor:
    """The vector in rows of `block` elements, the last padded with zeros."""
    missing = -vector_N.numel() % block
    return torch.nn.functional.pad(vector_N, (0, missing)).view(-1, block)


def join(code_N: UInt8[Tensor, "N"], bits: int) -> UInt8[Tensor, "bytes"]:
    """Codes of 1, 2, 4 or 8 bits in bytes, the first in the low bits."""
    codes_a_byte = 8 // bits
    code_nxB = _rows(code_N, codes_a_byte)
    packed = code_nxB[:, 0]
    for place in range(1, codes_a_byte):
        packed = packed | code_nxB[:, place] << bits * place
    return packed


def split(packed: UInt8[Tensor, "bytes"], num_elements: int, bits: int) -> UInt8[Tensor, "{num_elements}"]:
    """The codes that `join` put into bytes."""
    mask = (1 << bits) - 1
    places = [packed >> bits * place & mask for place in range(8 // bits)]
    return torch.stack(places, dim=1).view(-1)[:num_elements]


def power_of_two(byte_B: Int32[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """2^(byte − 127), put together bit by bit: exact on every device, where exp2 need not be."""
    return torch.where(byte_B == 0, 0x400000, byte_B << 23).view(torch.float32)


def e8m0_factors(scale_B: UInt8[Tensor, "B"]) -> Float32[Tensor, "B"]:
    """2^(byte − 127) of each scale byte.

    Raises:
        PayloadError: for byte 255, which is no number.
    """
    if (scale_B == 255).any():
        raise PayloadError("a payload has a scale byte of 255, which no codec writes: it was damaged")
    return power_of_two(scale_B.int())
