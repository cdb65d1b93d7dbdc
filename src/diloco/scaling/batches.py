"""The best batch of each size: the minimum of a parabola in log2(B) through a sweep's losses."""

import math
from collections.abc import Sequence

import numpy as np

from diloco.scaling.table import Point


def loss_of_batches(points: Sequence[Point]) -> dict[float, float]:
    """The lowest loss at each batch, of the outer learning rate that was tried at the most batches.

    Other outer learning rates may have been tried at the best batch alone, which they would favour.

    Raises:
        ValueError: if the points have no batch.
    """
    by_rate: dict[float | None, dict[float, float]] = {}
    for point in points:
        if "batch_tokens" not in point.settings:
            raise ValueError("the best batch wants the column batch_tokens in every row")
        batch, losses = (
            point.settings["batch_tokens"],
            by_rate.setdefault(point.settings.get("outer_learning_rate"), {}),
        )
        losses[batch] = min(point.eval_loss, losses.get(batch, math.inf))
    found = max(by_rate.values(), key=lambda losses: (len(losses), -min(losses.values())))
    return dict(sorted(found.items()))


def best_batch(points: Sequence[Point]) -> float:
    """Tokens, where a parabola through the loss of each batch has its minimum.

    Where the losses form no valley, or its bottom lies outside what was tried, it is the best that was tried.

    Raises:
        ValueError: if the points have no batch.
    """
    losses = loss_of_batches(points)
    tried = min(losses, key=losses.__getitem__)
    if len(losses) < 3:
        return tried
    x = np.log2(list(losses))
    curvature, slope, _ = np.polyfit(x, list(losses.values()), 2)
    bottom = -slope / (2 * curvature) if curvature > 0 else math.nan
    return 2.0**bottom if x.min() <= bottom <= x.max() else tried


def is_on_edge(points: Sequence[Point]) -> bool:
    """Whether the best batch is the smallest or the largest that was tried, so that it may lie beyond."""
    return best_batch(points) in (min(losses := loss_of_batches(points)), max(losses))
