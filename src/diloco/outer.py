"""The outer step and the merge, on flat FP32 vectors; pure.

Every line is one rounded operation an element, so that CPUs and GPUs, and NumPy, give the same bits: no fused
multiply-add, which some devices have and others not.

Shapes: N elements of one fragment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float32
from torch import Tensor

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum, as in torch.optim.SGD: v ← μ v + Δ; Θ ← Θ − η (Δ + μ v); v₀ = 0.

    η = 1 and μ = 0 replace the outer parameters by the replicas' average (Local SGD, FedAvg).

    >>> import torch
    >>> theta, zero = torch.ones(2), torch.zeros(2)
    >>> outer, velocity = Nesterov(lr=1.0, momentum=0.0).step(
    ...     torch.ones(2), torch.zeros(2), torch.full((2,), 0.25)
    ... )
    >>> outer
    tensor([0.7500, 0.7500])
    """

    lr: float = 0.4
    """η, the outer learning rate."""
    momentum: float = 0.9
    """μ, the outer momentum."""

    def __post_init__(self) -> None:
        """Refuse what can't train."""
        if not self.lr > 0:
            raise ValueError(f"the outer learning rate must be above 0, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must be at least 0 and below 1, not {self.momentum}")

    def step(self, outer_N: FlatFP32, velocity_N: FlatFP32, delta_N: FlatFP32) -> tuple[FlatFP32, FlatFP32]:
        """The new Θ and v, FP32, from the averaged outer gradient Δ; nothing is changed in place."""
        velocity_N = self.momentum * velocity_N + delta_N
        return outer_N - self.lr * (delta_N + self.momentum * velocity_N), velocity_N


def average(deltas: Sequence[FlatFP32]) -> FlatFP32:
    """(1/M) Σ_m Δ_m of M flat FP32 vectors: summed in FP32, in the order given, then divided by M."""
    total_N = deltas[0].clone()
    for delta_N in deltas[1:]:
        total_N += delta_N
    return total_N / len(deltas)


def merge(theta_N: FlatFP32, outer_N: FlatFP32, mixing: float) -> FlatFP32:
    """Θ mixed into a replica's parameters: α θ + (1 − α) Θ, FP32.

    >>> import torch
    >>> merge(torch.tensor([1.0]), torch.tensor([3.0]), mixing=0.5)
    tensor([2.])
    """
    return mixing * theta_N + (1 - mixing) * outer_N
