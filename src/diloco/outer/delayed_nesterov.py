"""SGD with delayed Nesterov momentum as the outer rule.

Shapes: N elements of one fragment.
"""

from dataclasses import dataclass

from diloco.errors import UserError
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.schedule import Sync
from diloco.wire.kernels.memory import elements_at_once


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
        """Refuse a delay and an activation that are out of range."""
        super().__post_init__()
        if self.delay < 1:
            raise UserError(f"delay={self.delay} must be at least 1", "delay")
        if not 0 <= self.activation <= 1 / self.delay:
            raise UserError(f"activation={self.activation} must be from 0 to 1 / delay={self.delay}", "activation")

    def gain(self, rho: float) -> None:
        """None: the step is not along Δ alone."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the outer step."""
        n, c, lr = self.delay, self.activation, self.begin(fragment, sync).lr
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
