"""Power laws of loss, learning rate and batch through the best run of each size and M in a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from diloco.errors import UserError
from diloco.scaling.batches import best_batch, is_on_edge, losses_beside
from diloco.scaling.power_laws import PowerLawFit
from diloco.scaling.published import SYNC_EVERY
from diloco.scaling.table import Point, best_points, published_table

Kind = Literal["joint", "independent"]
TOKENS_PER_PARAM = 20.0


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
        return best_points(list(self.points) if self.points is not None else published_table())

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
        """True if a point of `best` has the smallest or the largest value tried."""
        return is_on_edge(self.runs_of(point), point, quantity)

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
        if quantity == "loss":
            return 1.0
        if quantity == "batch_tokens" and not any(self.is_on_edge(point, quantity) for point in best):
            return 1.0
        tried = (list(losses_beside(self.runs_of(point), point, quantity)) for point in best)
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
        """Whether the table itself has the quantity."""
        return self.points is not None and all(quantity in point.settings for point in self.points)

    @property
    def sync_every(self) -> float | None:
        """H of the runs; None if the table does not have it."""
        if self.points is None:
            return SYNC_EVERY
        return next((p.settings["sync_every"] for p in self.points if "sync_every" in p.settings), None)

    @property
    def tokens_per_param(self) -> float:
        """Tokens a parameter of the runs; the papers' 20 if the table does not have them."""
        ratios = [p.settings["tokens"] / p.params for p in self.points or () if "tokens" in p.settings]
        return statistics.mean(ratios) if ratios else TOKENS_PER_PARAM
