"""Loss over parameters N and replicas M in four forms, fitted with a Huber loss and selected at the largest size.

    product           A·N^α·M^β
    product_constant  A·N^α·M^β + C
    exponent          A·N^(α+βM) + C
    sum               A·N^α + B·M^β + C

As in arXiv 2503.09799, L-BFGS minimises the Huber loss of log residuals from 256 random starts, for all sizes but
the largest. Among the starts that end about as low as the lowest, the fit that is best at the largest size is
kept: its residual there has been used for selection, and is no test error. The paper selects among all starts, and
so may keep one that stalled where that happens to suit the largest size: that residual is given, too.

N counts parameters. Its unit matters in the exponent form, where β depends on it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError
from diloco.files import require
from diloco.paper_tables import rows

Array = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""δ of arXiv 2203.15556; 2503.09799 does not state its own."""
NUM_STARTS = 256
"""Random starts of the optimizer."""
_AS_LOW = 1.01  # times the lowest training loss


@dataclass(frozen=True)
class Form:
    """A family of functions; its coefficients hold log B, and log A for N in millions."""

    name: str
    formula: str
    ranges: dict[str, tuple[float, float]]
    """The range of each coefficient's uniformly random start; the fit stays within `_BOUNDS`."""
    evaluate: Callable[[Array, Array, Array], tuple[Array, list[Array]]]
    """The loss and its derivative by each coefficient, from coefficients, N and M."""

    def predict(self, coefficients: Array, num_params: Array, num_replicas: Array) -> Array:
        """The loss at each point."""
        return self.evaluate(coefficients, num_params, num_replicas)[0]


def _product(c: Array, n: Array, m: Array) -> tuple[Array, list[Array]]:
    log_n = np.log(n / _MILLION)
    y = np.exp(c[0] + c[1] * log_n + c[2] * np.log(m))
    return y, [y, y * log_n, y * np.log(m)]


def _product_constant(c: Array, n: Array, m: Array) -> tuple[Array, list[Array]]:
    y, derivatives = _product(c, n, m)
    return y + c[3], [*derivatives, np.ones_like(y)]


def _exponent(c: Array, n: Array, m: Array) -> tuple[Array, list[Array]]:
    log_n = np.log(n / _MILLION)
    y = np.exp(c[0] + c[1] * log_n + c[2] * m * np.log(n))
    return y + c[3], [y, y * log_n, y * m * np.log(n), np.ones_like(y)]


def _sum(c: Array, n: Array, m: Array) -> tuple[Array, list[Array]]:
    log_n = np.log(n / _MILLION)
    by_n, by_m = np.exp(c[0] + c[1] * log_n), np.exp(c[2] + c[3] * np.log(m))
    return by_n + by_m + c[4], [by_n, by_n * log_n, by_m, by_m * np.log(m), np.ones_like(by_n)]


_MILLION = 1e6
_A, _ALPHA, _C = (0.0, 2.5), (-0.6, -0.02), (0.0, 2.0)
_N = {"log A": _A, "α": _ALPHA}
FORMS = {
    form.name: form
    for form in (
        Form("product", "A·N^α·M^β", _N | {"β": (-0.1, 0.1)}, _product),
        Form("product_constant", "A·N^α·M^β + C", _N | {"β": (-0.1, 0.2), "C": _C}, _product_constant),
        Form("exponent", "A·N^(α+βM) + C", _N | {"β": (-0.002, 0.002), "C": _C}, _exponent),
        Form("sum", "A·N^α + B·M^β + C", _N | {"log B": (-7.0, 0.0), "β": (-1.0, 2.0), "C": _C}, _sum),
    )
}
"""Forms by name."""
PUBLISHED_RESIDUALS: dict[str, float] = {row["form"]: row["residual"] for row in rows("scaling_forms")}
"""The mean of |log y − log ŷ| over M at 2.4B for each form, which the paper selected by it (Table 13)."""
_BOUNDS = {"log A": (-20.0, 20.0), "α": (-2.0, 0.5), "log B": (-20.0, 20.0), "β": (-3.0, 3.0), "C": (0.0, 20.0)}


@dataclass(frozen=True)
class ParametricFit:
    """A form with coefficients."""

    form: Form
    coefficients: dict[str, float]
    """Coefficients by their symbols in the formula, factors as logarithms."""
    residual: float
    """Mean |log y − log ŷ| at the largest size, by which the fit was selected."""
    residual_of_all: float
    """The smallest such residual of any start, however high its training loss: the paper's rule."""

    def __call__(self, num_params: float, num_replicas: int) -> float:
        """The loss, in nats per token."""
        log_a = self.coefficients["log A"] + self.coefficients["α"] * math.log(_MILLION)
        values = np.array(list((self.coefficients | {"log A": log_a}).values()))
        return float(self.form.predict(values, np.array(num_params), np.array(float(num_replicas))))


def fit_parametric(
    form: Form, num_params: Sequence[float], num_replicas: Sequence[int], loss: Sequence[float], *, seed: int = 0
) -> ParametricFit:
    """The best fit of all starts.

    Args:
        form: one of `FORMS`.
        num_params: N of each point.
        num_replicas: M of each point.
        loss: nats per token at each point.
        seed: of the random starts.

    Raises:
        UserError: if sizes below the largest, numbers of replicas, or points are too few for the form.
    """
    n, m, y = np.array(num_params), np.array(num_replicas, dtype=float), np.array(loss)
    is_largest = n == n.max()
    # A power and a constant take three values to separate.
    least = 3 if "C" in form.ranges else 2, 3 if "log B" in form.ranges else 2
    given = len(set(n[~is_largest])), len(set(m[~is_largest]))
    if given[0] < least[0] or given[1] < least[1]:
        raise UserError(
            f"{form.formula} needs {least[0]} sizes below the largest and {least[1]} numbers of replicas, and "
            f"there are {given[0]} and {given[1]}"
        )
    if (num_points := int((~is_largest).sum())) <= len(form.ranges):
        raise UserError(
            f"{form.formula} has {len(form.ranges)} coefficients, and there are {num_points} points below the "
            "largest size"
        )
    generator = np.random.default_rng(seed)
    low, high = np.array(list(form.ranges.values())).T
    bounds = [_BOUNDS[symbol] for symbol in form.ranges]
    ends: list[tuple[float, float, Array]] = []  # training loss, residual at the largest, coefficients
    fitted = (form, n[~is_largest], m[~is_largest], y[~is_largest])
    minimize = require("scipy.optimize", extra="scaling").minimize
    threads = require("threadpoolctl", extra="scaling").threadpool_limits
    # For matrices this small, threads take a thousand times longer.
    with threads(1), np.errstate(over="ignore", invalid="ignore"):
        for start in generator.uniform(low, high, size=(NUM_STARTS, len(low))):
            end = minimize(_huber, start, fitted, jac=True, method="L-BFGS-B", bounds=bounds, options=_OPTIONS)
            predicted, _ = _evaluate(end.x, form, n[is_largest], m[is_largest])
            residual = float(np.abs(np.log(predicted) - np.log(y[is_largest])).mean())
            ends.append((float(end.fun), residual, end.x))
    lowest = min(loss for loss, _, _ in ends)
    _, best_residual, best = min(
        (end for end in ends if end[0] <= _AS_LOW * lowest + 1e-3), key=lambda end: end[1]
    )
    coefficients = dict(zip(form.ranges, map(float, best), strict=True))
    coefficients["log A"] -= coefficients["α"] * math.log(_MILLION)
    return ParametricFit(form, coefficients, best_residual, min(residual for _, residual, _ in ends))


def _evaluate(c: Array, form: Form, n: Array, m: Array) -> tuple[Array, Array]:
    """The loss, kept positive and finite, and its derivatives (k, n)."""
    predicted, derivatives = form.evaluate(c, n, m)
    within = (predicted > _LEAST) & (predicted < _MOST)
    return np.fmax(np.fmin(predicted, _MOST), _LEAST), np.where(within, derivatives, 0.0)  # NaN becomes the most


_LEAST, _MOST = 1e-9, 1e9
_OPTIONS = {"maxiter": 500}  # on the published losses no start needs more than 350


def _huber(c: Array, form: Form, n: Array, m: Array, y: Array) -> tuple[float, Array]:
    """Σ r²/2 for |r| ≤ δ and δ(|r| − δ/2) beyond, divided by δ² to suit the optimizer; and its gradient."""
    predicted, derivatives = _evaluate(c, form, n, m)
    r = (np.log(predicted) - np.log(y)) / HUBER_DELTA
    value = np.where(np.abs(r) <= 1, r**2 / 2, np.abs(r) - 0.5).sum()
    return float(value), derivatives @ (np.clip(r, -1, 1) / (HUBER_DELTA * predicted))
