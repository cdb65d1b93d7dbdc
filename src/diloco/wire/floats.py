"""Floating-point codecs: fp32, bf16, and e3m0, the paper's four bits (arXiv 2501.18512, section 3.3).

Shapes: N elements, B blocks of K elements (the last may hold fewer).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor


@dataclass(frozen=True)
class FP32:
    """Four bytes an element, unchanged, little-endian."""

    def encode(self, delta_N: Float32[Tensor, "N"]) -> UInt8[Tensor, "bytes"]:
        """The vector's own bytes."""
        return delta_N.contiguous().view(torch.uint8)

    def decode(self, payload: Tensor, num_elements: int) -> Float32[Tensor, "{num_elements}"]:
        """The bytes as FP32."""
        _check_length(payload, self.payload_bytes(num_elements), num_elements)
        return payload.view(torch.float32)

    def payload_bytes(self, num_elements: int) -> int:
        """4 N."""
        return 4 * num_elements


@dataclass(frozen=True)
class BF16:
    """Two bytes an element, rounded to nearest, ties to even, little-endian; saturates at bfloat16's largest."""

    def encode(self, delta_N: Float32[Tensor, "N"]) -> UInt8[Tensor, "bytes"]:
        """The bytes of the vector in bfloat16."""
        largest = torch.finfo(torch.bfloat16).max
        return delta_N.clamp(-largest, largest).to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, num_elements: int) -> Float32[Tensor, "{num_elements}"]:
        """The bytes as bfloat16, in FP32."""
        _check_length(payload, self.payload_bytes(num_elements), num_elements)
        return payload.view(torch.bfloat16).float()

    def payload_bytes(self, num_elements: int) -> int:
        """2 N."""
        return 2 * num_elements


@dataclass(frozen=True)
class E3M0:
    """Sign and a 3-bit exponent: {0} ∪ {±S·2^(k−7), k = 1 … 7}, under one scale S = 2^(byte − 127) a block.

    A block's scale is its largest magnitude, rounded; byte 0 … 254, so that S saturates at 2^127. Rounding is to
    the nearest in value, ties to the larger magnitude; below half of the smallest magnitude, 0.

    The payload is one scale byte a block, then the codes (sign·8 + k, and 0 for zero), two a byte, low nibble
    first; with an odd N the last high nibble is 0.

    >>> wire = E3M0()
    >>> wire.decode(wire.encode(torch.tensor([1.0, -0.3, 0.75, 0.007])), 4)
    tensor([ 1.0000, -0.2500,  1.0000,  0.0000])
    """

    block: int = 256
    """K, elements that share a scale."""

    def __post_init__(self) -> None:
        """Refuse an empty or odd block."""
        if self.block < 2 or self.block % 2:
            raise ValueError(f"e3m0: block must be an even number of elements, at least 2, not {self.block}")

    def encode(self, delta_N: Float32[Tensor, "N"]) -> UInt8[Tensor, "bytes"]:
        """Scales, then packed codes."""
        num_elements = delta_N.numel()
        delta_BxK = _blocks(delta_N, self.block)
        scale_B = _scale_bytes(delta_BxK.abs().amax(dim=1))
        # Exact: a factor 2^(127 − byte) brings the top magnitude to 1, far from FP32's subnormals.
        unit_BxK = delta_BxK * _power_of_two(254 - scale_B.int())[:, None]
        code_N = _codes(unit_BxK).view(-1)[: num_elements + num_elements % 2]
        return torch.cat([scale_B, code_N[0::2] | code_N[1::2] << 4])

    def decode(self, payload: Tensor, num_elements: int) -> Float32[Tensor, "{num_elements}"]:
        """Each code's magnitude times its block's scale."""
        _check_length(payload, self.payload_bytes(num_elements), num_elements)
        num_blocks = -(-num_elements // self.block)
        scale_B, packed = payload[:num_blocks], payload[num_blocks:]
        code_N = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[:num_elements]
        unit_BxK = _blocks(_magnitudes(payload.device)[code_N.int()], self.block)
        return (unit_BxK * _power_of_two(scale_B.int())[:, None]).view(-1)[:num_elements]

    def payload_bytes(self, num_elements: int) -> int:
        """A byte a block and half a byte an element, rounded up."""
        return -(-num_elements // self.block) + -(-num_elements // 2)


def _blocks(vector_N: Tensor, block: int) -> Tensor:
    """The vector in rows of `block` elements, the last padded with zeros."""
    missing = -vector_N.numel() % block
    return torch.nn.functional.pad(vector_N, (0, missing)).view(-1, block)


def _scale_bytes(largest_B: Tensor) -> Tensor:
    """E8M0 byte of the nearest power of two, ties to the larger: floor(log2 x), or one more from 1.5·2^e on."""
    mantissa_B, exponent_B = torch.frexp(largest_B)  # mantissa in [0.5, 1): the power below is 2^(exponent − 1)
    byte_B = exponent_B - 1 + (mantissa_B >= 0.75) + 127
    return torch.where(largest_B > 0, byte_B.clamp(0, 254), 0).to(torch.uint8)


def _power_of_two(byte_B: Tensor) -> Tensor:
    """2^(byte − 127), put together bit by bit: exact on every device, where exp2 need not be."""
    return torch.where(byte_B == 0, 0x400000, byte_B << 23).view(torch.float32)


def _codes(unit_BxK: Tensor) -> Tensor:
    """Codes of numbers whose block's top magnitude is 1."""
    bits_BxK = unit_BxK.view(torch.int32)
    magnitude_BxK = bits_BxK & 0x7FFFFFFF
    # Half a mantissa added, the exponent field is that of the nearest power of two, ties upwards.
    k_BxK = (((magnitude_BxK + 0x400000) >> 23) - (127 - 7)).clamp(0, 7)
    # From half of the smallest magnitude on, the neighbours are 0 and 2^-6, not 2^-7 and 2^-6.
    k_BxK += (k_BxK == 0) & (magnitude_BxK >= (127 - 7) << 23)
    sign_BxK = torch.where(k_BxK > 0, (bits_BxK >> 28) & 8, 0)
    return (sign_BxK | k_BxK).to(torch.uint8)


def _magnitudes(device: torch.device) -> Tensor:
    """The value of each of the sixteen codes under scale 1."""
    positive = [0.0] + [2.0 ** (k - 7) for k in range(1, 8)]
    return torch.tensor(positive + [-value for value in positive], dtype=torch.float32, device=device)


def _check_length(payload: Tensor, expected: int, num_elements: int) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
        raise ValueError(
            f"a payload of {num_elements} elements must be {expected} bytes long, "
            f"not {tuple(payload.shape)} of {payload.dtype}: it was cut short, or made by another codec"
        )
