"""SGD with Nesterov momentum, also delayed, as the outer rule, on flat FP32 vectors.

Every line is one rounded operation an element, so that CPUs and GPUs, and NumPy, give the same bits: no fused
multiply-add, which some devices have and others not.

Shapes: N elements of one fragment.
"""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Self

from torch import Tensor

from diloco.errors import UserError
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.merge import FlatFP32
from diloco.outer.rule import FragmentState, OuterRule
from diloco.schedule import Sync
from diloco.wire.kernels.memory import elements_at_once


@dataclass(frozen=True, kw_only=True)
class Nesterov(OuterRule):
    """SGD with Nesterov momentum, as in torch.optim.SGD: v ← μ v + Δ; Θ ← Θ − η (Δ + μ v); v₀ = 0.

    η = 1 and μ = 0 replace the outer parameters by the replicas' average (Local SGD, FedAvg). A restart, v ← 0, is
    that of arXiv 2605.28585. η may decay over R rounds: η_r = η (1 − (1 − f) min(1, (r − 1) / (R − 1))).

    With `restart_with_members`, v ← 0 and C ← A also where 2 |A ∩ C| < |C| or |A| ≥ 2 |C|: A is the set of the
    replicas that are active at an outer step, and C was A at the fragment's first one. A store's log decides it,
    and a replica that comes back under its name is the same one. It is off by default: no paper has measured it.

    >>> import torch
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
    restart_every: int = 0
    """Rounds of a fragment after which v restarts at 0; 0 for never."""
    restart_with_members: bool = False
    """True if v restarts at 0 where by half other replicas are active; in a fixed group they never are."""
    decay_rounds: int = 0
    """R, rounds of a fragment in which η decays; 0 for a constant η."""
    final: float = 0.1
    """f, the part of η that is left after R rounds."""

    slots = ("velocity",)

    def __post_init__(self) -> None:
        for name in ("lr", "momentum"):
            if not isinstance(number := getattr(self, name), (Real, Tensor)):
                raise UserError(f"{name}={number!r} must be a number", name)
        if not 0 < self.lr < math.inf:
            raise UserError(f"lr={self.lr}: the outer learning rate must be above 0 and finite", "lr")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum={self.momentum}: the outer momentum must be from 0 to below 1", "momentum")
        if not 0 < self.final <= 1:
            raise UserError(f"final={self.final} must be above 0 and at most 1", "final")
        for name in ("restart_every", "decay_rounds"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must be at least 0", name)

    def begin(self, fragment: FragmentState, sync: Sync, cohort: Cohort) -> Self:
        """Restart v where its rounds are over, or the cohort is new; returns the rule with the round's η."""
        is_over = self.restart_every and (sync.round - 1) % self.restart_every == 0
        if is_over or (self.restart_with_members and cohort.is_new):
            fragment.use("velocity").zero_()
        return replace(self, lr=self.rate(sync), decay_rounds=0) if self.decay_rounds else self

    def rate(self, sync: Sync) -> float:
        """η of a round."""
        decayed = min(1.0, (sync.round - 1) / max(1, self.decay_rounds - 1)) if self.decay_rounds else 0.0
        return self.lr * (1 - (1 - self.final) * decayed)

    def gain(self, rho: float) -> float | None:
        """η (1 + μ / (1 − μρ)): the part of an outer step along Δ, in Δ, after many whose lag-k cosine is ρᵏ.

        ⟨Δ + μ v, Δ⟩ / ‖Δ‖² with v = Σ_k μᵏ Δ_{r−k}: η / (1 − μ) would be the gain of equal outer gradients.

        >>> round(Nesterov().gain(0.0), 2), round(Nesterov().gain(1.0), 2)
        (0.76, 4.0)
        """
        if self.restart_every or self.decay_rounds:
            return None
        return self.lr * (1 + self.momentum / (1 - self.momentum * rho))

    def averaged(self, fragment: FragmentState, average: Average, cohort: Cohort) -> Average:
        """The Δ of the step: the average, or a subclass's own, for which it may overwrite the total."""
        return average

    def step(self, outer_N: FlatFP32, velocity_N: FlatFP32, delta_N: FlatFP32) -> tuple[FlatFP32, FlatFP32]:
        """The new Θ and v, FP32, from the averaged outer gradient Δ; nothing is changed in place."""
        velocity_N = self.momentum * velocity_N + delta_N
        return outer_N - self.lr * (delta_N + self.momentum * velocity_N), velocity_N

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the outer step."""
        now, average = self.begin(fragment, sync, cohort), self.averaged(fragment, average, cohort)
        vectors = fragment.use("outer"), fragment.use("velocity"), average.total_N
        most = elements_at_once(average.total_N.device)
        for outer_n, velocity_n, total_n in zip(*(v.split(most) for v in vectors), strict=True):
            delta_n = Average(total_n, average.weight).divided()
            new_outer_n, new_velocity_n = now.step(outer_n, velocity_n, delta_n)
            outer_n.copy_(new_outer_n)
            velocity_n.copy_(new_velocity_n)


@dataclass(frozen=True, kw_only=True)
class DelayedNesterov(Nesterov):
    """b ← b + Δ, and in every n-th round v ← μ v + b / n; Θ ← Θ − η (Δ / n + (1 − c n + c) μ v); b ← 0.

    In the rounds between, Θ ← Θ − η (Δ / n + c μ v). With n = 1 it is Nesterov. Source: arXiv 2401.09135,
    Algorithm 3, with β = μ and N = n; there each Δ is one replica's, and here the average of all.
    """

    delay: int = 2
    """n, rounds of a fragment from one update of the momentum to the next."""
    activation: float = 0.0
    """c, the part of the momentum that acts in the rounds between, at most 1 / n."""

    slots = ("velocity", "buffer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay < 1:
            raise UserError(f"delay={self.delay} must be at least 1", "delay")
        if not 0 <= self.activation <= 1 / self.delay:
            raise UserError(f"activation={self.activation} must be from 0 to 1 / delay={self.delay}", "activation")

    def gain(self, rho: float) -> None:
        """None: the step is not along Δ alone."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the outer step."""
        n, c, lr = self.delay, self.activation, self.begin(fragment, sync, cohort).lr
        is_nth = sync.round % n == 0
        momentum = ((1 - c * n + c) if is_nth else c) * self.momentum
        vectors = *map(fragment.use, ("outer", *self.slots)), average.total_N
        pieces = (vector_N.split(elements_at_once(vector_N.device)) for vector_N in vectors)
        for outer_n, velocity_n, buffer_n, total_n in zip(*pieces, strict=True):
            delta_n = Average(total_n, average.weight).divided()
            buffer_n.add_(delta_n)
            if is_nth:
                velocity_n.mul_(self.momentum).add_(Average(buffer_n, n).divided())
                buffer_n.zero_()
            outer_n.sub_(lr * (Average(delta_n, n).divided() + momentum * velocity_n))
