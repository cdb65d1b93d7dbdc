"""Eager updates as the outer rule: this replica's part of an outer step is taken at the send.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.schedule import Sync
from diloco.wire.kernels.memory import elements_at_once


@dataclass(frozen=True, kw_only=True)
class Eager(Nesterov):
    """Sent: a = D_m / M; v ← μ v + a; Θ ← Θ − η (a + μ v); θ ← Θ. Come: b = Δ − a; v ← v + b; Θ ← Θ − η (b + μ b).

    Together it is Nesterov's step with Δ, up to rounding, which differs between replicas, as Θ therefore does. In
    flight a replica trains from its own part of the step. Source: arXiv 2502.12996, where the others' part enters
    at the next send, since it is H steps in flight; here when it has come. Merge with `translate`.
    """

    slots = ("velocity", "own")
    shared = False
    merges_at_send = True

    def on_send(self, fragment: FragmentState, own: Callable[[], Tensor], sync: Sync, cohort: Cohort) -> None:
        """Take this replica's part of the outer step."""
        own_N = fragment.use("own")
        own_N.copy_(Average(own(), len(cohort.members)).divided())
        super().on_average(fragment, Average(own_N, 1.0), sync, cohort)

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the others' part."""
        lr = self.rate(sync)
        vectors = *map(fragment.use, ("outer", *self.slots)), average.total_N
        pieces = (vector_N.split(elements_at_once(vector_N.device)) for vector_N in vectors)
        for outer_n, velocity_n, own_n, total_n in zip(*pieces, strict=True):
            others_n = Average(total_n, average.weight).divided().sub_(own_n)
            velocity_n.add_(others_n)
            outer_n.sub_(lr * (others_n + self.momentum * others_n))
