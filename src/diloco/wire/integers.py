"""Integer codecs: int8, int4, int2, symmetric about zero, under one FP32 scale per block.

Shapes: B blocks of K elements.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from diloco.wire import formats
from diloco.wire.blocks import BlockCodec


@dataclass(frozen=True)
class _Integer(BlockCodec):
    """s·q with q = −Q … Q, Q = 2^(bits−1) − 1, and s the block's largest magnitude over Q.

    q is x/s rounded to the nearest integer, ties to even; the division is rounded to FP32 first. The code is q in
    two's complement.
    """

    @property
    def constants(self) -> dict[str, int | float]:
        """Q and the largest scale; those of small floats are not used."""
        unused = dict.fromkeys(("MANTISSA", "SMALLEST", "TOP", "TOP_MANTISSA", "TIES_UP"), 0)
        most = 2 ** (self.bits - 1) - 1
        return {"FLOAT": False, "BITS": self.bits, "TOP_CODE": most, "MOST_SCALE": self._most_scale(), **unused}

    def quantize(
        self,
        delta_BxK: Float32[Tensor, "B K"],
        largest_B: Float32[Tensor, "B"],
        random_BxK: Tensor | None,
    ) -> tuple[Float32[Tensor, "B"], UInt8[Tensor, "B K"]]:
        """Scales and codes."""
        most = 2 ** (self.bits - 1) - 1
        # A tensor as divisor: CUDA would multiply by a Python number's reciprocal, which rounds differently.
        scale_B = (largest_B / torch.full_like(largest_B, most)).clamp(max=self._most_scale())
        num_steps_BxK = delta_BxK / torch.where(scale_B > 0, scale_B, 1)[:, None]
        if random_BxK is None:
            num_steps_BxK = num_steps_BxK.round()
        else:
            num_steps_BxK = (num_steps_BxK + (random_BxK >> 8).float() * 2.0**-24).floor()
            num_steps_BxK = num_steps_BxK.where(scale_B[:, None] > 0, 0)
        code_BxK = num_steps_BxK.clamp(-most, most).to(torch.int32) & (2**self.bits - 1)
        return scale_B, code_BxK.to(torch.uint8)

    def factors(self, scales: UInt8[Tensor, "bytes"]) -> Float32[Tensor, "B"]:
        """The scales themselves; infinity for one under which the largest value would not be finite."""
        scale_B = scales.view(torch.float32)
        return torch.where(scale_B <= self._most_scale(), scale_B, math.inf)

    def _most_scale(self) -> float:
        """The largest FP32 under which the largest value is finite."""
        texts = {8: "0x1.020406p+121", 4: "0x1.249248p+125", 2: "0x1.fffffep+127"}
        return float.fromhex(texts[self.bits])

    def values(self, device: torch.device) -> Float32[Tensor, "codes"]:
        """Two's complement; the lowest, which is never written, is infinite."""
        half = 2 ** (self.bits - 1)
        values = torch.arange(-half, half, dtype=torch.float32, device=device)
        return torch.where(values == -half, -math.inf, values).roll(half)


@dataclass(frozen=True)
class INT8(formats.INT8, _Integer):
    """−127 … 127."""


@dataclass(frozen=True)
class INT4(formats.INT4, _Integer):
    """−7 … 7.

    >>> wire = INT4()
    >>> wire.decode(wire.encode(torch.tensor([7.0, -2.4, 0.6])), 3)
    tensor([ 7., -2.,  1.])
    """


@dataclass(frozen=True)
class INT2(formats.INT2, _Integer):
    """−1, 0, 1."""


CODECS = (INT8, INT4, INT2)
