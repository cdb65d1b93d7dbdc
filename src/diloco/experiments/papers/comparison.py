"""Comparisons of rows, seed by seed, and the verdicts on a claim that follow from them."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from diloco.scaling.gap_laws import GapLaw
from diloco.scaling.power_laws import Estimate

Row = Mapping[str, Any]
Verdict = Literal["agrees", "disagrees", "cannot tell", "within the band", "above the band", "below the band"]


def finished(rows: Iterable[Row]) -> list[Row]:
    """The rows of runs that did not fail."""
    return [row for row in rows if not row.get("failed")]


def chosen(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The finished rows with these labels."""
    return [row for row in finished(rows) if all(row.get(name) == value for name, value in labels.items())]


def at_best(rows: Sequence[Row], tuned: str, *names: str) -> list[Row]:
    """The rows with the best value of the label `tuned`, for each setting of the labels `names`.

    It has the lowest mean loss of the values with the most finished runs: a value at which a seed has diverged is
    not the best by the others.
    """
    groups: dict[tuple, dict[Any, list[Row]]] = {}
    for row in finished(rows):
        groups.setdefault(tuple(row.get(name) for name in names), {}).setdefault(row.get(tuned), []).append(row)
    return [row for by_value in groups.values() for row in min(by_value.values(), key=_rank)]


def _rank(rows: Sequence[Row]) -> tuple[int, float]:
    return -len(rows), statistics.mean(float(row["eval_loss"]) for row in rows)


def flops(row: Row) -> float:
    """Floating-point operations of a run: the paper's number, or 6·N·tokens."""
    return float(row["flops"]) if "flops" in row else 6.0 * float(row["num_params"]) * float(row["num_tokens"])


def change(
    rows: Sequence[Row], one: Mapping[str, Any], other: Mapping[str, Any], y: str = "eval_loss"
) -> "Change":
    """The relative difference of `y` between the rows labelled `one` and those labelled `other`, seed by seed."""
    ours, theirs = ({row["seed"]: float(row[y]) for row in chosen(rows, **labels)} for labels in (one, other))
    return Change({seed: ours[seed] / theirs[seed] - 1 for seed in sorted(ours.keys() & theirs.keys())})


class Change(NamedTuple):
    """Relative differences, one per seed.

    >>> str(Change({0: 0.02, 1: 0.03}))
    '+2.50 % (+2.00 … +3.00)'
    """

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN where no seed has both runs."""
        return statistics.mean(self.by_seed.values()) if self.by_seed else float("nan")

    def __str__(self) -> str:
        if not self.by_seed:
            return "no run"
        if len(self.by_seed) == 1:
            return f"{100 * self.mean:+.2f} % (one seed)"
        low, high = 100 * min(self.by_seed.values()), 100 * max(self.by_seed.values())
        return f"{100 * self.mean:+.2f} % ({low:+.2f} … {high:+.2f})"

    def rises(self, at_least: float = 0.0) -> Verdict:
        """Agrees if every seed is above the bound, disagrees if none is.

        The mean must be further from the bound than the seeds are from each other; one seed cannot tell.
        """
        values = self.by_seed.values()
        if len(values) < 2 or abs(self.mean - at_least) <= max(values) - min(values):
            return "cannot tell"
        return common(value > at_least for value in values)

    def falls(self) -> Verdict:
        """The verdict of `rises` on the opposite."""
        return Change({seed: -value for seed, value in self.by_seed.items()}).rises()

    def minus(self, other: "Change") -> "Change":
        """The difference to another change, over the seeds that both have."""
        both = self.by_seed.keys() & other.by_seed.keys()
        return Change({seed: self.by_seed[seed] - other.by_seed[seed] for seed in sorted(both)})

    def rises_over(self, other: "Change") -> Verdict:
        """The verdict of `rises` on the difference to another change."""
        return self.minus(other).rises()

    def within(self, bound: float) -> Verdict:
        """Agrees if every seed lies between −bound and bound, disagrees if none does."""
        return common(abs(value) <= bound for value in self.by_seed.values())

    def at_most(self, bound: float) -> Verdict:
        """Agrees if every seed lies at the bound or below, disagrees if none does."""
        return common(value <= bound for value in self.by_seed.values())


class Placed(NamedTuple):
    """A gap and the band of a law at the same size.

    >>> str(Placed(Change({0: 0.02, 1: 0.03}), Estimate(0.024, 0.01, 0.038)))
    '+2.50 % (+2.00 … +3.00; band +1.0 … +3.8)'
    """

    gap: Change
    band: Estimate

    def __str__(self) -> str:
        low, high = (f"{100 * (end or 0.0):+.1f}" for end in (self.band.low, self.band.high))
        return f"{str(self.gap).removesuffix(')')}; band {low} … {high})" if self.gap.by_seed else str(self.gap)

    @property
    def verdict(self) -> Verdict:
        """Above or below the band if every seed is; else within it."""
        values, low, high = self.gap.by_seed.values(), self.band.low, self.band.high
        if low is None or high is None or not values:
            return "cannot tell"
        if min(values) > high or max(values) < low:
            return "above the band" if min(values) > high else "below the band"
        return "within the band"


def placed(rows: Sequence[Row], one: Mapping[str, Any], other: Mapping[str, Any], law: GapLaw) -> Placed:
    """The gap of the rows labelled `one` to those labelled `other`, and the law's band at their size."""
    sizes = [float(row["num_params"]) for row in chosen(rows, **one)]
    return Placed(change(rows, one, other), law.band(sizes[0]) if sizes else Estimate(math.nan))


def of_bands(verdicts: Iterable[Verdict]) -> str:
    """The verdict on several gaps, each beside its band.

    >>> of_bands(["within the band", "below the band", "within the band"])
    'within the band in 2 of 3, below the band in 1'
    """
    counts = Counter(verdicts)
    if not counts or "cannot tell" in counts:
        return "cannot tell"
    (first, number), *others = sorted(counts.items(), key=lambda item: -item[1])
    listed = (f"{first} in {number} of {counts.total()}", *(f"{verdict} in {n}" for verdict, n in others))
    return ", ".join(listed) if others else first


def common(answers: Iterable[bool]) -> Verdict:
    """Agrees if all answers are yes, disagrees if all are no; no answer cannot tell."""
    answers = set(answers)
    return "cannot tell" if len(answers) != 1 else "agrees" if answers.pop() else "disagrees"


def all_of(*verdicts: str) -> Verdict:
    """Agrees if all do, disagrees if any does."""
    return "disagrees" if "disagrees" in verdicts else "cannot tell" if "cannot tell" in verdicts else "agrees"
