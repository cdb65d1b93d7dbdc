"""Predicted loss and hyperparameters of a model, from the papers' laws or those of a user's own sweep."""

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from diloco.errors import UserError
from diloco.scaling.gap_laws import period_gap
from diloco.scaling.hyperparameters import nearest_power_of_two, outer_learning_rate, published_law
from diloco.scaling.laws import TOKENS_PER_PARAM, Kind, Laws
from diloco.scaling.power_laws import SEQUENCE_LENGTH, Estimate, PowerLawFit
from diloco.scaling.table import PUBLISHED_PARAMS, Point


def predict(
    num_params: float,
    num_replicas: int,
    *,
    fit: Kind | None = None,
    laws: Laws | None = None,
    overtraining: float = 1.0,
) -> dict[str, Any]:
    """Loss and hyperparameters, each with `value`, `low`, `high`, and a `reason` if it has no interval.

    Args:
        num_params: N.
        num_replicas: M; 0 is Data-Parallel.
        fit: joint or independent; None is joint for M ≥ 1; published hyperparameters are then those of M's own
            law where there is one, as in the recipes.
        laws: from a table; None is the published one.
        overtraining: tokens as a multiple of 20·N; it changes the budget and the steps only.

    Raises:
        UserError: if a number is out of range, or there is no law for it.
    """
    if not 1 <= num_params <= 1e15:
        raise UserError(f"num_params={num_params:g} must be from 1 to 1e15, a count such as 1.3e9", "num_params")
    if not 0 < overtraining <= 1e6:
        raise UserError(f"overtraining={overtraining:g} must be above 0 and at most 1e6", "overtraining")
    if num_replicas < 0:
        raise UserError(
            f"num_replicas must be at least 1, or 0 for Data-Parallel, not {num_replicas}", "num_replicas"
        )
    laws, asked = laws or Laws(), fit
    fit = fit or ("joint" if num_replicas > 0 else "independent")
    law = laws.fit("loss", num_replicas, fit)
    rate, batch = (
        _hyperparameter(laws, quantity, num_params, num_replicas, fit if laws.has(quantity) else asked)
        for quantity in ("learning_rate", "batch_tokens")
    )
    tokens = TOKENS_PER_PARAM * num_params * overtraining
    warnings = [
        *_outside(law, num_params, num_replicas),
        *_borrowed(laws, num_params, {"learning_rate": rate, "batch_tokens": batch}),
        *_on_edges(laws, num_replicas, fit),
        *_uneven(laws, num_replicas, fit),
    ]
    if not 0.95 < (ratio := tokens / num_params / laws.tokens_per_param) < 1.05:
        warnings.append(
            f"the loss is that of {laws.tokens_per_param:.3g} tokens a parameter, {1 / ratio:.3g} of these"
        )
    return {
        "num_params": num_params,
        "num_replicas": num_replicas,
        "fit": fit,
        "sync_every": laws.sync_every if num_replicas else None,
        "loss": law.predict(num_params, num_replicas)._asdict(),
        "learning_rate": rate,
        "batch_tokens": batch,
        "outer_learning_rate": _outer_learning_rate(laws, num_replicas),
        "tokens": Estimate(tokens, reason="20·N·overtraining, a choice and not a fit")._asdict(),
        "steps": _steps(tokens, batch),
        "warning": "; ".join(warnings) or None,
    }


@cache
def expected_loss(num_params: float, num_replicas: int, sync_every: int) -> Estimate:
    """The loss of Streaming DiLoCo after 20 tokens per parameter, by the papers' laws.

        L(N, M, H) = A N^α M^β · (1 + g(N))^(ln(H/30) / ln(100/30))

    The first factor is the joint law of arXiv 2503.09799, at H = 30; g is the gap of H = 100 to H = 30 in arXiv
    2501.18512, of its M = 2 up to 2 replicas and of its M = 4 beyond. The ends of the interval are the products of
    both intervals' ends. `loss_notes` says what is extrapolated.

    Args:
        num_params: N.
        num_replicas: M, at least 1.
        sync_every: H.

    >>> loss = expected_loss(1e9, 8, 100)
    >>> round(loss.value, 3), round(loss.low, 3), round(loss.high, 3)
    (2.588, 2.567, 2.618)
    """
    loss = _joint_law().predict(num_params, num_replicas)
    gap = period_gap(2 if num_replicas <= 2 else 4).band(num_params)
    exponent = math.log(sync_every / 30) / math.log(100 / 30)
    assert None not in (loss.low, loss.high, gap.low, gap.high), "the papers' tables give intervals"
    ends = sorted((1 + end) ** exponent for end in (gap.low, gap.high) if end is not None)
    return Estimate(
        loss.value * (1 + gap.value) ** exponent, (loss.low or 0.0) * ends[0], (loss.high or 0.0) * ends[-1]
    )


@cache
def _joint_law() -> PowerLawFit:
    return Laws().fit("loss", 1, "joint")


def loss_notes(num_params: float, num_replicas: int, sync_every: int, num_tokens: float) -> list[str]:
    """A sentence for each respect in which `expected_loss` goes beyond the papers' runs."""
    notes = list(_outside(_joint_law(), num_params, num_replicas))
    if sync_every > 100:
        notes.append(f"H = {sync_every} lies outside those of the papers' tables, 30 and 100")
    if not 0.95 < (ratio := num_tokens / (TOKENS_PER_PARAM * num_params)) < 1.05:
        notes.append(f"the loss is that of {TOKENS_PER_PARAM:g} tokens per parameter, {1 / ratio:.3g} of these")
    return notes


def _steps(tokens: float, batch: dict[str, Any]) -> dict[str, Any]:
    least, best, most, rounded = (
        None if batch.get(name) is None else math.ceil(tokens / batch[name])
        for name in ("high", "value", "low", "power_of_two")
    )
    if best is None:
        return {"value": None, "low": None, "high": None, "at_power_of_two": None, "reason": "there is no batch"}
    reason = None if least else "tokens over the batch, which has none"
    return Estimate(best, least, most, reason)._asdict() | {"at_power_of_two": rounded}


def _on_edges(laws: Laws, num_replicas: int, kind: Kind) -> Iterator[str]:
    """A warning for each hyperparameter with best values at the edge of those tried."""
    points = laws.chosen(num_replicas, kind)
    for quantity in ("learning_rate", "batch_tokens"):
        if laws.has(quantity) and (edges := [p for p in points if laws.is_on_edge(p, quantity)]):
            which = ", ".join(f"N = {p.params:g}, M = {p.replicas}" for p in edges)
            yield (
                f"the best {quantity} of {len(edges)} of the law's {len(points)} points is the smallest or the "
                f"largest that was tried ({which}): a better one may lie beyond, and the law elsewhere"
            )


def _uneven(laws: Laws, num_replicas: int, kind: Kind) -> Iterator[str]:
    """A warning for each M that was tried with more outer learning rates at some sizes than at others."""
    for m, numbers in laws.unequally_tried().items():
        if kind == "joint" or m == num_replicas:
            which = ", ".join(f"{number} at N = {params:g}" for params, number in numbers.items())
            yield (
                f"M = {m}: the loss is the best of unequally many outer learning rates ({which}), and the lower "
                "the more there were"
            )


def _outside(law: PowerLawFit, num_params: float, num_replicas: int) -> Iterator[str]:
    """A warning for N and for M if the law was not fitted around it."""
    low, high = min(law.num_params), max(law.num_params)
    if not low <= num_params <= high:
        yield (
            f"N = {num_params:g} lies outside the sizes that were fitted, {low:g} to {high:g}: an interval is "
            "that of the law, which may bend (the published ones are 1 to 2 % low at 4B, 3 to 4 % at 10B)"
        )
    own = [n for n, m in zip(law.num_params, law.num_replicas or (), strict=False) if m == num_replicas]
    if own and low <= num_params <= high and not min(own) <= num_params <= max(own):
        yield (
            f"N = {num_params:g} lies outside the sizes that were run with M = {num_replicas}, {min(own):g} to "
            f"{max(own):g}"
        )
    known = law.num_replicas or [num_replicas]
    if not min(known) <= num_replicas <= max(known):
        yield (
            f"M = {num_replicas} lies outside the numbers of replicas that were fitted, {min(known)} to "
            f"{max(known)}"
        )


def _borrowed(laws: Laws, num_params: float, estimates: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A warning for each hyperparameter from a published law at a size far from the published ones."""
    if laws.points is not None and not PUBLISHED_PARAMS["35M"] <= num_params <= PUBLISHED_PARAMS["2.4B"]:
        for quantity, estimate in estimates.items():
            if not laws.has(quantity) and estimate["value"] is not None:
                yield f"the table has no {quantity}, and the published law of 35M to 2.4B parameters is far off"


def _hyperparameter(
    laws: Laws, quantity: str, num_params: float, num_replicas: int, kind: Kind | None
) -> dict[str, Any]:
    """An estimate of the table's law, or else of the published one, with the reason."""
    if kind is not None and laws.has(quantity):
        law = laws.fit(quantity, num_replicas, kind)
        return _rounded(quantity, law.predict(num_params, num_replicas)._asdict())
    try:
        published = published_law(quantity, num_replicas, kind)
    except UserError as error:
        reason = f"the table has no {quantity}, and {error}"
        return _rounded(quantity, {"value": None, "low": None, "high": None, "reason": reason})
    unit = SEQUENCE_LENGTH if quantity == "batch_tokens" else 1
    value = unit * published(num_params, max(1, num_replicas))
    which = "joint" if published.replicas_exponent is not None else f"that of M = {num_replicas}"
    reason = f"the published law, {which}, whose coefficients come without the data behind them"
    return _rounded(quantity, Estimate(value, reason=reason)._asdict())


def _rounded(quantity: str, estimate: dict[str, Any]) -> dict[str, Any]:
    """The estimate, for a batch with its nearest power of two."""
    if quantity != "batch_tokens":
        return estimate
    tokens = estimate["value"]
    return estimate | {"power_of_two": None if tokens is None else nearest_power_of_two(tokens)}


def _outer_learning_rate(laws: Laws, num_replicas: int) -> dict[str, Any]:
    """The best rate of the table's runs with M replicas, or else our default, with the reason."""
    if num_replicas == 0:
        return {"value": None, "low": None, "high": None, "reason": "Data-Parallel has no outer step"}
    runs = [p for p in laws.points or () if "outer_learning_rate" in p.settings]
    excess = _excess([p for p in runs if p.replicas == num_replicas])
    if not excess:
        known = ", ".join(f"{m}" for m in sorted({p.replicas for p in runs}))
        why = f"the table has rates for M = {known}" if known else "the paper prints no number"
        reason = f"a default, not a fit: the best of our sweep of 0.1M to 0.3M parameters, as {why}"
        return Estimate(outer_learning_rate(num_replicas), reason=reason)._asdict()
    best, *others = sorted(excess, key=lambda rate: excess[rate][0])
    if not others:
        return Estimate(best, reason=f"the only one tried with M = {num_replicas}")._asdict()
    most = max(number for _, number in excess.values())
    tried = ", ".join(
        f"{rate:g}" + (f" (at {number} of {most} sizes)" if number < most else "")
        for rate, (_, number) in sorted(excess.items())
    )
    more = (1 + excess[others[0]][0]) / (1 + excess[best][0]) - 1
    reason = f"the best of {tried}, tried with M = {num_replicas}; {others[0]:g} has {100 * more:.2g} % more loss"
    beyond = ", and a better one may lie beyond" if best in (min(excess), max(excess)) else ""
    return Estimate(best, reason=reason + beyond)._asdict()


def _excess(points: Sequence[Point]) -> dict[float, tuple[float, int]]:
    """Each rate's mean excess of loss over the rate that was tried at the most sizes, and the number of sizes.

    Only sizes at which both were tried count; a rate without such a size is left out.
    """
    by_rate: dict[float, dict[float, float]] = {}
    for point in points:
        losses = by_rate.setdefault(point.settings["outer_learning_rate"], {})
        losses[point.params] = min(point.eval_loss, losses.get(point.params, math.inf))
    base = max(by_rate.values(), key=len, default={})
    common = {rate: losses.keys() & base.keys() for rate, losses in by_rate.items()}
    return {
        rate: (statistics.mean(by_rate[rate][n] / base[n] - 1 for n in sizes), len(sizes))
        for rate, sizes in common.items()
        if sizes
    }
