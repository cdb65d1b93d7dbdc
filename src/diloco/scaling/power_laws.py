"""Power laws by least squares in log space, with intervals by a studentized bootstrap.

    independent, for one method and one M:  y = A·N^α
    joint, for all M ≥ 1:                   y = A·N^α·M^β

Shapes: n points, k coefficients, R bootstrap repeats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A number and its 95 % interval; None where there is no data behind it to say one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PowerLaw:
    """y = A·N^α, or A·N^α·M^β.

    >>> round(PowerLaw(18.129, -0.0953)(35e6), 3)
    3.463
    """

    factor: float
    """A."""
    exponent: float
    """α, of the parameters N."""
    replicas_exponent: float | None = None
    """β, of the replicas M; None for an independent law."""

    def __call__(self, num_params: float, num_replicas: int = 1) -> float:
        """Y, in the unit of A."""
        return self.factor * num_params**self.exponent * num_replicas ** (self.replicas_exponent or 0.0)


@dataclass(frozen=True)
class PowerLawFit:
    """A law through points.

    Raises:
        ValueError: if the points don't determine it.
    """

    num_params: Sequence[float]
    """N of each point."""
    values: Sequence[float]
    """y of each."""
    num_replicas: Sequence[int] | None = None
    """M of each, for a joint law."""

    def __post_init__(self) -> None:
        """Refuse points that don't determine a law."""
        if len(set(self.num_params)) < 2:
            raise ValueError("a power law in N needs two sizes or more, not one")
        if self.num_replicas is not None and len(set(self.num_replicas)) < 2:
            raise ValueError("a joint power law needs two numbers of replicas or more, not one")

    @cached_property
    def law(self) -> PowerLaw:
        """Least squares of log y."""
        log_factor, exponent, *rest = self._coefficients_k
        return PowerLaw(math.exp(log_factor), float(exponent), float(rest[0]) if rest else None)

    def factor(self) -> Estimate:
        """A."""
        return _exp(self._interval(np.eye(self._k)[0]))

    def exponent(self) -> Estimate:
        """α."""
        return self._interval(np.eye(self._k)[1])

    def replicas_exponent(self) -> Estimate:
        """β, of a joint law."""
        return self._interval(np.eye(self._k)[2])

    def predict(self, num_params: float, num_replicas: int = 1) -> Estimate:
        """The law's value, which is the mean of log y there, not a single run's."""
        return _exp(self._interval(self._row(num_params, num_replicas)))

    def _row(self, num_params: float, num_replicas: int) -> Array:
        row = [1.0, math.log(num_params), math.log(max(1, num_replicas))]
        return np.array(row[: self._k])

    @property
    def _k(self) -> int:
        return 2 if self.num_replicas is None else 3

    @cached_property
    def _design_nxk(self) -> Array:
        columns = [np.ones(len(self.values)), np.log(self.num_params)]
        if self.num_replicas is not None:
            columns.append(np.log(self.num_replicas))
        return np.stack(columns, axis=1)

    @cached_property
    def _pseudo_inverse_kxn(self) -> Array:
        return np.asarray(np.linalg.pinv(self._design_nxk), dtype=np.float64)

    @cached_property
    def _coefficients_k(self) -> Array:
        log_values_n: Array = np.log(np.array(self.values, dtype=np.float64))
        return self._pseudo_inverse_kxn @ log_values_n

    @cached_property
    def _bootstrap(self) -> tuple[Array, Array, float]:
        """Coefficients minus the fit's (R, k), the residual deviation of each repeat (R,), and the fit's own."""
        design, inverse = self._design_nxk, self._pseudo_inverse_kxn
        freedom = len(self.values) - self._k
        residuals_n = np.log(self.values) - design @ self._coefficients_k
        leverage_n = np.einsum("nk,kn->n", design, inverse)
        raised_n = residuals_n / np.sqrt(np.maximum(1 - leverage_n, 1e-9))
        raised_n -= raised_n.mean()
        drawn_Rxn = np.random.default_rng(0).choice(raised_n, size=(_REPEATS, len(raised_n)))
        moved_Rxk = drawn_Rxn @ inverse.T
        left_Rxn = drawn_Rxn - moved_Rxk @ design.T
        return (
            moved_Rxk,
            np.sqrt((left_Rxn**2).sum(1) / freedom),
            math.sqrt(float((residuals_n**2).sum()) / freedom),
        )

    def _interval(self, row_k: Array) -> Estimate:
        """Of a linear combination of the coefficients; t-statistics are drawn, not assumed."""
        value = float(row_k @ self._coefficients_k)
        if len(self.values) < self._k + _LEAST_FREEDOM:
            return Estimate(value)
        moved_Rxk, deviation_R, deviation = self._bootstrap
        kept = deviation_R > 1e-9 * deviation
        t_R = (moved_Rxk @ row_k)[kept] / deviation_R[kept]
        low, high = np.quantile(t_R, [0.025, 0.975]) if kept.any() else (0.0, 0.0)
        return Estimate(value, value - float(high) * deviation, value - float(low) * deviation)


_REPEATS = 4000
_LEAST_FREEDOM = 3  # with fewer points than that beyond the coefficients, residuals say too little


def _exp(estimate: Estimate) -> Estimate:
    low, high = (None if number is None else math.exp(number) for number in (estimate.low, estimate.high))
    return Estimate(math.exp(estimate.value), low, high)


def log_residual(measured: float, predicted: float) -> float:
    """|log y − log ŷ|."""
    return abs(math.log(measured) - math.log(predicted))
