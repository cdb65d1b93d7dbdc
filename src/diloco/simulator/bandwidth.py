"""The grid of bandwidths, and its smallest one that reaches a target."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError

GBIT_S = np.logspace(-1, 3, 50)
"""The grid of arXiv 2501.18512: 0.1 to 1000 Gbit/s."""


def checked_gbit_s(gbit_s: ArrayLike) -> NDArray[np.float64]:
    """Bandwidths as a vector, (B,).

    Raises:
        UserError: if a bandwidth is not above 0 and finite.
    """
    gbit_s_B = np.atleast_1d(np.asarray(gbit_s, dtype=np.float64))
    if gbit_s_B.ndim != 1 or not gbit_s_B.size or not (np.isfinite(gbit_s_B) & (gbit_s_B > 0)).all():
        raise UserError(f"link must be above 0 and finite, not {gbit_s} Gbit/s", "link")
    return gbit_s_B


def reaches(compute_utilization: NDArray[np.float64], target: float) -> NDArray[np.bool_]:
    """True for each utilization that reaches a target, up to rounding errors."""
    return compute_utilization >= target - 1e-9


def needed_gbit_s(compute_utilization: NDArray[np.float64], target: float) -> float | None:
    """The smallest bandwidth of the grid that reaches a target; None if the largest does not.

    Args:
        compute_utilization: at each bandwidth of `GBIT_S`, (50,).
        target: above 0, at most 1.

    >>> needed_gbit_s(GBIT_S / 1000, 0.5)
    568.9866029018293
    """
    assert 0 < target <= 1, "the caller checks the target"
    enough = np.flatnonzero(reaches(compute_utilization, target))
    return float(GBIT_S[enough[0]]) if enough.size else None
