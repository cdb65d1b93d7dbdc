"""Merge rules: how the outer parameters enter a replica's own.

Shapes: N elements of one fragment, or of a part of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from jaxtyping import Float32
from torch import Tensor

from diloco.errors import UserError

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


class MergeRule(Protocol):
    """A pure function of θ and Θ."""

    def facts(self) -> Mapping[str, float | str]:
        """The settings that all replicas must share, by name."""
        ...

    def merge(self, theta_N: Tensor, outer_N: Tensor) -> Tensor:
        """The new θ, from this replica's θ and the new Θ; flat FP32 (N), nothing is changed in place."""
        ...


@dataclass(frozen=True)
class Mixing:
    """θ ← α θ + (1 − α) Θ (arXiv 2501.18512, Algorithm 1).

    >>> import torch
    >>> Mixing(0.5).merge(torch.tensor([1.0]), torch.tensor([3.0]))
    tensor([2.])
    """

    alpha: float
    """α, the part of its own parameters that a replica keeps; 0 keeps nothing."""

    def __post_init__(self) -> None:
        """Refuse a part that is none."""
        if not 0 <= self.alpha <= 1:
            raise UserError(f"mixing must lie between 0 and 1, not {self.alpha}", "mixing")

    def facts(self) -> Mapping[str, float | str]:
        """α."""
        return {"mixing": float(self.alpha)}

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32) -> FlatFP32:
        """α θ + (1 − α) Θ."""
        return self.alpha * theta_N + (1 - self.alpha) * outer_N
