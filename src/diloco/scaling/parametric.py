"""Loss over parameters N and replicas M in four forms, fitted with a Huber loss and selected at the largest size.

    product           A·N^α·M^β
    product_constant  A·N^α·M^β + C
    exponent          A·N^(α+βM) + C
    sum               A·N^α + B·M^β + C

As arXiv 2503.09799 does: the Huber loss of log residuals, minimised by L-BFGS from 256 random starts. All sizes
but the largest are fitted, and of all starts the one whose fit is best at the largest is kept: the residual there
has been used to choose, and is no test error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Of arXiv 2203.15556; 2503.09799 names none."""
NUM_STARTS = 256


@dataclass(frozen=True)
class Form:
    """A family of functions; `log A` and `log B` stand for the factors, N counts in millions."""

    name: str
    formula: str
    ranges: dict[str, tuple[float, float]]
    """Where each coefficient starts: uniform in between."""
    predict: Callable[[Array, Array, Array], Array]
    """(coefficients, N, M) to the loss."""


def _product(c: Array, n: Array, m: Array) -> Array:
    return np.exp(c[0] + c[1] * np.log(n) + c[2] * np.log(m))


_A, _ALPHA = (0.0, 2.5), (-0.6, -0.02)
FORMS = {
    form.name: form
    for form in (
        Form("product", "A·N^α·M^β", {"log A": _A, "α": _ALPHA, "β": (-0.1, 0.1)}, _product),
        Form(
            "product_constant",
            "A·N^α·M^β + C",
            {"log A": _A, "α": _ALPHA, "β": (-0.1, 0.2), "C": (0.0, 2.0)},
            lambda c, n, m: _product(c, n, m) + c[3],
        ),
        Form(
            "exponent",
            "A·N^(α+βM) + C",
            {"log A": _A, "α": _ALPHA, "β": (-0.02, 0.02), "C": (0.0, 2.0)},
            lambda c, n, m: np.exp(c[0] + (c[1] + c[2] * m) * np.log(n)) + c[3],
        ),
        Form(
            "sum",
            "A·N^α + B·M^β + C",
            {"log A": _A, "α": _ALPHA, "log B": (-7.0, 0.0), "β": (-1.0, 2.0), "C": (0.0, 2.0)},
            lambda c, n, m: np.exp(c[0] + c[1] * np.log(n)) + np.exp(c[2] + c[3] * np.log(m)) + c[4],
        ),
    )
}
"""By name."""


@dataclass(frozen=True)
class ParametricFit:
    """A form with coefficients."""

    form: Form
    coefficients: dict[str, float]
    residual: float
    """Mean |log y − log ŷ| at the largest size, by which the fit was selected."""

    def __call__(self, num_params: float, num_replicas: int) -> float:
        """Loss, nats a token."""
        values = np.array(list(self.coefficients.values()))
        return float(self.form.predict(values, np.array(num_params / _MILLION), np.array(float(num_replicas))))


_MILLION = 1e6


def fit_parametric(
    form: Form, num_params: Sequence[float], num_replicas: Sequence[int], loss: Sequence[float], *, seed: int = 0
) -> ParametricFit:
    """The best fit of all starts.

    Raises:
        ValueError: if there are too few points below the largest size for the form's coefficients.
    """
    n, m, y = np.array(num_params) / _MILLION, np.array(num_replicas, dtype=float), np.array(loss)
    is_largest = n == n.max()
    if (~is_largest).sum() < len(form.ranges):
        raise ValueError(
            f"{form.formula} has {len(form.ranges)} coefficients, and there are {(~is_largest).sum()} points "
            "below the largest size: add sizes, or numbers of replicas"
        )
    generator = np.random.default_rng(seed)
    low, high = np.array(list(form.ranges.values())).T
    best, best_residual = None, math.inf
    for start in generator.uniform(low, high, size=(NUM_STARTS, len(low))):
        found = minimize(
            _huber, start, args=(form, n[~is_largest], m[~is_largest], y[~is_largest]), method="L-BFGS-B"
        )
        residual = float(np.abs(_log_residuals(found.x, form, n[is_largest], m[is_largest], y[is_largest])).mean())
        if residual < best_residual:
            best, best_residual = found.x, residual
    assert best is not None, "some start has a finite residual"
    return ParametricFit(form, dict(zip(form.ranges, map(float, best), strict=True)), best_residual)


def _log_residuals(c: Array, form: Form, n: Array, m: Array, y: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        predicted = np.nan_to_num(form.predict(c, n, m), nan=1e9, posinf=1e9)
    return np.log(np.maximum(predicted, 1e-9)) - np.log(y)


def _huber(c: Array, form: Form, n: Array, m: Array, y: Array) -> float:
    """Σ r²/2 up to δ, and δ(|r| − δ/2) beyond, over δ² for the sake of the optimizer."""
    r = np.abs(_log_residuals(c, form, n, m, y)) / HUBER_DELTA
    return float(np.where(r <= 1, r**2 / 2, r - 0.5).sum())
