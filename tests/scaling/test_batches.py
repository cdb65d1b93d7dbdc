"""The best batch beside those that fewer seeds have tried; on tables: test_prediction.py."""

from dataclasses import replace

from diloco.scaling.batches import best_batch
from diloco.scaling.table import Point


def test_a_batch_that_fewer_seeds_have_tried_does_not_move_the_best():
    tried = {16: (3.05, 1), 17: (3.00, 3), 18: (2.98, 1)}
    points = [
        Point(35e6, 2, loss, {"batch_tokens": 2.0**octave}, num_seeds=num_seeds)
        for octave, (loss, num_seeds) in tried.items()
    ]
    assert best_batch(points, points[1]) == 2.0**17
    everywhere = [replace(point, num_seeds=3) for point in points]
    assert best_batch(everywhere, everywhere[1]) > 2.0**17
