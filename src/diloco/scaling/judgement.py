"""Which law extrapolates best, and where DiLoCo and Data-Parallel cross."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.scaling.laws import Kind, Laws
from diloco.scaling.parametric import FORMS, ParametricFit, fit_parametric
from diloco.scaling.power_laws import PowerLawFit, log_residual
from diloco.scaling.published import EXTRAPOLATED, EXTRAPOLATED_PARAMS, JOINT, LAWS
from diloco.scaling.table import Point


@dataclass(frozen=True)
class Residual:
    """How far a law is from what was measured at the largest size."""

    law: str
    """independent, joint, or a parametric form."""
    mean: float
    """Of |log y − log ŷ| over M."""
    by_replicas: dict[int, float]
    """For each M."""


def held_out_errors(laws: Laws, quantity: str = "loss") -> list[Residual]:
    """Of independent and joint laws fitted without the largest size, at every M that both know; the best first."""
    left_out = _largest(laws)
    fitted = Laws([p for p in laws.points or laws.best if left_out and p.params < left_out[0].params])
    kinds: tuple[Kind, ...] = ("independent", "joint")
    errors: dict[Kind, dict[int, float]] = {kind: {} for kind in kinds}
    for kind, found in errors.items():
        for point in left_out:
            try:
                law = fitted.fit(quantity, point.replicas, kind).law
            except ValueError:
                continue
            found[point.replicas] = log_residual(laws.value(point, quantity), law(point.params, point.replicas))
    told = [found for found in errors.values() if found]
    common = set.intersection(*map(set, told)) if told else set()
    return _ranked({kind: {m: v for m, v in found.items() if m in common} for kind, found in errors.items()})


def forms(laws: Laws) -> tuple[list[tuple[ParametricFit, Residual]], dict[str, str]]:
    """The parametric forms, the best at the largest size first, and why others can't be fitted.

    They were selected there, so that their residuals are no test errors. Of Data-Parallel alone there are none.
    """
    best, fits, refused = _with_replicas(laws), {}, {}
    if not best:
        return [], {}
    columns = [p.params for p in best], [p.replicas for p in best], [p.eval_loss for p in best]
    for name, form in FORMS.items():
        try:
            fits[name] = fit_parametric(form, *columns)
        except ValueError as error:
            refused[name] = str(error)
    left_out = _largest(laws)
    residuals = {
        name: {p.replicas: log_residual(p.eval_loss, fit(p.params, p.replicas)) for p in left_out}
        for name, fit in fits.items()
    }
    return [(fits[residual.law], residual) for residual in _ranked(residuals)], refused


def _with_replicas(laws: Laws) -> list[Point]:
    return [point for point in laws.best if point.replicas > 0]


def _largest(laws: Laws) -> list[Point]:
    points = _with_replicas(laws)
    largest = max((point.params for point in points), default=math.nan)
    return [point for point in points if point.params == largest]


def _ranked(values: Mapping[str, dict[int, float]]) -> list[Residual]:
    found = [Residual(law, statistics.mean(of.values()), of) for law, of in values.items() if of]
    return sorted(found, key=lambda residual: residual.mean)


@dataclass(frozen=True)
class Crossing:
    """Where a law of DiLoCo gives the loss of Data-Parallel's."""

    num_params: float | None
    """N; None where they never meet at a size that can be told."""
    is_lower_above: bool | None
    """Whether DiLoCo's loss is the lower one beyond N; where they never meet, whether it is at every size; None
    where both are the same."""
    is_measured: bool = False
    """Whether N lies among the sizes that were fitted."""
    low: float | None = None
    high: float | None = None
    """95 % interval."""
    reason: str | None = None
    """Why there is no interval."""


def crossing(laws: Laws, num_replicas: int) -> Crossing:
    """Where the loss of M replicas crosses Data-Parallel's: where a power law of their ratio is 1.

    Raises:
        UserError: if there are no two sizes at which both were run.
    """
    one, other = ({p.params: p.eval_loss for p in laws.best if p.replicas == m} for m in (num_replicas, 0))
    sizes = sorted(one.keys() & other.keys())
    ratio = PowerLawFit(sizes, [one[n] / other[n] for n in sizes])
    law, exponent = ratio.law, ratio.exponent()
    if all(abs(math.log(value)) < 1e-9 for value in ratio.values):
        return Crossing(None, None)
    log_n = -math.log(law.factor) / law.exponent if law.exponent else math.inf
    if not 0 <= log_n <= _MOST_LOG_N:
        return Crossing(None, law(sizes[-1]) < 1)
    num_params = math.exp(log_n)
    found = Crossing(num_params, law.exponent < 0, sizes[0] <= num_params <= sizes[-1])
    if exponent.low is None or exponent.high is None:
        return replace(found, reason=exponent.reason)
    if exponent.low <= 0 <= exponent.high:
        return replace(found, reason="or anywhere: the two exponents don't differ for certain")
    low, high = (math.exp(_end(ratio, log_n, away)) for away in (-1, 1))
    return replace(found, low=low, high=high)


_MOST_LOG_N = math.log(1e15)  # of no model


def _end(ratio: PowerLawFit, log_n: float, away: int) -> float:
    """The log N nearest to the crossing, on one side, from which on the ratio's interval leaves out 1."""

    def may_be_one(x: float) -> bool:
        found = ratio.predict(math.exp(x))
        assert found.low is not None and found.high is not None, "the ratio has intervals"
        return found.low <= 1 <= found.high

    inside, step = log_n, 0.1
    while may_be_one(inside + away * step) and step < _MOST_LOG_N:
        step *= 2
    outside = inside + away * step
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if may_be_one(middle) else (inside, middle)
    return inside


def judge(laws: Laws) -> dict[str, Any]:
    """All laws of a table with their intervals, what extrapolates best, and the crossings, as JSON."""
    quantities = ["loss", *(name for name in ("learning_rate", "batch_tokens") if laws.has(name))]
    ranked, refused = forms(laws)
    errors = {quantity: held_out_errors(laws, quantity) for quantity in quantities}
    return {
        "laws": {quantity: _laws(laws, quantity) for quantity in quantities},
        "test_errors": {quantity: [asdict(residual) for residual in found] for quantity, found in errors.items()},
        "forms": [
            {
                "form": fit.form.name,
                "formula": fit.form.formula,
                "coefficients": fit.coefficients,
                "selected_at_largest": residual.mean,
                "by_replicas": residual.by_replicas,
            }
            for fit, residual in ranked
        ],
        "forms_refused": refused,
        "extrapolates_best": {
            "law": errors["loss"][0].law if errors["loss"] else None,
            "form": ranked[0][0].form.name if ranked else None,
        },
        "extrapolation": list(_extrapolation(ranked[0][0])) if laws.points is None else [],
        "crossings": {str(m): asdict(crossing(laws, m)) for m in _crossed(laws)},
        "on_edge": list(_on_edge(laws)),
        "uneven": [{"replicas": m, "num_outer_rates": numbers} for m, numbers in laws.unequally_tried().items()],
    }


def _extrapolation(form: ParametricFit) -> Iterator[dict[str, Any]]:
    """What the published laws, and a form, say of the models that were trained later at their hyperparameters."""
    for (fit, replicas), losses in EXTRAPOLATED.items():
        law = JOINT["loss"] if fit == "joint" else LAWS["loss"][replicas]
        for params, loss in zip(EXTRAPOLATED_PARAMS, losses, strict=True):
            told = {"params": params, "replicas": replicas, "fit": fit, "loss": loss}
            by_form = form(params, replicas) if replicas else None
            yield told | {"law": law(params, max(1, replicas)), "form": by_form}


def _laws(laws: Laws, quantity: str) -> dict[str, Any]:
    found = {}
    for replicas in laws.replicas:
        found[str(replicas)] = _coefficients(laws, quantity, replicas, "independent")
    if len([replicas for replicas in laws.replicas if replicas > 0]) > 1:
        found["joint"] = _coefficients(laws, quantity, 1, "joint")
    return found


def _coefficients(laws: Laws, quantity: str, replicas: int, kind: Kind) -> dict[str, Any]:
    try:
        fit = laws.fit(quantity, replicas, kind)
    except ValueError as error:
        return {"reason": str(error)}
    found = {"A": fit.factor()._asdict(), "alpha": fit.exponent()._asdict()}
    return found | {"beta": fit.replicas_exponent()._asdict()} if kind == "joint" else found


def _crossed(laws: Laws) -> list[int]:
    """Every M that was run at two sizes at which Data-Parallel was, too."""
    sizes = {m: {point.params for point in laws.best if point.replicas == m} for m in laws.replicas}
    return [m for m in laws.replicas if m > 0 and len(sizes[m] & sizes.get(0, set())) > 1]


def _on_edge(laws: Laws) -> Iterator[dict[str, Any]]:
    """Best values that are the smallest or the largest tried beside them: better ones may lie beyond."""
    for point in laws.best:
        for quantity in ("learning_rate", "batch_tokens", "outer_learning_rate"):
            if quantity in point.settings and laws.is_on_edge(point, quantity):
                told = {"params": point.params, "replicas": point.replicas}
                yield told | {"quantity": quantity, "value": point.settings[quantity]}
