"""Power laws of loss, learning rate and batch through the best run of each size and M in a table.

The best batch of a size is a parabola's minimum in log2(B), through the values tried beside the best one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from diloco.errors import UserError
from diloco.scaling.power_laws import PowerLawFit
from diloco.scaling.table import Point, best_points, published_table

Kind = Literal["joint", "independent"]
TOKENS_PER_PARAM = 20.0
_PUBLISHED_SYNC_EVERY = 30


@dataclass(frozen=True)
class Laws:
    """Laws from a table; if the table has no hyperparameters, the published laws stand in for them.

    Args:
        points: runs of a sweep; None is the published table of losses.
    """

    points: Sequence[Point] | None = None

    @cached_property
    def best(self) -> list[Point]:
        """The best run of each size and M."""
        return best_points(self.points if self.points is not None else published_table())

    @property
    def replicas(self) -> list[int]:
        """All M of the table, 0 for Data-Parallel."""
        return sorted({point.replicas for point in self.best})

    def fit(self, quantity: str, num_replicas: int, kind: Kind) -> PowerLawFit:
        """The table's law of a quantity: loss, learning_rate or batch_tokens.

        Raises:
            UserError: if the table has too few sizes or numbers of replicas for it.
        """
        self._check(num_replicas, kind)
        chosen = self.chosen(num_replicas, kind)
        if len({point.params for point in chosen}) < 2:
            sizes = {m: {point.params for point in self.chosen(m, "independent")} for m in self.replicas}
            known = ", ".join(str(m) for m, params in sizes.items() if len(params) > 1) or "none"
            raise UserError(
                f"M = {num_replicas} was run at {chosen[0].params:g} parameters only: there are independent laws "
                f"for M = {known}",
                "num_replicas",
            )
        values = [self.value(point, quantity) for point in chosen]
        replicas = [point.replicas for point in chosen] if kind == "joint" else None
        return PowerLawFit([point.params for point in chosen], values, replicas, self._step(chosen, quantity))

    def chosen(self, num_replicas: int, kind: Kind) -> list[Point]:
        """The points of `best` that a law goes through."""
        return [p for p in self.best if (p.replicas > 0 if kind == "joint" else p.replicas == num_replicas)]

    def value(self, point: Point, quantity: str) -> float:
        """The quantity at a point of `best`."""
        if quantity == "loss":
            return point.eval_loss
        if quantity == "batch_tokens":
            return best_batch(self.runs_of(point), point)
        return point.settings[quantity]

    def runs_of(self, point: Point) -> list[Point]:
        """All points of the table with the same size and M."""
        return [p for p in self.points or () if (p.params, p.replicas) == (point.params, point.replicas)]

    def is_on_edge(self, point: Point, quantity: str) -> bool:
        """True if a point of `best` has the smallest or the largest value tried: a better one may lie beyond."""
        value, tried = point.settings[quantity], self._tried(point, quantity)
        return len({value, *tried}) > 1 and not min(tried) < value < max(tried)

    def _tried(self, point: Point, quantity: str) -> list[float]:
        """The values tried beside a point of `best`, with however few seeds."""
        return list(losses_beside(self.runs_of(point), replace(point, num_seeds=1), quantity))

    def unequally_tried(self) -> dict[int, dict[float, int]]:
        """The number of outer learning rates tried at each size, for every M where sizes differ in it."""
        rates: dict[int, dict[float, set[float]]] = {}
        for p in self.points or ():
            if "outer_learning_rate" in p.settings:
                of_size = rates.setdefault(p.replicas, {}).setdefault(p.params, set())
                of_size.add(p.settings["outer_learning_rate"])
        numbers = {m: {n: len(tried) for n, tried in sorted(by_n.items())} for m, by_n in sorted(rates.items())}
        return {m: by_n for m, by_n in numbers.items() if len(set(by_n.values())) > 1}

    def _step(self, best: Sequence[Point], quantity: str) -> float:
        """The least factor between values tried beside the best; 1 if the law's points do not lie on a grid."""
        if quantity == "loss" or all(self.value(point, quantity) != point.settings[quantity] for point in best):
            return 1.0
        tried = (self._tried(point, quantity) for point in best)
        return min((high / low for values in tried for low, high in pairwise(values)), default=1.0)

    def _check(self, num_replicas: int, kind: Kind) -> None:
        known = ", ".join(map(str, self.replicas))
        if kind == "joint" and num_replicas == 0:
            raise UserError(
                "a joint law holds for DiLoCo, M ≥ 1; for Data-Parallel, M = 0, set fit=independent (there are "
                f"independent laws for M = {known})",
                "fit",
            )
        if kind == "joint" and len([m for m in self.replicas if m > 0]) < 2:
            raise UserError(
                f"a joint law needs runs with two numbers of replicas or more, and there are M = {known} (0 is "
                "Data-Parallel): set num_replicas to one of these, and fit=independent",
                *("num_replicas", "fit"),
            )
        if kind == "independent" and num_replicas not in self.replicas:
            raise UserError(
                f"there is no independent law for {num_replicas} replicas: there are those for M = {known} (0 is "
                "Data-Parallel); a joint law takes any M ≥ 1",
                "num_replicas",
            )

    def has(self, quantity: str) -> bool:
        """True if the table itself has the quantity."""
        return self.points is not None and all(quantity in point.settings for point in self.points)

    @property
    def sync_every(self) -> float | None:
        """H of the runs; None if the table does not have it."""
        if self.points is None:
            return _PUBLISHED_SYNC_EVERY
        return next((p.settings["sync_every"] for p in self.points if "sync_every" in p.settings), None)

    @property
    def tokens_per_param(self) -> float:
        """Tokens a parameter of the runs; the papers' 20 if the table does not have them."""
        ratios = [p.settings["tokens"] / p.params for p in self.points or () if "tokens" in p.settings]
        return statistics.mean(ratios) if ratios else TOKENS_PER_PARAM


def losses_beside(points: Sequence[Point], best: Point, quantity: str) -> dict[float, float]:
    """The lowest loss at each value of a quantity that as many seeds have tried beside the best point, by value.

    The values are those tried at one outer learning rate: the best point's, if smaller and larger values were
    tried at it; otherwise the rate with the most values. Learning rates are those tried at the best batch.

    Args:
        points: all runs of a size and M.
        best: the best of them.
        quantity: learning_rate, batch_tokens or outer_learning_rate.

    Raises:
        UserError: if the points don't have the quantity.
    """
    if any(quantity not in point.settings for point in points):
        raise UserError(f"the best {quantity} needs the column {quantity} in every row of the table")
    points = [point for point in points if point.num_seeds >= best.num_seeds]
    if quantity == "outer_learning_rate":
        return _lowest(points, quantity)
    if quantity == "learning_rate":
        points = [p for p in points if p.settings.get("batch_tokens") == best.settings.get("batch_tokens")]
    by_rate: dict[float | None, list[Point]] = {}
    for point in points:
        by_rate.setdefault(point.settings.get("outer_learning_rate"), []).append(point)
    own = _lowest(by_rate[best.settings.get("outer_learning_rate")], quantity)
    if min(own) < best.settings[quantity] < max(own):
        return own
    tried = (_lowest(points, quantity) for points in by_rate.values())
    return max(tried, key=lambda losses: (len(losses), -min(losses.values())))


def _lowest(points: Sequence[Point], quantity: str) -> dict[float, float]:
    best = best_points(points, lambda point: point.settings[quantity])
    return dict(sorted((point.settings[quantity], point.eval_loss) for point in best))


def best_batch(points: Sequence[Point], best: Point) -> float:
    """The minimum, in tokens, of a parabola through the best run's batch and the two tried next to it.

    A sweep searches the learning rate at these batches only: losses further away lie above the valley. A best
    batch that is the smallest or the largest, or has no valley around it, is returned as it is.

    Args:
        points: all runs of a size and M.
        best: the best of them.

    Raises:
        UserError: if the points have no batch.
    """
    losses = losses_beside(points, best, "batch_tokens")
    batches, batch = list(losses), best.settings["batch_tokens"]
    if batch not in losses or batch in (batches[0], batches[-1]):
        return batch
    index = batches.index(batch)
    around = batches[index - 1 : index + 2]
    octaves = np.log2(around)
    curvature, slope, _ = np.polyfit(octaves, [losses[tokens] for tokens in around], 2)
    if curvature <= 0:
        return batch
    return float(2.0 ** np.clip(-slope / (2 * curvature), octaves[0], octaves[-1]))
