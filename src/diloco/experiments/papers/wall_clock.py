"""Losses over the idealized wall-clock of arXiv 2503.09799, appendix A (its Figures 6 and 12)."""

import math
from collections.abc import Callable, Sequence

from diloco.experiments.papers.comparison import Row
from diloco.experiments.papers.experiment import Panel, curves
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName


def wall_clock_panels(
    rows: Sequence[Row],
    series: Callable[[Row], str],
    num_replicas: Callable[[Row], int],
    sync_every: Callable[[Row], int],
) -> list[Panel]:
    """A panel for each of the paper's networks between sites, the slowest first.

    Args:
        rows: of finished runs, or not.
        series: the name of a row's curve.
        num_replicas: M of a row; 0 is Data-Parallel.
        sync_every: H of a row; Data-Parallel's means nothing.
    """
    return [
        Panel(
            title=f"{network.gbit_s:g} Gbit/s between sites",
            x_label="idealized wall-clock, seconds",
            x_log=True,
            curves=curves(rows, lambda row, n=name: _seconds(row, n, num_replicas(row), sync_every(row)), series),
        )
        for name, network in reversed(NETWORKS.items())
    ]


def _seconds(row: Row, between: NetworkName, num_replicas: int, sync_every: int) -> float:
    """The time of a run on as many chips as compute a step in a second, and at least one a replica of eight.

    The paper does not say how many chips it takes, but that size and batch alone decide.
    """
    num_params, num_tokens = float(row["num_params"]), float(row["num_tokens"])
    batch_tokens = num_tokens / float(row["num_steps"])
    chip = IdealizedRun.flops_per_chip
    num_chips = max(_MOST_REPLICAS, math.ceil(6 * num_params * batch_tokens / chip))
    return IdealizedRun(
        num_params=num_params,
        num_tokens=num_tokens,
        batch_tokens=batch_tokens,
        num_chips=num_chips,
        num_replicas=num_replicas,
        sync_every=sync_every,
        between=between,
    ).seconds


_MOST_REPLICAS = 8
