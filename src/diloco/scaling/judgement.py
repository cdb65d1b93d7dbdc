"""Which law extrapolates best, and where DiLoCo and Data-Parallel cross."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco.scaling.parametric import FORMS, fit_parametric
from diloco.scaling.power_laws import PowerLawFit, log_residual
from diloco.scaling.prediction import Laws
from diloco.scaling.table import Point


@dataclass(frozen=True)
class Residual:
    """How far a law, fitted without the largest size, is from what was measured there."""

    law: str
    """independent, joint, or a parametric form."""
    mean: float
    """Of |log y − log ŷ| over M."""
    by_replicas: dict[int, float]
    """For each M."""


def residuals(laws: Laws, quantity: str = "loss") -> list[Residual]:
    """Of independent and joint laws of a quantity, and of the loss' parametric forms, the best first.

    The parametric forms were selected at the size that was left out: their residuals are no test errors.
    """
    best = [point for point in laws.best if point.replicas > 0]
    largest = max((point.params for point in best), default=math.nan)
    left_out = [point for point in best if point.params == largest]
    fitted = Laws([point for point in laws.points or laws.best if point.params < largest])
    found = []
    for kind in ("independent", "joint"):
        values = {}
        for point in left_out:
            try:
                law = fitted.fit(quantity, point.replicas, kind).law
            except ValueError:
                continue
            measured = laws.value(point, quantity)
            values[point.replicas] = log_residual(measured, law(point.params, point.replicas))
        found += _residual(kind, values)
    if quantity == "loss":
        for form in FORMS.values():
            found += _parametric_residual(form.name, best, left_out)
    return sorted(found, key=lambda residual: residual.mean)


def _parametric_residual(name: str, best: Sequence[Point], left_out: Sequence[Point]) -> list[Residual]:
    try:
        fit = fit_parametric(FORMS[name], *_columns(best))
    except ValueError:
        return []
    return _residual(name, {p.replicas: log_residual(p.eval_loss, fit(p.params, p.replicas)) for p in left_out})


def _residual(law: str, values: dict[int, float]) -> list[Residual]:
    return [Residual(law, statistics.mean(values.values()), values)] if values else []


def _columns(points: Sequence[Point]) -> tuple[list[float], list[int], list[float]]:
    return [p.params for p in points], [p.replicas for p in points], [p.eval_loss for p in points]


def crossing(one: PowerLawFit, other: PowerLawFit) -> float | None:
    """N at which two independent laws give the same value; None where they never do at a finite, positive N."""
    difference = one.law.exponent - other.law.exponent
    if difference == 0:
        return None
    log_n = math.log(other.law.factor / one.law.factor) / difference
    return math.exp(log_n) if abs(log_n) < 100 else None


def judge(laws: Laws) -> dict[str, Any]:
    """All laws of a table with their intervals, what extrapolates best, and the crossings, as JSON."""
    quantities = ["loss", *(name for name in ("learning_rate", "batch_tokens") if laws.has(name))]
    found: dict[str, Any] = {"laws": {quantity: _laws(laws, quantity) for quantity in quantities}}
    found["residuals"] = {quantity: [asdict(r) for r in residuals(laws, quantity)] for quantity in quantities}
    ranked = found["residuals"]["loss"]
    found["extrapolates_best"] = ranked[0]["law"] if ranked else None
    found["crossings"] = _crossings(laws)
    return found


def _laws(laws: Laws, quantity: str) -> dict[str, Any]:
    found = {}
    for replicas in laws.replicas:
        found[str(replicas)] = _coefficients(laws, quantity, replicas, "independent")
    if len([replicas for replicas in laws.replicas if replicas > 0]) > 1:
        found["joint"] = _coefficients(laws, quantity, 1, "joint")
    return found


def _coefficients(laws: Laws, quantity: str, replicas: int, kind: Any) -> dict[str, Any]:
    try:
        fit = laws.fit(quantity, replicas, kind)
    except ValueError as error:
        return {"reason": str(error)}
    found = {"A": fit.factor()._asdict(), "alpha": fit.exponent()._asdict()}
    return found | {"beta": fit.replicas_exponent()._asdict()} if kind == "joint" else found


def _crossings(laws: Laws) -> dict[str, float | None]:
    if 0 not in laws.replicas:
        return {}
    found = {}
    for replicas in laws.replicas[1:]:
        try:
            one, other = (laws.fit("loss", m, "independent") for m in (replicas, 0))
        except ValueError:
            continue
        found[str(replicas)] = crossing(one, other)
    return found
