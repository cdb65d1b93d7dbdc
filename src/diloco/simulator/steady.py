"""The rate at which a periodic system of waits settles.

A period maps the times at its start to those at its end by additions and maxima, x ← T(x), with
T(x + c) = T(x) + c. Such a map has one growth rate λ, whatever x it starts from, and
min_i (T(x)_i − x_i) ≤ λ ≤ max_i (T(x)_i − x_i) for every x (Gaubert and Gunawardena, The Perron-Frobenius theorem
for homogeneous, monotone functions, 2004).

Shapes: S times of the state, B bandwidths.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def growth_rate(period: Callable[[Times], Times], start_SxB: Times) -> Times:
    """λ for each bandwidth: to a part in 10¹¹ where the times settle, as they do within a few periods.

    A link that carries a little more than it can falls behind a little more every period, until training has to
    wait for it. So as not to take each of these periods, x now and then leaps to where many of them would lead.
    """
    x_SxB = start_SxB
    first: list[Times] = []  # what the first time of the state grew by, period for period
    for count in range(1, _MAX_PERIODS + 1):
        next_SxB = period(x_SxB)
        grown_SxB = next_SxB - x_SxB
        first.append(grown_SxB[0])
        if np.all(np.ptp(grown_SxB, axis=0) <= 1e-11 * grown_SxB.max(0)):
            return grown_SxB[0]
        x_SxB = next_SxB + _LEAP * grown_SxB if count in _LEAPS_AFTER else next_SxB
        x_SxB = x_SxB - x_SxB.min(0)  # keeps the times small, and so their differences exact
    return np.mean(first[_MAX_PERIODS // 2 :], axis=0)


_LEAP = 10_000
_LEAPS_AFTER = (2, 5, 10, 20, 40, 80)
_MAX_PERIODS = 200
