"""Merge rules: how the outer parameters enter a replica's own.

Shapes: N elements of one fragment, or of a part of one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxtyping import Float32
from torch import Tensor

from diloco.errors import UserError
from diloco.outer.rule import JSON, facts_of

FlatFP32: TypeAlias = Float32[Tensor, "N"]
"""One fragment, flat; vectors in one call are equally long."""


@dataclass(frozen=True)
class Past:
    """The values from before a merge that some rules read, as far as they ask for them."""

    outer_N: Tensor | None = None
    """Θ before the outer step, for a rule with `needs_previous`."""
    theta_N: Tensor | None = None
    """θ when the outer gradient was sent, for a rule with `needs_sent`."""
    num_steps: int = 0
    """Inner steps since then."""
    sync_every: int = 1
    """H."""

    def part(self, place: slice) -> "Past":
        """The same of some of the elements."""
        vectors = {"outer_N": self.outer_N, "theta_N": self.theta_N}
        return replace(self, **{name: vector[place] for name, vector in vectors.items() if vector is not None})


class MergeRule(ABC):
    """A pure function of θ and Θ; derive a frozen dataclass from this class for a rule of your own."""

    needs_previous: bool = False
    """True if `merge` reads the Θ from before the outer step, which the engine keeps for it then."""
    needs_sent: bool = False
    """True if it reads the θ that was sent, which the engine keeps, and saves, for it then."""

    def facts(self) -> Mapping[str, JSON]:
        """The settings that all replicas must share, by name: the fields."""
        return facts_of(self)

    @abstractmethod
    def merge(self, theta_N: Tensor, outer_N: Tensor, past: Past) -> Tensor:
        """The new θ; all vectors are flat FP32 (N), and nothing is changed in place.

        Args:
            theta_N: θ, this replica's own parameters.
            outer_N: Θ after the outer step.
            past: values from before it.
        """


@dataclass(frozen=True)
class Mixing(MergeRule):
    """θ ← α θ + (1 − α) Θ (arXiv 2501.18512, Algorithm 1).

    >>> import torch
    >>> Mixing(0.5).merge(torch.tensor([1.0]), torch.tensor([3.0]), Past())
    tensor([2.])
    """

    alpha: float = 0.5
    """α, the part of its own parameters that a replica keeps; 0 keeps nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"mixing must lie between 0 and 1, not {self.alpha}", "mixing")

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32, past: Past) -> FlatFP32:
        """α θ + (1 − α) Θ."""
        return self.alpha * theta_N + (1 - self.alpha) * outer_N


@dataclass(frozen=True)
class Translation(MergeRule):
    """θ ← θ + (Θ_new − Θ_old): Θ − θ stays what it was, which is right where no outer step has counted any of it.

    So it is where a replica was in no outer step, and after `Eager`, which merges at the send.

    >>> import torch
    >>> Translation().merge(torch.tensor([1.0]), torch.tensor([3.0]), Past(torch.tensor([2.5])))
    tensor([1.5000])
    """

    needs_previous = True

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32, past: Past) -> FlatFP32:
        """θ + (Θ_new − Θ_old)."""
        assert past.outer_N is not None, "needs_previous"
        return theta_N + (outer_N - past.outer_N)


@dataclass(frozen=True)
class Taylor(MergeRule):
    """θ ← Θ − τ (g + λ g² (Θ − θ_s) / H), g = (θ_s − θ) / τ: the steps in flight, as they had been from Θ.

    θ_s is θ at the send, τ the steps since then, and g their mean, as a gradient, whose derivative is about g².
    Source: the idea is that of CoCoDC, arXiv 2504.17672, whose own form may differ; this form is the delay
    compensation of arXiv 1609.08326.

    >>> import torch
    >>> past = Past(theta_N=torch.tensor([2.0]), num_steps=2)
    >>> Taylor(strength=0.5).merge(torch.tensor([1.0]), torch.tensor([3.0]), past)
    tensor([1.7500])
    """

    strength: float = 0.5
    """λ; 0 takes the steps in flight as they are."""
    needs_sent = True

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise UserError(f"strength must be at least 0 and finite, not {self.strength}", "mixing")

    def merge(self, theta_N: FlatFP32, outer_N: FlatFP32, past: Past) -> FlatFP32:
        """Θ − τ (g + λ g² (Θ − θ_s) / H)."""
        assert past.theta_N is not None, "needs_sent"
        if not past.num_steps:
            return outer_N.clone()
        g_N = (past.theta_N - theta_N) * (1 / past.num_steps)
        apart_N = (outer_N - past.theta_N) * (self.strength / past.sync_every)
        return outer_N - past.num_steps * (g_N + g_N * g_N * apart_N)


MERGE_RULES: dict[str, type[MergeRule]] = {"mix": Mixing, "translate": Translation, "taylor": Taylor}
"""Every merge rule by its name."""
