"""What to train a model with, and what loss to expect: the papers' laws, or those of a user's own sweep."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from diloco.scaling.batches import best_batch
from diloco.scaling.power_laws import Estimate, PowerLaw, PowerLawFit
from diloco.scaling.published import JOINT, LAWS, NUM_PARAMS, SEQUENCE_LENGTH, SYNC_EVERY
from diloco.scaling.table import Point, best_points, published_table

Kind = Literal["joint", "independent"]
DEFAULT_OUTER_LEARNING_RATE = 0.4


@dataclass(frozen=True)
class Laws:
    """Laws from a table; hyperparameters are the published ones where the table has none.

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

    def fit(self, quantity: str, num_replicas: int, kind: Kind) -> PowerLawFit:
        """The law of loss, learning_rate or batch_tokens, from the table.

        Raises:
            ValueError: if the table can't give it.
        """
        self._check(num_replicas, kind)
        chosen = [p for p in self.best if (p.replicas > 0 if kind == "joint" else p.replicas == num_replicas)]
        values = [self.value(point, quantity) for point in chosen]
        replicas = [point.replicas for point in chosen] if kind == "joint" else None
        return PowerLawFit([point.params for point in chosen], values, replicas)

    def value(self, point: Point, quantity: str) -> float:
        """What a point of `best` has of a quantity."""
        if quantity == "loss":
            return point.eval_loss
        if quantity == "batch_tokens":
            return best_batch(self.runs_of(point))
        return point.settings[quantity]

    def runs_of(self, point: Point) -> list[Point]:
        """All points of the table with the size and M of one."""
        return [p for p in self.points or () if (p.params, p.replicas) == (point.params, point.replicas)]

    def _check(self, num_replicas: int, kind: Kind) -> None:
        known = ", ".join(map(str, self.replicas))
        if kind == "joint" and num_replicas == 0:
            raise ValueError(
                "a joint law holds for DiLoCo, M ≥ 1; for Data-Parallel, M = 0, pass --fit independent (there are "
                f"independent laws for M = {known})"
            )
        if kind == "joint" and len([m for m in self.replicas if m > 0]) < 2:
            raise ValueError(
                f"a joint law needs runs with two numbers of replicas or more, and there are M = {known} (0 is "
                "Data-Parallel): ask for one of these as --num-replicas, with --fit independent"
            )
        if kind == "independent" and num_replicas not in self.replicas:
            raise ValueError(
                f"there is no independent law for {num_replicas} replicas: there are those for M = {known} (0 is "
                "Data-Parallel); a joint law takes any M ≥ 1"
            )

    def has(self, quantity: str) -> bool:
        """Whether the table itself tells the quantity."""
        return self.points is not None and all(quantity in point.settings for point in self.points)

    @property
    def sync_every(self) -> float | None:
        """H of the runs, where the table says; the published laws' 30."""
        if self.points is None:
            return SYNC_EVERY
        return next((p.settings["sync_every"] for p in self.points if "sync_every" in p.settings), None)

    @property
    def tokens_per_param(self) -> float:
        """Of the runs; the papers' 20 where the table doesn't say."""
        ratios = [p.settings["tokens"] / p.params for p in self.points or () if "tokens" in p.settings]
        return statistics.mean(ratios) if ratios else TOKENS_PER_PARAM


def predict(
    num_params: float,
    num_replicas: int,
    *,
    fit: Kind | None = None,
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
    law = laws.fit("loss", num_replicas, fit)
    rate, batch = (
        _hyperparameter(laws, quantity, num_params, num_replicas, fit)
        for quantity in ("learning_rate", "batch_tokens")
    )
    tokens = TOKENS_PER_PARAM * num_params * overtraining
    least, best, most = (None if of is None else math.ceil(tokens / of) for of in _backwards(batch))
    assert best is not None, "there is a batch"
    warnings = [*_outside(law, num_params, num_replicas), *_borrowed(laws, num_params)]
    if not 0.95 < (ratio := tokens / num_params / laws.tokens_per_param) < 1.05:
        warnings.append(
            f"the loss is that of {laws.tokens_per_param:.3g} tokens a parameter, {1 / ratio:.3g} of these"
        )
    return {
        "num_params": num_params,
        "num_replicas": num_replicas,
        "fit": fit,
        "sync_every": laws.sync_every if num_replicas else None,
        "loss": _told(law.predict(num_params, num_replicas)),
        "learning_rate": rate,
        "batch_tokens": batch | {"power_of_two": 2 ** round(math.log2(batch["value"]))},
        "outer_learning_rate": _outer_learning_rate(laws, num_replicas),
        "tokens": _told(Estimate(tokens, reason="20·N·overtraining, a choice and not a fit")),
        "steps": _told(Estimate(best, least, most, None if least else "tokens over the batch, which has none")),
        "warning": "; ".join(warnings) or None,
    }


TOKENS_PER_PARAM = 20.0


def _told(estimate: Estimate) -> dict[str, Any]:
    return {name: value for name, value in estimate._asdict().items() if name != "reason" or value is not None}


def _backwards(estimate: dict[str, Any]) -> tuple[float | None, float, float | None]:
    return estimate["high"], estimate["value"], estimate["low"]


def _outside(law: PowerLawFit, num_params: float, num_replicas: int) -> Iterator[str]:
    """What of a prediction lies outside what a law was fitted to."""
    low, high = min(law.num_params), max(law.num_params)
    if not low <= num_params <= high:
        yield (
            f"N = {num_params:g} lies outside the sizes that were fitted, {low:g} to {high:g}: an interval is "
            "that of the law, which may bend (the published ones are 1 to 2 % low at 4B, 3 to 5 % at 10B)"
        )
    known = law.num_replicas or [num_replicas]
    if not min(known) <= num_replicas <= max(known):
        yield (
            f"M = {num_replicas} lies outside the numbers of replicas that were fitted, {min(known)} to "
            f"{max(known)}"
        )


def _borrowed(laws: Laws, num_params: float) -> Iterator[str]:
    """Which hyperparameters are the published ones, for sizes that those don't know."""
    if laws.points is not None and not NUM_PARAMS[0] <= num_params <= NUM_PARAMS[-1]:
        for quantity in ("learning_rate", "batch_tokens"):
            if not laws.has(quantity):
                yield f"the table has no {quantity}, and the published law of 35M to 2.4B parameters is far off"


def _hyperparameter(laws: Laws, quantity: str, num_params: float, num_replicas: int, kind: Kind) -> dict[str, Any]:
    if laws.has(quantity):
        return _told(laws.fit(quantity, num_replicas, kind).predict(num_params, num_replicas))
    if kind == "independent" and num_replicas not in LAWS[quantity]:
        raise ValueError(f"the table has no {quantity}, and no published law is there for M = {num_replicas}")
    law: PowerLaw = JOINT[quantity] if kind == "joint" else LAWS[quantity][num_replicas]
    unit = SEQUENCE_LENGTH if quantity == "batch_tokens" else 1
    value = unit * law(num_params, num_replicas)
    return _told(Estimate(value, reason="the published coefficients come without the data behind them"))


def _outer_learning_rate(laws: Laws, num_replicas: int) -> dict[str, Any]:
    if num_replicas == 0:
        return {"value": None, "low": None, "high": None, "reason": "Data-Parallel has no outer step"}
    runs = [p for p in laws.points or () if "outer_learning_rate" in p.settings]
    excess = _mean_excess([p for p in runs if p.replicas == num_replicas])
    if not excess:
        known = ", ".join(f"{m}" for m in sorted({p.replicas for p in runs}))
        why = f"the table has rates for M = {known}" if known else "the paper prints no number"
        return _told(Estimate(DEFAULT_OUTER_LEARNING_RATE, reason=f"a default, not a fit: {why}"))
    best, *others = sorted(excess, key=excess.__getitem__)
    if not others:
        return _told(Estimate(best, reason=f"the only one tried with M = {num_replicas}"))
    reason = (
        f"the best of {', '.join(f'{rate:g}' for rate in sorted(excess))}, tried with M = {num_replicas}; "
        f"{others[0]:g} has {100 * (excess[others[0]] - excess[best]):.2g} % more loss"
    )
    beyond = ", and a better one may lie beyond" if best in (min(excess), max(excess)) else ""
    return _told(Estimate(best, reason=reason + beyond))


def _mean_excess(points: Sequence[Point]) -> dict[float, float]:
    """Of each rate that was tried at the most sizes, how far its best loss lies above the best, on average."""
    by_size: dict[float, dict[float, float]] = {}
    for point in points:
        losses = by_size.setdefault(point.params, {})
        rate = point.settings["outer_learning_rate"]
        losses[rate] = min(point.eval_loss, losses.get(rate, math.inf))
    excess: dict[float, list[float]] = {}
    for losses in by_size.values():
        for rate, loss in losses.items():
            excess.setdefault(rate, []).append(loss / min(losses.values()) - 1)
    most = max(map(len, excess.values()), default=0)
    return {rate: statistics.mean(of) for rate, of in excess.items() if len(of) == most}
