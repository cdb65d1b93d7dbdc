"""The best batch of each size, a parabola's minimum in log2(B), and the values tried beside a best one."""

from collections.abc import Sequence

import numpy as np

from diloco.errors import UserError
from diloco.scaling.table import Point


def losses_beside(points: Sequence[Point], best: Point, quantity: str) -> dict[float, float]:
    """The lowest loss at each value of a quantity that as many seeds have tried beside the best point, by value.

    The values are those tried at one outer learning rate: the best point's, if smaller and larger values were
    tried at it; otherwise the rate with the most values. Learning rates are those tried at the best batch.

    Args:
        points: all runs of a size and M.
        best: the best of them.
        quantity: learning_rate, batch_tokens or outer_learning_rate.

    Raises:
        UserError: if the points don't have the quantity.
    """
    if any(quantity not in point.settings for point in points):
        raise UserError(f"the best {quantity} needs the column {quantity} in every row of the table")
    points = [point for point in points if point.num_seeds >= best.num_seeds]
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
    tried = (_lowest(points, quantity) for points in by_rate.values())
    return max(tried, key=lambda losses: (len(losses), -min(losses.values())))


def _lowest(points: Sequence[Point], quantity: str) -> dict[float, float]:
    """The lowest loss at each value, of the settings that most seeds have tried: a single run may be lucky."""
    lowest: dict[float, Point] = {}
    for point in sorted(points, key=lambda point: (-point.num_seeds, point.eval_loss)):
        lowest.setdefault(point.settings[quantity], point)
    return {value: point.eval_loss for value, point in sorted(lowest.items())}


def is_on_edge(points: Sequence[Point], best: Point, quantity: str) -> bool:
    """True if the best value is the smallest or the largest tried: a better one may lie beyond."""
    value, tried = best.settings[quantity], losses_beside(points, best, quantity)
    return len({value, *tried}) > 1 and not min(tried) < value < max(tried)


def best_batch(points: Sequence[Point], best: Point) -> float:
    """The minimum, in tokens, of a parabola through the best run's batch and the two tried next to it.

    A sweep searches the learning rate at these batches only: losses further away lie above the valley. A best
    batch that is the smallest or the largest, or has no valley around it, is returned as it is.

    Args:
        points: all runs of a size and M.
        best: the best of them.

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
