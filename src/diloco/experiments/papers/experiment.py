"""What an experiment is: runs, the picture of a paper's figure, and what is found."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from diloco.experiments.papers.tiers import Tier
from diloco.experiments.runner.grid import LabelledRun
from diloco.training.config import TrainConfig

Row = Mapping[str, Any]
Verdict = Literal["agrees", "disagrees", "cannot tell"]


class Point(NamedTuple):
    """The mean over the seeds, and their range."""

    x: float | str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over one axis, or bars over names."""

    title: str
    x_label: str
    y_label: str = "held-out loss, nats a token"
    curves: Mapping[str, Sequence[Point]]
    x_log: bool = False
    published: bool = False
    """Whether the numbers are the paper's."""


class Finding(NamedTuple):
    """What the runs say of the claim."""

    measured: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One claim of a paper, and the runs that test it."""

    name: str
    claim: str
    """The paper's, in a sentence."""
    source: str
    """Where it makes it."""
    runs: Sequence[LabelledRun]
    panels: Callable[[Sequence[Row]], list[Panel]]
    finding: Callable[[Sequence[Row]], Finding]
    with_accuracy: bool = False
    """Whether the paper reports zero-shot accuracies, too."""
    parameters: tuple[str, ...] = ()
    """Of replica and average, whose loss is compared, too."""


LabelledConfigs = Iterable[tuple[dict[str, Any], TrainConfig]]


def over_seeds(tier: Tier, runs: Callable[[int], LabelledConfigs]) -> list[LabelledRun]:
    """Labelled runs of every seed."""
    return [
        LabelledRun(labels={**labels, "seed": seed}, config=config)
        for seed in tier.seeds
        for labels, config in runs(seed)
    ]


def finished(rows: Iterable[Row]) -> list[Row]:
    """Those that did not fail."""
    return [row for row in rows if not row.get("failed")]


def chosen(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The finished rows with these labels."""
    return [row for row in finished(rows) if all(row[name] == value for name, value in labels.items())]


def curves(
    rows: Sequence[Row], x: str | Callable[[Row], Any], series: str | None = None, y: str = "eval_loss"
) -> dict[str, list[Point]]:
    """A curve for each value of `series`, a point for each of `x`, in the order of the rows."""
    grouped: dict[str, dict[Any, list[float]]] = {}
    for row in finished(rows):
        if row.get(y) in (None, ""):
            continue
        name = str(row[series]) if series is not None else ""
        at = x(row) if callable(x) else row[x]
        grouped.setdefault(name, {}).setdefault(at, []).append(float(row[y]))
    return {
        name: [Point(at, statistics.mean(values), min(values), max(values)) for at, values in points.items()]
        for name, points in grouped.items()
    }


def flops(row: Row) -> float:
    """Floating-point operations of a run, 6·N·tokens; the paper's are given."""
    return float(row["flops"]) if "flops" in row else 6.0 * float(row["num_params"]) * float(row["num_tokens"])


def accuracy_panels(
    rows: Sequence[Row],
    x: str | Callable[[Row], Any],
    series: str | None,
    published: Sequence[Row] = (),
    **labels: Any,
) -> list[Panel]:
    """A panel for each task that the rows have an accuracy of, and the paper's beside it where it has that task.

    A task has the name of its file, which begins with the paper's name of it.
    """
    names = dict.fromkeys(name for row in finished(rows) for name in row if name.endswith("_acc"))
    panels, labels = [], {"y_label": "zero-shot accuracy", **labels}
    for name in names:
        ours = curves(rows, x, series, y=name)
        panels.append(Panel(title=f"{name.removesuffix('_acc')}, here", curves=ours, **labels))
        known = {column for row in published for column in row if column.endswith("_acc")}
        for column in (c for c in known if name.startswith(c.removesuffix("_acc"))):
            theirs = curves(published, x, series, y=column)
            panels.append(Panel(title=column.removesuffix("_acc"), curves=theirs, published=True, **labels))
    return panels


def change(rows: Sequence[Row], of: Mapping[str, Any], to: Mapping[str, Any], y: str = "eval_loss") -> "Change":
    """How much higher `y` is in the rows labelled `of` than in those labelled `to`, seed by seed."""
    one, other = ({row["seed"]: float(row[y]) for row in chosen(rows, **labels)} for labels in (of, to))
    return Change({seed: one[seed] / other[seed] - 1 for seed in sorted(one.keys() & other.keys())})


class Change(NamedTuple):
    """Relative differences, one a seed.

    >>> str(Change({0: 0.02, 1: 0.03}))
    '+2.50 % (+2.00 … +3.00)'
    """

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Over the seeds; NaN where no seed has both runs."""
        return statistics.mean(self.by_seed.values()) if self.by_seed else float("nan")

    def __str__(self) -> str:
        if not self.by_seed:
            return "no run"
        low, high = 100 * min(self.by_seed.values()), 100 * max(self.by_seed.values())
        return f"{100 * self.mean:+.2f} % ({low:+.2f} … {high:+.2f})"

    def rises(self, at_least: float = 0.0) -> Verdict:
        """Whether it is above a bound in every seed, or in none, its mean further from it than seeds differ.

        One seed cannot tell.
        """
        values = self.by_seed.values()
        if len(values) < 2 or abs(self.mean - at_least) <= max(values) - min(values):
            return "cannot tell"
        return common(value > at_least for value in values)

    def rises_over(self, other: "Change") -> Verdict:
        """Whether it is larger than another, in the sense of `rises`, in the seeds that both have."""
        both = self.by_seed.keys() & other.by_seed.keys()
        return Change({seed: self.by_seed[seed] - other.by_seed[seed] for seed in sorted(both)}).rises()

    def within(self, bound: float) -> Verdict:
        """Whether no seed is further than `bound` from no difference, or every one is, or some are."""
        return common(abs(value) <= bound for value in self.by_seed.values())

    def at_most(self, bound: float) -> Verdict:
        """Whether no seed lies above a bound, or every one does, or some do."""
        return common(value <= bound for value in self.by_seed.values())


def common(answers: Iterable[bool]) -> Verdict:
    """Agrees if all answers are yes, disagrees if all are no."""
    found = list(answers)
    return "cannot tell" if not found or any(found) != all(found) else "agrees" if all(found) else "disagrees"


def all_of(*verdicts: str) -> Verdict:
    """Agrees if all do, disagrees if any does."""
    return "disagrees" if "disagrees" in verdicts else "cannot tell" if "cannot tell" in verdicts else "agrees"
