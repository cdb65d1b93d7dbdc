"""Power laws by least squares in log space, with intervals by a studentized bootstrap.

    independent, for one method and one M:  y = A·N^α
    joint, for all M ≥ 1:                   y = A·N^α·M^β

At one size, a law errs alike for every M. Errors therefore have two strata, as in a split plot: one error for each
size, and one for each point within its size. An independent law has one point a size, and only the first stratum.

Shapes: n points, g sizes, k coefficients, R bootstrap repeats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError
from diloco.paper_tables import rows

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    """The reason why there is no interval."""


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


def _published(row: dict[str, Any]) -> PowerLaw:
    return PowerLaw(row["factor"], row["exponent"], row.get("replicas_exponent"))


LAWS: dict[str, dict[int, PowerLaw]] = {}
"""The published independent laws, by quantity and M; the batch in sequences of `SEQUENCE_LENGTH` tokens."""
JOINT: dict[str, PowerLaw] = {}
"""The published joint laws, by quantity."""
for _row in rows("scaling_power_laws"):
    if _row["replicas"] == "joint":
        JOINT[_row["quantity"]] = _published(_row)
    else:
        LAWS.setdefault(_row["quantity"], {})[_row["replicas"]] = _published(_row)
SEQUENCE_LENGTH = 2048


def batch_tokens(num_params: float, num_replicas: int) -> float:
    """The best global batch by the published law, A·N^α.

    The paper calls its unit tokens, but its law gives 76 at a billion parameters: we read sequences of 2,048.

    >>> round(batch_tokens(1e9, 0))
    156417
    """
    return SEQUENCE_LENGTH * LAWS["batch_tokens"][num_replicas](num_params)


@dataclass(frozen=True)
class PowerLawFit:
    """A power law fitted to points.

    Raises:
        UserError: if the points don't determine a law.
    """

    num_params: Sequence[float]
    """N of each point."""
    values: Sequence[float]
    """y of each point."""
    num_replicas: Sequence[int] | None = None
    """M of each point, for a joint law; None for an independent one."""
    step: float = 1.0
    """The factor between neighbouring values of the grid that y comes from; 1 if it comes from none."""

    def __post_init__(self) -> None:
        if len(set(self.num_params)) < 2:
            raise UserError("a power law in N needs two sizes or more, not one")
        if self.num_replicas is not None and len(set(self.num_replicas)) < 2:
            raise UserError("a joint power law needs two numbers of replicas or more, not one")
        if np.linalg.matrix_rank(self._design_nxk) < self._k:
            points = ", ".join(f"N = {n:g}, M = {m}" for n, m in zip(self.num_params, self._replicas, strict=True))
            raise UserError(f"{points} don't tell α from β: add a size at which two numbers of replicas were run")
        if np.abs(self._coefficients_k).max() > _LARGEST:
            values = ", ".join(f"{value:.3g}" for value in self._coefficients_k[:2])
            raise UserError(f"log A and α would be {values}: the points lie on no power law, look at them")

    @cached_property
    def law(self) -> PowerLaw:
        """The law with the least squares of log y."""
        log_factor, exponent, *rest = self._coefficients_k
        return PowerLaw(math.exp(log_factor), float(exponent), float(rest[0]) if rest else None)

    def factor(self) -> Estimate:
        """A with its interval."""
        return _exp(self._interval(np.eye(self._k)[0]))

    def exponent(self) -> Estimate:
        """α with its interval."""
        return self._interval(np.eye(self._k)[1])

    def replicas_exponent(self) -> Estimate:
        """β of a joint law with its interval."""
        return self._interval(np.eye(self._k)[2])

    def predict(self, num_params: float, num_replicas: int = 1) -> Estimate:
        """The law's value: the exponential of the mean of log y, whose interval is not that of a single run."""
        return _exp(self._interval(self._row(num_params, num_replicas)))

    def _row(self, num_params: float, num_replicas: int) -> Array:
        row = [1.0, math.log(num_params), math.log(max(1, num_replicas))]
        return np.array(row[: self._k])

    @property
    def _k(self) -> int:
        return 2 if self.num_replicas is None else 3

    @property
    def _replicas(self) -> Sequence[int]:
        return self.num_replicas if self.num_replicas is not None else [1] * len(self.values)

    @cached_property
    def _design_nxk(self) -> Array:
        columns = [np.ones(len(self.values)), np.log(self.num_params), np.log(self._replicas)]
        return np.stack(columns[: self._k], axis=1)

    @cached_property
    def _pseudo_inverse_kxn(self) -> Array:
        return np.asarray(np.linalg.pinv(self._design_nxk), dtype=np.float64)

    @cached_property
    def _coefficients_k(self) -> Array:
        log_values_n: Array = np.log(np.array(self.values, dtype=np.float64))
        return self._pseudo_inverse_kxn @ log_values_n

    @cached_property
    def _size_of_n(self) -> NDArray[np.intp]:
        """The index of each point's size."""
        return np.unique(np.asarray(self.num_params, dtype=np.float64), return_inverse=True)[1]

    @cached_property
    def _mean_gxn(self) -> Array:
        """The mean over the points of each size."""
        is_of_gxn = np.arange(self._size_of_n.max() + 1)[:, None] == self._size_of_n
        return is_of_gxn / is_of_gxn.sum(1, keepdims=True)

    @property
    def _freedom(self) -> tuple[int, int]:
        """Degrees of freedom between sizes, and within them."""
        num_points, num_sizes = len(self.values), len(self._mean_gxn)
        return num_sizes - 2, num_points - num_sizes - (self._k - 2)

    def _weights(self, row_k: Array) -> tuple[float, float]:
        """The weight of each stratum's variance in a combination of the coefficients, 0 if it has no part."""
        weights_n = row_k @ self._pseudo_inverse_kxn
        weights_g = self._mean_gxn @ weights_n
        between = float((np.bincount(self._size_of_n) * weights_g**2).sum())
        within = float(((weights_n - weights_g[self._size_of_n]) ** 2).sum())
        rounding = 1e-12 * (between + within)
        return between if between > rounding else 0.0, within if within > rounding else 0.0

    def _variances(self, weights: tuple[float, float], residuals_Rxn: Array) -> Array:
        """The variance of a combination of the coefficients, from each repeat's residuals, (R,)."""
        means_Rxg = residuals_Rxn @ self._mean_gxn.T
        within_Rxn = residuals_Rxn - means_Rxg[:, self._size_of_n]
        squares = (np.bincount(self._size_of_n) * means_Rxg**2).sum(1), (within_Rxn**2).sum(1)
        parts = [
            w * square / freedom for w, square, freedom in zip(weights, squares, self._freedom, strict=True) if w
        ]
        return np.sum(parts, axis=0)

    @cached_property
    def _residuals_n(self) -> Array:
        return np.log(self.values) - self._design_nxk @ self._coefficients_k

    @cached_property
    def _bootstrap(self) -> tuple[Array, Array]:
        """Each repeat's coefficients minus the fit's, (R, k), and its residuals, (R, n).

        The residuals are split into e_i = b_g + w_i, with b_g the mean of the n_g residuals at size g. A repeat
        draws errors with replacement, one for each size and one for each point within its size,

            e*_i = b*_g + (w*_i − mean of w* at size g),    b*_g from { b_g/√(1 − h_g n_g) }, less their mean,
                                                            w*_i from { w_i·√(n/f) },

        where h_g is the leverage of a size's mean and f the degrees of freedom within the sizes, both of which
        make residuals smaller than errors. The fit to these errors moves by c* = X⁺ e*, and leaves e* − X c*.
        """
        design, inverse, generator = self._design_nxk, self._pseudo_inverse_kxn, np.random.default_rng(0)
        means_g = self._mean_gxn @ self._residuals_n
        within_n = self._residuals_n - means_g[self._size_of_n]
        leverage_g = np.einsum("gn,nk,km,gm->g", self._mean_gxn, design, inverse, self._mean_gxn)
        means_g = means_g / np.sqrt(np.maximum(1 - leverage_g * np.bincount(self._size_of_n), 1e-9))
        means_g -= means_g.mean()
        drawn_Rxn = generator.choice(means_g, size=(_REPEATS, len(means_g)))[:, self._size_of_n]
        if self._freedom[1] > 0:
            within_n = within_n * math.sqrt(len(within_n) / self._freedom[1])
            apart_Rxn = generator.choice(within_n, size=(_REPEATS, len(within_n)))
            drawn_Rxn = drawn_Rxn + apart_Rxn - (apart_Rxn @ self._mean_gxn.T)[:, self._size_of_n]
        moved_Rxk = drawn_Rxn @ inverse.T
        return moved_Rxk, drawn_Rxn - moved_Rxk @ design.T

    def _interval(self, row_k: Array) -> Estimate:
        """A linear combination of the coefficients with its interval, from bootstrapped t-statistics."""
        value, weights = float(row_k @ self._coefficients_k), self._weights(row_k)
        # The error of a value rounded to a grid is uniform, with the deviation step/√12.
        if np.sqrt(np.mean(self._residuals_n**2)) < math.log(self.step) / math.sqrt(12):
            reason = f"the law's residuals are less than the step between values tried, a factor {self.step:.3g}"
            return Estimate(value, reason=reason)
        if self._freedom[1] < 0:
            return Estimate(value, reason="an interval needs a size at which several numbers of replicas were run")
        counts = {"sizes": len(self._mean_gxn), "points": len(self.values)}
        for weight, freedom, (noun, count) in zip(weights, self._freedom, counts.items(), strict=True):
            if weight and freedom < _LEAST_FREEDOM:
                least = count + _LEAST_FREEDOM - freedom
                return Estimate(value, reason=f"an interval needs {least} {noun}, and there are {count}")
        moved_Rxk, left_Rxn = self._bootstrap
        deviation = math.sqrt(float(self._variances(weights, self._residuals_n[None])[0]))
        deviation_R = np.sqrt(self._variances(weights, left_Rxn))
        kept = deviation_R > 1e-9 * deviation
        t_R = (moved_Rxk @ row_k)[kept] / deviation_R[kept]
        low, high = np.quantile(t_R, [0.025, 0.975]) if kept.any() else (0.0, 0.0)
        return Estimate(value, value - float(high) * deviation, value - float(low) * deviation)


_REPEATS = 4000
_LARGEST = 500.0  # a coefficient, or a logarithm, whose exponential is finite and above 0
_LEAST_FREEDOM = 3  # fewer degrees of freedom say too little about the errors


def _exp(estimate: Estimate) -> Estimate:
    """An estimate of y from one of log y."""
    if abs(estimate.value) > _LARGEST:
        raise UserError(
            f"the law's value would be e^{estimate.value:.3g}: take a size nearer to those of the table"
        )
    value = math.exp(estimate.value)
    if estimate.low is None or estimate.high is None:
        return Estimate(value, reason=estimate.reason)
    if max(abs(estimate.low), abs(estimate.high)) > _LARGEST:
        return Estimate(
            value, reason="the interval has no end: the sizes lie too near to each other for these errors"
        )
    return Estimate(value, math.exp(estimate.low), math.exp(estimate.high), estimate.reason)


def log_residual(measured: float, predicted: float) -> float:
    """|log y − log ŷ|."""
    return abs(math.log(measured) - math.log(predicted))
