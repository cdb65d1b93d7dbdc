"""The papers' gap to Data-Parallel as a power law of the size, and the band that it gives at any size.

    loss / Data-Parallel's loss = A·N^α

by least squares in log space over the rows of one method, M and H. The band is the 95 % interval of the law at N.
Far from the fitted sizes it says what the papers' own numbers lead one to expect, and no more: in both papers the
number of steps grows with N.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from diloco.errors import UserError
from diloco.paper_tables import rows
from diloco.scaling.power_laws import LAWS, Estimate, PowerLawFit
from diloco.scaling.table import PUBLISHED_PARAMS, published_table


@dataclass(frozen=True)
class GapLaw:
    """The law of one method's loss over another's, minus 1."""

    source: str
    """The tables whose rows it is fitted to."""
    fit: PowerLawFit
    """The law of the ratio of the losses."""

    def band(self, num_params: float) -> Estimate:
        """The gap at N, with its 95 % interval.

        >>> gap = streaming_gap(2, 30).band(1.2e6)
        >>> [round(100 * value, 1) for value in (gap.value, gap.low, gap.high)]
        [1.7, 0.8, 2.7]
        """
        ratio = self.fit.predict(num_params)
        assert ratio.low is not None and ratio.high is not None, "six sizes or more give an interval"
        return Estimate(ratio.value - 1, ratio.low - 1, ratio.high - 1)


_STREAMING = {
    (2, 30): "streaming_overlapped_fp4",
    (2, 100): "Streaming, H=100",
    (4, 30): "Streaming, M=4",
    (4, 100): "Streaming, M=4, H=100",
}
"""The name in the table of Streaming DiLoCo with M replicas and H."""

_SIZES = ("35M", "90M", "180M", "335M", "550M", "1.3B", "4B")
"""The sizes of arXiv 2501.18512, the smallest first, by the names that their architectures have in 2503.09799."""


@cache
def streaming_gap(num_replicas: int, sync_every: int) -> GapLaw:
    """The gap of Streaming DiLoCo with E3M0 to Data-Parallel (arXiv 2501.18512).

    Args:
        num_replicas: M, 2 or 4.
        sync_every: H, 30 or 100.

    Raises:
        UserError: if the paper has no row of that M and H.
    """
    if (num_replicas, sync_every) not in _STREAMING:
        known = ", ".join(f"M = {m}, H = {period}" for m, period in _STREAMING)
        raise UserError(f"M = {num_replicas}, H = {sync_every}: the paper's tables have {known}")
    losses = _streaming_losses()
    return GapLaw(_STREAMING_TABLES, _fit(losses[_STREAMING[num_replicas, sync_every]], losses["data_parallel"]))


@cache
def period_gap(num_replicas: int) -> GapLaw:
    """The gap of Streaming DiLoCo with H = 100 to that with H = 30 (arXiv 2501.18512).

    Args:
        num_replicas: M, 2 or 4.
    """
    losses = _streaming_losses()
    return GapLaw(
        _STREAMING_TABLES, _fit(losses[_STREAMING[num_replicas, 100]], losses[_STREAMING[num_replicas, 30]])
    )


_STREAMING_TABLES = "arXiv 2501.18512, Tables 6 and 7"


def _streaming_losses() -> dict[str, dict[float, float]]:
    """The losses of each method by N."""
    losses: dict[str, dict[float, float]] = {}
    for row in rows("streaming_scaling"):
        losses.setdefault(row["method"], {})[row["flops"]] = row["eval_loss"]
    num_params = dict(
        zip(sorted(losses["data_parallel"]), (PUBLISHED_PARAMS[name] for name in _SIZES), strict=True)
    )
    return {
        method: {num_params[operations]: loss for operations, loss in by_operations.items()}
        for method, by_operations in losses.items()
    }


@cache
def diloco_gap(num_replicas: int, over: int = 0) -> GapLaw:
    """The gap of DiLoCo with M replicas and H = 30 to Data-Parallel, each at its best hyperparameters.

    Args:
        num_replicas: M, one of 1, 2, 4 and 8.
        over: M of the losses that it is compared with; 0 is Data-Parallel.

    Raises:
        UserError: if the paper has no row of that M.
    """
    losses: dict[int, dict[float, float]] = {}
    for point in published_table():
        losses.setdefault(point.replicas, {})[point.params] = point.eval_loss
    if num_replicas not in losses:
        raise UserError(f"M = {num_replicas}: the paper's table has {', '.join(f'M = {m}' for m in losses if m)}")
    return GapLaw("arXiv 2503.09799, Table 4", _fit(losses[num_replicas], losses[over]))


def larger_batch_from(num_replicas: int) -> float:
    """The N above which DiLoCo's best batch is larger than Data-Parallel's, by the published laws (Table 9).

    >>> f"{larger_batch_from(2):.2g}"
    '2.6e+07'
    """
    ours, theirs = LAWS["batch_tokens"][num_replicas], LAWS["batch_tokens"][0]
    return (theirs.factor / ours.factor) ** (1 / (ours.exponent - theirs.exponent))


def _fit(losses: Mapping[float, float], over: Mapping[float, float]) -> PowerLawFit:
    """The law of the ratio at the sizes that both have."""
    sizes = sorted(losses.keys() & over.keys())
    return PowerLawFit(sizes, [losses[n] / over[n] for n in sizes])
