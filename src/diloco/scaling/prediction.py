"""What to train a model with, and what loss to expect: the papers' laws, or those of a user's own sweep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from diloco.scaling.batches import best_batch
from diloco.scaling.power_laws import Estimate, PowerLaw, PowerLawFit
from diloco.scaling.published import JOINT, LAWS, SEQUENCE_LENGTH
from diloco.scaling.table import Point, best_points, published_table

Fit = Literal["joint", "independent"]
DEFAULT_OUTER_LEARNING_RATE = 0.4


@dataclass(frozen=True)
class Laws:
    """Laws of one kind, from a table; hyperparameters are the published ones where the table has none.

    Args:
        points: of a sweep; None takes the published losses, and with them the published hyperparameters.
    """

    points: Sequence[Point] | None = None

    @cached_property
    def best(self) -> list[Point]:
        """The best run of each size and M."""
        return best_points(list(self.points) if self.points is not None else published_table())

    @property
    def replicas(self) -> list[int]:
        """All M that the table has, 0 for Data-Parallel."""
        return sorted({point.replicas for point in self.best})

    def fit(self, quantity: str, num_replicas: int, fit: Fit) -> PowerLawFit:
        """The law of loss, learning_rate or batch_tokens, from the table.

        Raises:
            ValueError: if the table can't give it.
        """
        self._check(num_replicas, fit)
        chosen = [p for p in self.best if (p.replicas > 0 if fit == "joint" else p.replicas == num_replicas)]
        values = [self.value(point, quantity) for point in chosen]
        replicas = [point.replicas for point in chosen] if fit == "joint" else None
        return PowerLawFit([point.params for point in chosen], values, replicas)

    def value(self, point: Point, quantity: str) -> float:
        """What a point of `best` has of a quantity."""
        if quantity == "loss":
            return point.eval_loss
        if quantity == "batch_tokens":
            assert self.points is not None, "the published table has no batches"
            same = [p for p in self.points if (p.params, p.replicas) == (point.params, point.replicas)]
            return best_batch(same)
        return point.settings[quantity]

    def _check(self, num_replicas: int, fit: Fit) -> None:
        if fit == "joint" and num_replicas == 0:
            raise ValueError(
                "a joint law holds for DiLoCo, M ≥ 1; for Data-Parallel, M = 0, pass --fit independent"
            )
        if fit == "joint" and len([m for m in self.replicas if m > 0]) < 2:
            raise ValueError(
                f"a joint law needs runs with two numbers of replicas or more, and there are M = "
                f"{', '.join(map(str, self.replicas))}: pass --fit independent"
            )
        if fit == "independent" and num_replicas not in self.replicas:
            raise ValueError(
                f"there is no independent law for {num_replicas} replicas: there are those for M = "
                f"{', '.join(map(str, self.replicas))} (0 is Data-Parallel); a joint law takes any M ≥ 1"
            )

    def has(self, quantity: str) -> bool:
        """Whether the table itself tells the quantity."""
        return self.points is not None and all(quantity in point.settings for point in self.points)


def predict(
    num_params: float,
    num_replicas: int,
    *,
    fit: Fit | None = None,
    laws: Laws | None = None,
    overtraining: float = 1.0,
) -> dict[str, Any]:
    """Loss and hyperparameters, each with `value`, `low`, `high`, and a `reason` where there is no interval.

    Args:
        num_params: N.
        num_replicas: M; 0 is Data-Parallel.
        fit: joint, or independent; None is joint for M ≥ 1.
        laws: from a table; None is the published one.
        overtraining: tokens as a multiple of 20·N, of which only budget and steps take account.

    Raises:
        ValueError: for what no law is there.
    """
    if not (0 < num_params < math.inf and 0 < overtraining < math.inf):
        raise ValueError(f"num_params={num_params:g} and overtraining={overtraining:g} must be above 0 and finite")
    if num_replicas < 0:
        raise ValueError(f"num_replicas must be at least 1, or 0 for Data-Parallel, not {num_replicas}")
    laws = laws or Laws()
    fit = fit or ("joint" if num_replicas > 0 else "independent")
    loss = laws.fit("loss", num_replicas, fit).predict(num_params, num_replicas)
    rate = _hyperparameter(laws, "learning_rate", num_params, num_replicas, fit)
    batch = _hyperparameter(laws, "batch_tokens", num_params, num_replicas, fit)
    tokens = 20 * num_params * overtraining
    sizes = [point.params for point in laws.best]
    warnings = []
    if not min(sizes) <= num_params <= max(sizes):
        fitted = f"{min(sizes):g} to {max(sizes):g}"
        warnings.append(f"N = {num_params:g} lies outside the sizes that were fitted, {fitted}")
    most = max(laws.replicas)
    if num_replicas > most:
        warnings.append(f"M = {num_replicas} lies beyond the numbers of replicas that were fitted, up to {most}")
    return {
        "num_params": num_params,
        "num_replicas": num_replicas,
        "fit": fit,
        "loss": _told(loss, "too few points for an interval"),
        "learning_rate": rate,
        "batch_tokens": batch | {"power_of_two": 2 ** round(math.log2(batch["value"]))},
        "outer_learning_rate": _outer_learning_rate(laws, num_replicas),
        "tokens": _told(Estimate(tokens), "20·N·overtraining, a choice and not a fit"),
        "steps": _told(Estimate(tokens / batch["value"]), "tokens over the batch"),
        "warning": "; ".join(warnings) or None,
    }


def _told(estimate: Estimate, reason: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = estimate._asdict()
    return found | {"reason": reason} if estimate.low is None else found


def _hyperparameter(laws: Laws, quantity: str, num_params: float, num_replicas: int, fit: Fit) -> dict[str, Any]:
    if laws.has(quantity):
        found = laws.fit(quantity, num_replicas, fit).predict(num_params, num_replicas)
        return _told(found, "too few points for an interval")
    if fit == "independent" and num_replicas not in LAWS[quantity]:
        raise ValueError(f"the table has no {quantity}, and no published law is there for M = {num_replicas}")
    law: PowerLaw = JOINT[quantity] if fit == "joint" else LAWS[quantity][num_replicas]
    unit = SEQUENCE_LENGTH if quantity == "batch_tokens" else 1
    value = unit * law(num_params, num_replicas)
    return _told(Estimate(value), "the published coefficients come without the data behind them")


def _outer_learning_rate(laws: Laws, num_replicas: int) -> dict[str, Any]:
    if num_replicas == 0:
        return {"value": None, "low": None, "high": None, "reason": "Data-Parallel has no outer step"}
    tried = [p for p in laws.points or () if p.replicas == num_replicas and "outer_learning_rate" in p.settings]
    if tried:
        best = _by_mean_excess(tried)
        return _told(Estimate(best), f"the best of those tried with M = {num_replicas}")
    return _told(Estimate(DEFAULT_OUTER_LEARNING_RATE), "a default, not a fit: the paper prints no number")


def _by_mean_excess(points: Sequence[Point]) -> float:
    """The rate whose best loss lies, over the sizes, the least above the best of all rates."""
    by_size: dict[float, dict[float, float]] = {}
    for point in points:
        losses = by_size.setdefault(point.params, {})
        rate = point.settings["outer_learning_rate"]
        losses[rate] = min(point.eval_loss, losses.get(rate, math.inf))

    def excess(rate: float) -> float:
        return sum(losses.get(rate, math.inf) / min(losses.values()) - 1 for losses in by_size.values())

    everywhere = set.intersection(*map(set, by_size.values()))
    return min(everywhere or set().union(*by_size.values()), key=excess)
