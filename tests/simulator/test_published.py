import math

import numpy as np

from diloco.simulator.published import (
    OVERTRAINING_COSTS,
    WALL_CLOCK_HOURS,
    Cell,
    bandwidth_tables,
    overtraining_table,
    wall_clock_table,
)


def test_the_published_bandwidths_are_reproduced_to_a_point_of_the_grid():
    """Exact cells, and those that are one point off, of each file of shared/published."""
    first, second = bandwidth_tables().values()
    small, large = (
        {key: row for key, row in first.items() if (key[0] == "100B") == is_large} for is_large in (0, 1)
    )
    counts = []
    for table in (small, large, second):
        distances = [abs(cell.distance) for row in table.values() for cell in row]
        counts.append((len(distances), distances.count(0), distances.count(1)))
    assert counts == [(50, 48, 2), (25, 24, 1), (90, 88, 2)]


def test_a_distance_counts_points_of_the_grid_and_one_more_beyond_them():
    grid = np.logspace(-1, 3, 50).tolist()
    assert Cell(104.8, grid[37]).distance == 0 and Cell(104.8, grid[36]).distance == -1
    assert Cell(math.inf, None).distance == 0 and Cell(math.inf, grid[49]).distance == -1


def test_the_published_wall_clock_is_reproduced_except_for_data_parallel():
    ours = wall_clock_table()
    for method in ("diloco", "streaming_overlapped_fp4"):
        np.testing.assert_allclose(ours[method], WALL_CLOCK_HOURS[method], rtol=0.1)
    assert max(np.abs(np.divide(ours["data_parallel"], WALL_CLOCK_HOURS["data_parallel"]) - 1)) > 0.3


def test_the_published_costs_of_overtraining_are_reproduced():
    """Payloads to the digits that are printed, hours within 6 %."""
    for run, ours in overtraining_table().items():
        published = OVERTRAINING_COSTS[run]
        is_printed_whole = published.tebibits > 100
        assert published.tebibits == (int(ours.tebibits) if is_printed_whole else round(ours.tebibits, 2))
        np.testing.assert_allclose(ours[:2], published[:2], rtol=0.06)
