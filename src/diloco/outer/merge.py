"""Merge rules: how the outer parameters enter a replica's own.

Shapes: N elements of one fragment, or of a part of one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float32
from torch import Tensor

from diloco.errors import UserError
from diloco.outer.rule import JSON, facts_of

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


class MergeRule(ABC):
    """A pure function of θ and Θ; one of one's own is a frozen dataclass below this class."""

    needs_previous: bool = False
    """True if `merge` reads the Θ from before the outer step, which the engine keeps for it then."""

    def facts(self) -> Mapping[str, JSON]:
        """The settings that all replicas must share, by name: the fields."""
        return facts_of(self)

    @abstractmethod
    def merge(self, theta_N: Tensor, outer_N: Tensor, previous_N: Tensor | None) -> Tensor:
        """The new θ; all vectors are flat FP32 (N), and nothing is changed in place.

        Args:
            theta_N: θ, this replica's own parameters.
            outer_N: Θ after the outer step.
            previous_N: Θ before it, if `needs_previous`.
        """


@dataclass(frozen=True)
class Mixing(MergeRule):
    """θ ← α θ + (1 − α) Θ (arXiv 2501.18512, Algorithm 1).

    >>> import torch
    >>> Mixing(0.5).merge(torch.tensor([1.0]), torch.tensor([3.0]), None)
    tensor([2.])
    """

    alpha: float
    """α, the part of its own parameters that a replica keeps; 0 keeps nothing."""

    def __post_init__(self) -> None:
        """Refuse an α outside 0 … 1."""
        if not 0 <= self.alpha <= 1:
            raise UserError(f"mixing must lie between 0 and 1, not {self.alpha}", "mixing")

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32, previous_N: FlatFP32 | None) -> FlatFP32:
        """α θ + (1 − α) Θ."""
        return self.alpha * theta_N + (1 - self.alpha) * outer_N


@dataclass(frozen=True)
class Translation(MergeRule):
    """θ ← θ + (Θ_new − Θ_old): Θ − θ, the work that the outer step does not know yet, stays what it was.

    >>> import torch
    >>> Translation().merge(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.5]))
    tensor([1.5000])
    """

    needs_previous = True

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32, previous_N: FlatFP32 | None) -> FlatFP32:
        """θ + (Θ_new − Θ_old)."""
        assert previous_N is not None, "needs_previous"
        return theta_N + (outer_N - previous_N)


MERGE_RULES: dict[str, type[MergeRule]] = {"mix": Mixing, "translate": Translation}
"""Every merge rule by its name; `overwrite` is to mix with α = 0."""
