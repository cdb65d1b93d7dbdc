"""The layout of the body, and the packing of codes, of all codecs with one scale per block.

Shapes: N elements, B blocks of K elements (the last may hold fewer).
"""

import warnings
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int32, UInt8
from torch import Tensor

from diloco.wire.formats import FORMATS, Blocks
from diloco.wire.kernels.gpu import MOST_BLOCK, GpuBlocks, gpu_blocks
from diloco.wire.kernels.native import Native, native
from diloco.wire.payload import Codec, Key, is_finite, random_bits, words


@dataclass(frozen=True)
class BlockCodec(Blocks, Codec):
    """A scale for every K elements, and a code of a few bits for each element.

    A subclass offers `quantize`, `factors` and `values`; the body follows from them. Where native.c has functions
    for a registered codec, exactly that class uses them on a CPU, and on a GPU those of triton_blocks.py; its
    subclasses use the torch reference.
    """

    never_written = "a scale or a code that is never written"

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Scales from the largest magnitudes, then codes under them."""
        scales, codes = self._split(body, delta_N.numel())
        if (kernels := self._gpu(delta_N)) is not None:
            random_words = words(key, common=False) if self.stochastic else None
            return kernels.pack(self.block, delta_N, scales, codes, words=random_words)
        fast = None if self.stochastic else self._native("pack", delta_N, body)
        if fast is not None:
            all_finite = fast.pack(self.name, self.block, delta_N, scales, codes)
            return torch.tensor(all_finite, dtype=torch.bool, device="cpu")
        random_N = None
        if self.stochastic:
            random_N = random_bits(key, delta_N.numel(), delta_N.device)
        return is_finite(self.pack_reference(delta_N, scales, codes, random_N))

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """Each code's value times its block's scale."""
        scales, codes = self._split(body, to_N.numel())
        if (kernels := self._gpu(to_N)) is not None:
            return kernels.unpack(self.block, scales, codes, to_N, add=add)
        fast = self._native("unpack", body, to_N)
        if fast is not None:
            is_sound = fast.unpack(self.name, self.block, scales, codes, to_N, add=add)
            return torch.tensor(is_sound, dtype=torch.bool, device="cpu")
        return self.unpack_reference(scales, codes, to_N, add)

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """The scales alone decide where every code is written."""
        if not torch.isfinite(self.values(body.device)).all():
            return super().is_sound(body, num_elements, key)
        factor_B = self.factors(self._split(body, num_elements)[0])
        return (torch.isfinite(factor_B) & (factor_B >= 0)).all()

    def pack_reference(
        self,
        delta_N: Float32[Tensor, "N"],
        scales: UInt8[Tensor, "scale_bytes"],
        codes: UInt8[Tensor, "code_bytes"],
        random_N: Tensor | None,
    ) -> Float32[Tensor, "B"]:
        """`pack` in plain torch; returns the blocks' largest magnitudes, NaN where a block holds one."""
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
        """`unpack` in plain torch; returns True if `pack` can have written these scales and codes."""
        num_elements = to_N.numel()
        factor_B = self.factors(scales)
        unit_N = self.values(codes.device)[split(codes, num_elements, self.bits).int()]
        value_N = (_rows(unit_N, self.block) * factor_B[:, None]).view(-1)[:num_elements]
        to_N.copy_(to_N + value_N if add else value_N)
        return (torch.isfinite(factor_B) & (factor_B >= 0)).all() & torch.isfinite(value_N).all()

    def _split(self, body: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        self.check_body(body, num_elements)
        end = self.scales_bytes(num_elements)
        return body[:end], body[end:]

    def _native(self, function: str, *tensors: Tensor) -> Native | None:
        """The C functions, if they have this very codec's maths and can reach these tensors."""
        on_cpu = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        if not on_cpu or not self._is_registered():
            return None
        fast = native()
        return fast if fast is not None and fast.has(f"{self.name}_{function}") else None

    def _gpu(self, vector_N: Tensor) -> GpuBlocks | None:
        """The functions for a GPU, if the vector lies there and they have this very codec's maths."""
        if not vector_N.is_cuda or self.constants is None or not self._is_registered():
            return None
        if self.block > MOST_BLOCK:
            warnings.warn(
                f"{self.format}: a block above {MOST_BLOCK} elements is encoded by slower PyTorch code on a GPU",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return gpu_blocks(self.constants)

    def _is_registered(self) -> bool:
        """True for the class that itself gives a format its maths; its subclasses may have others."""
        return FORMATS.get(self.name) in type(self).__bases__

    @property
    def constants(self) -> dict[str, int | float] | None:
        """The constants of this maths in `kernels.triton_blocks`; None if it is of neither family there.

        A subclass that changes the maths of its family overrides this, too.
        """
        return None

    @abstractmethod
    def quantize(
        self,
        delta_BxK: Float32[Tensor, "B K"],
        largest_B: Float32[Tensor, "B"],
        random_BxK: Tensor | None,
    ) -> tuple[Tensor, UInt8[Tensor, "B K"]]:
        """Scales, in their own dtype, and codes; stochastic rounding takes 32 random bits for each element."""

    @abstractmethod
    def factors(self, scales: UInt8[Tensor, "bytes"]) -> Float32[Tensor, "B"]:
        """The factor of each block's values; negative or not finite for a scale that is never written.

        A scale under which the largest value is not finite is never written.
        """

    @abstractmethod
    def values(self, device: torch.device) -> Float32[Tensor, "codes"]:
        """The value of each of the 2^bits codes under scale 1; not finite for a code that is never written."""


def _rows(vector_N: Tensor, block: int) -> Tensor:
    """The vector in rows of `block` elements, the last padded with zeros."""
    missing = -vector_N.numel() % block
    return torch.nn.functional.pad(vector_N, (0, missing)).view(-1, block)


def join(code_N: UInt8[Tensor, "N"], bits: int) -> UInt8[Tensor, "bytes"]:
    """Codes of 1, 2, 4 or 8 bits in bytes, the first in the low bits."""
    codes_per_byte = 8 // bits
    code_nxB = _rows(code_N, codes_per_byte)
    packed = code_nxB[:, 0]
    for place in range(1, codes_per_byte):
        packed = packed | code_nxB[:, place] << bits * place
    return packed


def split(packed: UInt8[Tensor, "bytes"], num_elements: int, bits: int) -> UInt8[Tensor, "{num_elements}"]:
    """The codes that `join` put into bytes."""
    mask = (1 << bits) - 1
    places = [packed >> bits * place & mask for place in range(8 // bits)]
    return torch.stack(places, dim=1).view(-1)[:num_elements]


def power_of_two(byte_B: Int32[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """2^(byte − 127), from its bits: exact on every device, where exp2 need not be."""
    return torch.where(byte_B == 0, 0x400000, byte_B << 23).view(torch.float32)
