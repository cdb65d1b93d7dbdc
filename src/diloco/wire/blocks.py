"""What the codecs with one scale a block have in common: the layout, the packing of codes, E8M0 scales.

Shapes: N elements, B blocks of K elements (the last may hold fewer).
"""

import functools
import importlib.util
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float32, Int32, UInt8
from torch import Tensor

from diloco.errors import PayloadError, UserError
from diloco.kernels.native import Native, native
from diloco.wire.payload import Codec, Key, non_finite, refuse_non_finite
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
        if not 2 <= self.block <= 1 << 16 or self.block % codes_a_byte:
            multiple = f", a multiple of {codes_a_byte}" if codes_a_byte > 1 else ""
            raise UserError(f"{self.name}: block must be from 2 to 65536 elements{multiple}, not {self.block}")

    def body_bytes(self, num_elements: int) -> int:
        """Scales, then codes, each rounded up to whole bytes."""
        return self._scales_end(num_elements) + -(-num_elements * self.bits // 8)

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> None:
        """Scales from the largest magnitudes, then codes under them."""
        scales, codes = self._split(body, delta_N.numel())
        fast = None if self.stochastic else _native(delta_N)
        if fast is not None:
            if not fast.pack(self.name, self.block, delta_N, scales, codes):
                raise non_finite()
            return
        random_N = None
        if self.stochastic:
            random_N = random_bits(key, delta_N.numel(), delta_N.device, common=False)
        refuse_non_finite(_on_device(self.pack_reference, delta_N)(delta_N, scales, codes, random_N))

    def unpack(self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool) -> None:
        """Each code's value times its block's scale."""
        scales, codes = self._split(body, to_N.numel())
        fast = _native(body, to_N)
        if fast is not None:
            is_sound = fast.unpack(self.name, self.block, scales, codes, to_N, add=add)
        else:
            is_sound = bool(_on_device(self.unpack_reference, to_N)(scales, codes, to_N, add))
        if not is_sound:
            raise PayloadError(
                f"a payload in {self.format} holds a scale or a code that is never written: it was damaged"
            )

    def pack_reference(
        self,
        delta_N: Float32[Tensor, "N"],
        scales: UInt8[Tensor, "scale_bytes"],
        codes: UInt8[Tensor, "code_bytes"],
        random_N: Tensor | None,
    ) -> Float32[Tensor, "B"]:
        """What `pack` does, in plain torch; returns the largest magnitudes, NaN where there is one."""
        delta_BxK = _rows(delta_N, self.block)
        largest_B = delta_BxK.abs().amax(dim=1)
        random_BxK = None if random_N is None else _rows(random_N, self.block)
        scale_B, code_BxK = self.quantize(delta_BxK, largest_B, random_BxK)
        scales.copy_(scale_B.view(torch.uint8))
        codes.copy_(join(code_BxK.view(-1)[: delta_N.numel()], self.bits))
        return largest_B

    def unpack_reference(
        self,
        scales: UInt8[Tensor, "scale_bytes"],
        codes: UInt8[Tensor, "code_bytes"],
        to_N: Float32[Tensor, "N"],
        add: bool,
    ) -> Tensor:
        """What `unpack` does, in plain torch; returns whether scales and codes are such as `pack` writes."""
        num_elements = to_N.numel()
        factor_B = self.factors(scales)
        unit_N = self.values(codes.device)[split(codes, num_elements, self.bits).int()]
        value_N = (_rows(unit_N, self.block) * factor_B[:, None]).view(-1)[:num_elements]
        to_N.copy_(to_N + value_N if add else value_N)
        return (torch.isfinite(factor_B) & (factor_B >= 0)).all() & torch.isfinite(unit_N).all()

    def _split(self, body: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        end = self._scales_end(num_elements)
        return body[:end], body[end:]

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
        """What each block's values are multiplied by; negative or not finite for a scale that is never written."""

    @abstractmethod
    def values(self, device: torch.device) -> Float32[Tensor, "codes"]:
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


def _native(*tensors: Tensor) -> Native | None:
    """The compiled passes, if these tensors are where they can reach them."""
    on_cpu = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    return native() if on_cpu else None


def _on_device(reference: Callable[..., Tensor], vector_N: Tensor) -> Callable[..., Tensor]:
    """The reference, on a GPU compiled into a few kernels by Triton."""
    return _compiled(reference) if vector_N.is_cuda else reference


@functools.cache
def _compiled(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch._inductor.config as inductor_config  # a second, that only a GPU is worth

    if importlib.util.find_spec("triton") is None or not hasattr(inductor_config, "eager_numerics"):
        warnings.warn(
            "diloco goes on with slower code of the same results, since Triton, or a torch that can make it round "
            "as torch itself does, is not installed",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference
    return torch.compile(reference, dynamic=True, fullgraph=True, options=COMPILE_OPTIONS)


COMPILE_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # no fused multiply-add
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""What makes inductor round as eager torch does."""
