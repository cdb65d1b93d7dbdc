"""The law that extrapolates best, and the sizes at which DiLoCo and Data-Parallel cross."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from diloco.errors import MissingLibraryError, UserError
from diloco.paper_tables import rows
from diloco.scaling.laws import Kind, Laws
from diloco.scaling.parametric import FORMS, PUBLISHED_RESIDUALS, ParametricFit, fit_parametric
from diloco.scaling.power_laws import JOINT, LAWS, PowerLawFit, log_residual
from diloco.scaling.table import PUBLISHED_PARAMS, Point


@dataclass(frozen=True)
class Residual:
    """The distance between a law and the measurements at the largest size."""

    law: str
    """independent, joint, or the name of a parametric form."""
    mean: float
    """Mean of |log y − log ŷ| over M."""
    by_replicas: dict[int, float]
    """|log y − log ŷ| for each M."""


def held_out_errors(laws: Laws, quantity: str = "loss") -> list[Residual]:
    """Residuals of independent and joint laws fitted without the largest size, the best first.

    Only M that both laws know count.
    """
    left_out = _largest(laws)
    fitted = Laws([p for p in laws.points or laws.best if left_out and p.params < left_out[0].params])
    kinds: tuple[Kind, ...] = ("independent", "joint")
    errors: dict[Kind, dict[int, float]] = {kind: {} for kind in kinds}
    for kind, by_replicas in errors.items():
        for point in left_out:
            try:
                law = fitted.fit(quantity, point.replicas, kind).law
            except UserError:
                continue
            predicted = law(point.params, point.replicas)
            by_replicas[point.replicas] = log_residual(laws.value(point, quantity), predicted)
    fitted_kinds = [by_replicas for by_replicas in errors.values() if by_replicas]
    common = set.intersection(*map(set, fitted_kinds)) if fitted_kinds else set()
    return _ranked({kind: {m: by_m[m] for m in by_m if m in common} for kind, by_m in errors.items()})


def forms(laws: Laws) -> tuple[list[tuple[ParametricFit, Residual]], dict[str, str]]:
    """The fitted parametric forms, the best at the largest size first, and the reasons why others have no fit.

    The fits were selected at the largest size, so that their residuals are no test errors. Data-Parallel alone has
    no forms.

    Raises:
        MissingLibraryError: without the extra `scaling`.
    """
    best, fits, refused = _with_replicas(laws), {}, {}
    if not best:
        return [], {}
    columns = [p.params for p in best], [p.replicas for p in best], [p.eval_loss for p in best]
    for name, form in FORMS.items():
        try:
            fits[name] = fit_parametric(form, *columns)
        except MissingLibraryError:
            raise
        except UserError as error:
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
    residuals = [Residual(law, statistics.mean(by_m.values()), by_m) for law, by_m in values.items() if by_m]
    return sorted(residuals, key=lambda residual: residual.mean)


@dataclass(frozen=True)
class Crossing:
    """The size at which DiLoCo and Data-Parallel have the same loss."""

    num_params: float | None
    """N; None if they do not meet at any plausible size."""
    is_lower_above: bool | None
    """True if DiLoCo's loss is lower above N, or at every size if they never meet; None if losses are equal."""
    is_measured: bool = False
    """True if N lies within the fitted sizes."""
    low: float | None = None
    """Lower end of the 95 % interval of N."""
    high: float | None = None
    """Upper end of the 95 % interval of N."""
    reason: str | None = None
    """The reason why there is no interval."""


def crossing(laws: Laws, num_replicas: int) -> Crossing:
    """The size at which a power law of the ratio of both losses is 1.

    Args:
        laws: from a table with M replicas and Data-Parallel.
        num_replicas: M.

    Raises:
        UserError: if there are no two sizes at which both were run.
    """
    diloco, data_parallel = (
        {p.params: p.eval_loss for p in laws.best if p.replicas == m} for m in (num_replicas, 0)
    )
    sizes = sorted(diloco.keys() & data_parallel.keys())
    ratio = PowerLawFit(sizes, [diloco[n] / data_parallel[n] for n in sizes])
    law, exponent = ratio.law, ratio.exponent()
    if all(abs(math.log(value)) < 1e-9 for value in ratio.values):
        return Crossing(None, None)
    log_n = -math.log(law.factor) / law.exponent if law.exponent else math.inf
    if not 0 <= log_n <= _MOST_LOG_N:
        return Crossing(None, law(sizes[-1]) < 1)
    num_params = math.exp(log_n)
    meeting = Crossing(num_params, law.exponent < 0, sizes[0] <= num_params <= sizes[-1])
    if exponent.low is None or exponent.high is None:
        return replace(meeting, reason=exponent.reason)
    if exponent.low <= 0 <= exponent.high:
        return replace(meeting, reason="or anywhere: the two exponents don't differ for certain")
    low, high = (math.exp(_end(ratio, log_n, direction)) for direction in (-1, 1))
    return replace(meeting, low=low, high=high)


_MOST_LOG_N = math.log(1e15)  # larger than any model


def _end(ratio: PowerLawFit, log_n: float, direction: int) -> float:
    """The log N beyond which, in one direction from the crossing, the ratio's interval excludes 1."""

    def may_be_one(x: float) -> bool:
        estimate = ratio.predict(math.exp(x))
        assert estimate.low is not None and estimate.high is not None, "the ratio has intervals"
        return estimate.low <= 1 <= estimate.high

    inside, step = log_n, 0.1
    while may_be_one(inside + direction * step) and step < _MOST_LOG_N:
        step *= 2
    outside = inside + direction * step
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if may_be_one(middle) else (inside, middle)
    return inside


def judge(laws: Laws) -> dict[str, Any]:
    """All laws of a table with their intervals, the best extrapolation, and the crossings, as JSON values."""
    quantities = ["loss", *(name for name in ("learning_rate", "batch_tokens") if laws.has(name))]
    ranked, refused = forms(laws)
    errors = {quantity: held_out_errors(laws, quantity) for quantity in quantities}
    return {
        "laws": {quantity: _laws(laws, quantity) for quantity in quantities},
        "test_errors": {quantity: list(map(asdict, residuals)) for quantity, residuals in errors.items()},
        "forms": [
            {
                "form": fit.form.name,
                "formula": fit.form.formula,
                "coefficients": fit.coefficients,
                "selected_at_largest": residual.mean,
                "selected_among_all": fit.residual_of_all,
                "published": PUBLISHED_RESIDUALS[fit.form.name] if laws.points is None else None,
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


EXTRAPOLATED_PARAMS = PUBLISHED_PARAMS["4B"], PUBLISHED_PARAMS["10B"]
EXTRAPOLATED: dict[tuple[Kind, int], tuple[float, float]] = {
    (row["fit"], row["replicas"]): (row["4B"], row["10B"]) for row in rows("scaling_extrapolation")
}
"""Losses at those sizes with predicted hyperparameters (Tables 5 and 12), by whose prediction and M."""


def _extrapolation(form: ParametricFit) -> Iterator[dict[str, Any]]:
    """Published losses of larger models beside the predictions of the published laws and of a form."""
    for (fit, replicas), losses in EXTRAPOLATED.items():
        law = JOINT["loss"] if fit == "joint" else LAWS["loss"][replicas]
        for params, loss in zip(EXTRAPOLATED_PARAMS, losses, strict=True):
            yield {
                "params": params,
                "replicas": replicas,
                "fit": fit,
                "loss": loss,
                "law": law(params, max(1, replicas)),
                "form": form(params, replicas) if replicas else None,
            }


def _laws(laws: Laws, quantity: str) -> dict[str, Any]:
    """Coefficients of the independent law of each M, and of the joint law."""
    coefficients = {str(m): _coefficients(laws, quantity, m, "independent") for m in laws.replicas}
    if len([replicas for replicas in laws.replicas if replicas > 0]) > 1:
        coefficients["joint"] = _coefficients(laws, quantity, 1, "joint")
    return coefficients


def _coefficients(laws: Laws, quantity: str, replicas: int, kind: Kind) -> dict[str, Any]:
    try:
        fit = laws.fit(quantity, replicas, kind)
    except UserError as error:
        return {"reason": str(error)}
    coefficients = {"A": fit.factor()._asdict(), "alpha": fit.exponent()._asdict()}
    return coefficients | {"beta": fit.replicas_exponent()._asdict()} if kind == "joint" else coefficients


def _crossed(laws: Laws) -> list[int]:
    """Every M that shares two sizes with Data-Parallel."""
    sizes = {m: {point.params for point in laws.best if point.replicas == m} for m in laws.replicas}
    return [m for m in laws.replicas if m > 0 and len(sizes[m] & sizes.get(0, set())) > 1]


def _on_edge(laws: Laws) -> Iterator[dict[str, Any]]:
    """The best values that are the smallest or the largest tried: better ones may lie beyond."""
    for point in laws.best:
        for quantity in ("learning_rate", "batch_tokens", "outer_learning_rate"):
            if quantity in point.settings and laws.is_on_edge(point, quantity):
                yield {
                    "params": point.params,
                    "replicas": point.replicas,
                    "quantity": quantity,
                    "value": point.settings[quantity],
                }
