"""The merge: the outer parameters mixed into a replica's own.

Shapes: N elements of one fragment.
"""

from typing import TypeAlias

from jaxtyping import Float32
from torch import Tensor

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


def merge(theta_N: FlatFP32, outer_N: FlatFP32, mixing: float) -> FlatFP32:
    """Θ mixed into a replica's parameters: α θ + (1 − α) Θ, FP32.

    >>> import torch
    >>> merge(torch.tensor([1.0]), torch.tensor([3.0]), mixing=0.5)
    tensor([2.])
    """
    return mixing * theta_N + (1 - mixing) * outer_N
