"""The best batch of each size, a parabola's minimum in log2(B); and what was tried beside a best value."""

import math
from collections.abc import Sequence

import numpy as np

from diloco.errors import UserError
from diloco.scaling.table import Point


def losses_beside(points: Sequence[Point], best: Point, quantity: str) -> dict[float, float]:
    """The lowest loss at each value of a quantity that was tried beside the best, by value.

    At one outer learning rate: that of the best, where values on both sides of its own were tried, and else that
    at which most were, since others may have been tried at the best of the grid alone. Learning rates are those
    that were tried at the best batch.

    Raises:
        UserError: if the points don't have the quantity.
    """
    if any(quantity not in point.settings for point in points):
        raise UserError(f"the best {quantity} wants the column {quantity} in every row")
    if quantity == "outer_learning_rate":
        return _lowest(points, quantity)
    if quantity == "learning_rate":
        points = [p for p in points if p.settings.get("batch_tokens") == best.settings.get("batch_tokens")]
    by_rate: dict[float | None, list[Point]] = {}
    for point in points:
        by_rate.setdefault(point.settings.get("outer_learning_rate"), []).append(point)
    own = _lowest(by_rate[best.settings.get("outer_learning_rate")], quantity)
    if min(own) < best.settings[quantity] < max(own):
        return own
    tried = (_lowest(of, quantity) for of in by_rate.values())
    return max(tried, key=lambda losses: (len(losses), -min(losses.values())))


def _lowest(points: Sequence[Point], quantity: str) -> dict[float, float]:
    losses: dict[float, float] = {}
    for point in points:
        value = point.settings[quantity]
        losses[value] = min(point.eval_loss, losses.get(value, math.inf))
    return dict(sorted(losses.items()))


def is_on_edge(points: Sequence[Point], best: Point, quantity: str) -> bool:
    """Whether the best value is the smallest or the largest tried beside it: a better one may lie beyond."""
    value, tried = best.settings[quantity], losses_beside(points, best, quantity)
    return len({value, *tried}) > 1 and not min(tried) < value < max(tried)


def best_batch(points: Sequence[Point], best: Point) -> float:
    """Tokens, where a parabola through the batch of the best run and the two tried beside it has its minimum.

    Those are the batches at which a sweep has looked for the best learning rate; losses further away lie above the
    valley, and more so on one side of it. A best batch that is the smallest or the largest is taken as it is, and
    one that lies in no valley.

    Args:
        points: all runs of a size and M.
        best: of them.

    Raises:
        UserError: if the points have no batch.
    """
    losses = losses_beside(points, best, "batch_tokens")
    batches, batch = list(losses), best.settings["batch_tokens"]
    if batch not in losses or batch in (batches[0], batches[-1]):
        return batch
    index = batches.index(batch)
    around = batches[index - 1 : index + 2]
    octaves = np.log2(around)
    curvature, slope, _ = np.polyfit(octaves, [losses[tokens] for tokens in around], 2)
    if curvature <= 0:
        return batch
    return float(2.0 ** np.clip(-slope / (2 * curvature), octaves[0], octaves[-1]))
