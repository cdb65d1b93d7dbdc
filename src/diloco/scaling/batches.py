"""The best batch of each size: the minimum of a parabola in log2(B) through a sweep's losses."""

import math
from collections.abc import Sequence

import numpy as np

from diloco.scaling.table import Point


def best_batch(points: Sequence[Point]) -> float:
    """Tokens, where a parabola through the best loss of each batch has its minimum.

    Where the losses form no valley, or its bottom lies outside what was tried, it is the best that was tried.

    Raises:
        ValueError: if the points have no batch.
    """
    lowest: dict[float, float] = {}
    for point in points:
        if "batch_tokens" not in point.settings:
            raise ValueError("the best batch wants the column batch_tokens in every row")
        batch = point.settings["batch_tokens"]
        lowest[batch] = min(point.eval_loss, lowest.get(batch, math.inf))
    tried = min(lowest, key=lowest.__getitem__)
    if len(lowest) < 3:
        return tried
    x = np.log2(list(lowest))
    curvature, slope, _ = np.polyfit(x, list(lowest.values()), 2)
    bottom = -slope / (2 * curvature) if curvature > 0 else math.nan
    return 2.0**bottom if x.min() <= bottom <= x.max() else tried
