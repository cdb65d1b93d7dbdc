"""The mean of the outer gradients that agree in sign as the outer rule.

Shapes: N elements of one fragment.
"""

from dataclasses import dataclass

import torch

from diloco.outer.averages import Average, weigh_in
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.wire.kernels.memory import elements_at_once, empty_like


@dataclass(frozen=True, kw_only=True)
class Ties(Nesterov):
    """Per element D = the weighted mean of the D_m ≠ 0 with the sign of Σ_m w_m D_m; then `Nesterov`.

    Source: TIES-Merging, arXiv 2306.01708, which first keeps the largest fifth of each D_m: the codec
    `topk:density=0.2`. arXiv 2501.18512 tried that codec alone.
    """

    needs_deltas = True

    def gain(self, rho: float) -> None:
        """None: the step is not along Δ alone."""

    def averaged(self, fragment: FragmentState, average: Average, cohort: Cohort) -> Average:
        """D, in the place of the total."""
        most = elements_at_once(average.total_N.device)
        agreeing_N = empty_like(average.total_N)
        signs = torch.sign(average.total_N, out=empty_like(average.total_N)).split(most)
        for index, (delta_N, weight) in enumerate(zip(average.deltas(), cohort.weights, strict=True)):
            vectors = (vector_N.split(most) for vector_N in (average.total_N, agreeing_N, delta_N))
            for sign_n, total_n, agreeing_n, delta_n in zip(signs, *vectors, strict=True):
                agrees_n = (delta_n.sign() == sign_n) & (sign_n != 0)
                weigh_in(total_n, torch.where(agrees_n, delta_n, 0), weight, is_first=not index)
                weigh_in(agreeing_n, agrees_n.to(agreeing_n.dtype), weight, is_first=not index)
        average.total_N.div_(agreeing_N.clamp_(min=min(cohort.weights)))  # where nobody agrees the sum is 0
        return Average(average.total_N, 1.0)
