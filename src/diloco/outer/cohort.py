"""The replicas of one outer step, and their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Weights: TypeAlias = Literal["tokens", "tokens_squared_per_step"]
"""The amount that a replica's weight is in proportion to; the second as in Decoupled DiLoCo (arXiv 2604.21428)."""


def amount_of(weights: Weights, *, tokens: int, steps: int) -> float:
    """The amount of a replica, from its tokens and inner steps since its last send."""
    return tokens**2 / steps if weights == "tokens_squared_per_step" else tokens


@dataclass(frozen=True)
class Cohort:
    """The members of one outer step and their weights; decided once, and the same on every replica.

    The average is Σ_m w_m Δ_m / Σ_m w_m, added up in the order of the members.

    >>> Cohort.equal(2)
    Cohort(members=(0, 1), weights=(1.0, 1.0), is_new=False)
    >>> Cohort.weighted({7: 1000.0, 2: 4000.0})
    Cohort(members=(2, 7), weights=(1.0, 0.25), is_new=False)
    """

    members: tuple[int, ...]
    """Replicas, ascending."""
    weights: tuple[float, ...]
    """One per member, above 0, the largest 1: equal weights are all 1, and give the bits of a plain average."""
    is_new: bool = False
    """True if by half other replicas are active than at the fragment's last outer step for which it was true, or
    at its first one."""

    def __post_init__(self) -> None:
        """Check our own invariants: a cohort is never built from user input."""
        assert self.members and len(self.members) == len(self.weights), "a weight for each member"
        assert list(self.members) == sorted(set(self.members)), "each member once, ascending"
        assert min(self.weights) > 0 and max(self.weights) == 1, "weights lie above 0, and the largest is 1"

    @classmethod
    def equal(cls, num_replicas: int) -> "Cohort":
        """All of M replicas, with the same weight."""
        return cls(tuple(range(num_replicas)), (1.0,) * num_replicas)

    @classmethod
    def weighted(cls, amounts: Mapping[int, float]) -> "Cohort":
        """Some replicas, each with a weight in proportion to its amount, such as the tokens that it read."""
        most = max(amounts.values())
        members = sorted(amounts)
        return cls(tuple(members), tuple(amounts[member] / most for member in members))

    @property
    def total_weight(self) -> float:
        """Σ_m w_m; M where all weights are equal."""
        return float(sum(self.weights))
