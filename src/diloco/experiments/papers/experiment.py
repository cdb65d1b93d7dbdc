"""The parts of an experiment: its runs, its figure's panels, and what it finds about the paper's claim."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco.experiments.papers.comparison import Row, finished
from diloco.experiments.papers.tiers import Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName


class Point(NamedTuple):
    """The mean over the seeds, and their range."""

    x: float | str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes: curves over numbers, or points over names."""

    title: str
    x_label: str
    y_label: str = "held-out loss, nats per token"
    curves: Mapping[str, Sequence[Point]]
    """Points by the label of their curve."""
    x_log: bool = False
    published: bool = False
    """True if the numbers are the paper's, not ours."""

    @property
    def names(self) -> list[str]:
        """The names over which the points stand, in order; empty for numbers."""
        return list(dict.fromkeys(p.x for points in self.curves.values() for p in points if isinstance(p.x, str)))

    @property
    def legend(self) -> str:
        """The title where it tells the curves apart; else empty."""
        return self.title if not self.published and len(self.curves) > 1 else ""


class Finding(NamedTuple):
    """A measured sentence, and whether the runs agree with the claim."""

    measured: str
    verdict: str
    """A `Verdict`, or a sentence of several."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One claim of a paper, and the runs that test it."""

    name: str
    claim: str
    """The paper's claim, in a sentence."""
    source: str
    """The figure or table that makes it."""
    runs: Sequence[LabelledRun]
    panels: Callable[[Sequence[Row]], list[Panel]]
    finding: Callable[[Sequence[Row]], Finding]
    with_accuracy: bool = False
    """True if the paper reports zero-shot accuracies, too."""
    parameters: tuple[str, ...] = ()
    """`replica`, `average` or both: parameters whose loss is compared with the outer parameters'."""
    with_curves: bool = False
    """True if the rows have the cosines between outer gradients as curves over training."""


def over_seeds(tier: Tier, runs: Iterable[LabelledRun]) -> list[LabelledRun]:
    """Each run with every seed of a tier, which becomes a label."""
    runs = list(runs)
    return [
        replace(run, labels={**run.labels, "seed": seed}, config=replace(run.config, seed=seed))
        for seed in tier.seeds
        for run in runs
    ]


def curves(
    rows: Sequence[Row],
    x: str | Callable[[Row], Any],
    series: str | Callable[[Row], str] | None = None,
    y: str = "eval_loss",
) -> dict[str, list[Point]]:
    """A curve for each value of the column `series`, a point for each value of `x`, in the order of the rows."""
    grouped: dict[str, dict[Any, list[float]]] = {}
    for row in finished(rows):
        if row.get(y) in (None, ""):
            continue
        value = "" if series is None else series(row) if callable(series) else str(row[series])
        at = x(row) if callable(x) else row[x]
        grouped.setdefault(_LABELS.get(value, value), {}).setdefault(at, []).append(float(row[y]))
    return {
        label: [Point(at, statistics.mean(values), min(values), max(values)) for at, values in points.items()]
        for label, points in grouped.items()
    }


_LABELS = {"data_parallel": "Data-Parallel", "diloco": "DiLoCo", "streaming_overlapped_fp4": "Streaming"}


def accuracy_panels(
    rows: Sequence[Row],
    x: str | Callable[[Row], Any],
    series: str | Callable[[Row], str] | None,
    published: Sequence[Row] = (),
    **labels: Any,
) -> list[Panel]:
    """A panel for each task that the rows have an accuracy of, and beside it the paper's where it has that task.

    A task is named by its file, whose name begins with the paper's name of the task.
    """
    names = dict.fromkeys(name for row in finished(rows) for name in row if name.endswith("_acc"))
    panels: list[Panel] = []
    labels = {"y_label": "zero-shot accuracy", **labels}
    for name in names:
        ours = curves(rows, x, series, y=name)
        panels.append(Panel(title=f"{name.removesuffix('_acc')}, here", curves=ours, **labels))
        known = {column for row in published for column in row if column.endswith("_acc")}
        for column in (c for c in known if name.startswith(c.removesuffix("_acc"))):
            theirs = curves(published, x, series, y=column)
            panels.append(Panel(title=column.removesuffix("_acc"), curves=theirs, published=True, **labels))
    return panels


def wall_clock_panels(
    rows: Sequence[Row],
    series: Callable[[Row], str],
    num_replicas: Callable[[Row], int],
    sync_every: Callable[[Row], int],
) -> list[Panel]:
    """Curves over the idealized wall-clock of arXiv 2503.09799, appendix A (its Figures 6 and 12).

    There is a panel for each of the paper's networks between sites, the slowest first.

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
            # pyrefly: ignore[bad-argument-type]  # it takes a default of a lambda for any string
            curves=curves(rows, lambda row, n=name: _seconds(row, n, num_replicas(row), sync_every(row)), series),
        )
        for name, network in reversed(NETWORKS.items())
    ]


def _seconds(row: Row, between: NetworkName, num_replicas: int, sync_every: int) -> float:
    """The time of a run on as many chips as compute a step in a second, and on eight, one per replica, at least.

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
