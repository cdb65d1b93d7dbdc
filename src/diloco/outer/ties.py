"""The mean of the outer gradients that agree in sign as the outer rule.

Shapes: N elements of one fragment.
"""

from dataclasses import dataclass

import torch

from diloco.outer.averages import Average, weigh_in
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.schedule import Sync


@dataclass(frozen=True, kw_only=True)
class Ties(Nesterov):
    """Per element D = the weighted mean of the D_m ≠ 0 with the sign of Σ_m w_m D_m; then `Nesterov`.

    Source: TIES-Merging, arXiv 2306.01708, which first keeps the largest fifth of each D_m: the codec
    `topk:density=0.2`. arXiv 2501.18512 tried that codec alone.
    """

    needs_deltas = True

    def gain(self, rho: float) -> None:
        """None: the step is not along Δ alone."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Make D in the place of the total, and take the outer step."""
        sign_N = average.total_N.sign()
        agreeing_N = torch.empty_like(sign_N)
        for index, (delta_N, weight) in enumerate(zip(average.deltas(), cohort.weights, strict=True)):
            agrees_N = (delta_N.sign() == sign_N) & (sign_N != 0)
            weigh_in(average.total_N, torch.where(agrees_N, delta_N, 0), weight, is_first=not index)
            weigh_in(agreeing_N, agrees_N.to(agreeing_N.dtype), weight, is_first=not index)
        average.total_N.div_(agreeing_N.clamp_(min=min(cohort.weights)))  # where nobody agrees the sum is 0
        super().on_average(fragment, Average(average.total_N, 1.0), sync, cohort)
