"""The rate at which a periodic system of waits settles.

A period maps the times at its start to those at its end by additions and maxima, x ← T(x), with
T(x + c) = T(x) + c. Such a map has one growth rate λ for every x, and
min_i (T(x)_i − x_i) ≤ λ ≤ max_i (T(x)_i − x_i) for every x (Gaubert and Gunawardena, The Perron-Frobenius theorem
for homogeneous, monotone functions, 2004).

Shapes: S times in the state, B bandwidths.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""Times in seconds."""


def growth_rate(period: Callable[[Times], Times], start_SxB: Times, *, longest_cycle: int) -> Times:
    """λ for each bandwidth, to a part in 10¹¹.

    The times have settled when all have grown by the same amount over one period, or over a cycle of several. A
    slightly overloaded link falls behind a little more every period, until training has to wait for it; x now and
    then leaps ahead to where many such periods would lead, instead of taking each of them.

    Args:
        period: T.
        start_SxB: any x.
        longest_cycle: the most periods that a cycle may have.

    Returns:
        λ in seconds per period, (B,); if the times do not settle, which was never seen, the average growth over
        the second half of the periods taken.
    """
    rate_B = np.full(start_SxB.shape[1], np.nan)
    history = [start_SxB]
    for num_periods in range(1, _LEAPS_AFTER[-1] + 10 * longest_cycle + 200):
        next_SxB = period(history[-1])
        for cycle in _likely_cycles(next_SxB, history[: -longest_cycle - 1 : -1], np.isnan(rate_B)):
            grown_SxB = next_SxB - history[-cycle]
            settled_B = np.isnan(rate_B) & (np.ptp(grown_SxB, axis=0) <= 1e-11 * grown_SxB.max(0))
            rate_B[settled_B] = grown_SxB[0, settled_B] / cycle
        if not np.isnan(rate_B).any():
            return rate_B
        if num_periods in _LEAPS_AFTER:
            history = [_leap(next_SxB, next_SxB - history[-1])]
        else:
            history.append(next_SxB)
    half = len(history) // 2
    average_B = (history[-1] - history[half])[0] / (len(history) - 1 - half)
    return np.where(np.isnan(rate_B), average_B, rate_B)


_LEAPS_AFTER = (2, 5, 10, 20, 40, 80)


def _likely_cycles(next_SxB: Times, recent: Sequence[Times], is_open_B: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Numbers of periods over which the first and the last time have grown equally, where λ is still open."""
    ends = slice(None, None, max(len(next_SxB) - 1, 1))
    grown_Cx2xB = next_SxB[ends] - np.array([earlier_SxB[ends] for earlier_SxB in recent])
    equal_CxB = np.abs(grown_Cx2xB[:, 0] - grown_Cx2xB[:, -1]) <= 2e-11 * np.abs(grown_Cx2xB[:, 0])
    return 1 + np.flatnonzero(equal_CxB[:, is_open_B].any(1))


def _leap(x_SxB: Times, grown_SxB: Times) -> Times:
    """x after 10,000 such periods, with no two times further apart than 10,000 median periods."""
    apart_SxB = grown_SxB - grown_SxB.min(0)
    usual_B, tiny = np.median(grown_SxB, axis=0), np.finfo(np.float64).tiny
    num_periods_B = 10_000 * usual_B / np.maximum(np.maximum(usual_B, apart_SxB.max(0)), tiny)
    leapt_SxB = x_SxB + num_periods_B * apart_SxB
    return leapt_SxB - leapt_SxB.min(0)  # small times have exact differences
