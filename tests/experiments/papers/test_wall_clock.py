"""Losses over the idealized wall-clock: by the paper's equations, in the order of the networks."""

import pytest

from diloco.experiments.papers.wall_clock import wall_clock_panels

N, STEPS, BATCH = 3e9, 1000, 2**20
ROWS = [
    {
        "method": method,
        "seed": 0,
        "eval_loss": 2.0,
        "num_params": N,
        "num_tokens": STEPS * BATCH,
        "num_steps": STEPS,
    }
    for method in ("Data-Parallel", "DiLoCo, M=2")
]


def test_a_run_takes_the_time_of_its_compute_and_its_all_reduces():
    panels = wall_clock_panels(
        ROWS, lambda row: row["method"], lambda row: 2 * (row["method"] != "Data-Parallel"), lambda _: 10
    )
    assert [panel.title.split()[0] for panel in panels] == ["10", "100", "400"], "the slowest first"
    chips = 63  # 6·N·B/Q = 62.9 chip seconds a step
    compute = 6 * N * BATCH / 300e12 / chips
    outer = 2 * N * 16 / 10e9 * (1 - 1 / chips) + 1e-2
    inner = 2 * N * 16 / 400e9 * (1 - 2 / chips) + 1e-4
    (baseline,), (ours,) = (panels[0].curves[row["method"]] for row in ROWS)
    assert baseline.x == pytest.approx(STEPS * (compute + outer))
    assert ours.x == pytest.approx(STEPS * (compute + inner + outer / 10))
    assert baseline.mean == 2.0
