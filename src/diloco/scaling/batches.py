"""The best batch of each size: the minimum of a parabola in log2(B)."""

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
    """Tokens, where a parabola through the best batch that was tried and the two beside it has its minimum.

    Those are the batches at which a sweep has looked for the best learning rate; losses further away lie above the
    valley, and more so on one side of it. A best batch that is the smallest or the largest is taken as it is.

    Raises:
        ValueError: if the points have no batch.
    """
    losses = loss_of_batches(points)
    batches = list(losses)
    index = min(range(len(batches)), key=lambda i: losses[batches[i]])
    if index in (0, len(batches) - 1):
        return batches[index]
    around = batches[index - 1 : index + 2]
    curvature, slope, _ = np.polyfit(np.log2(around), [losses[batch] for batch in around], 2)
    return float(2.0 ** (-slope / (2 * curvature)))
