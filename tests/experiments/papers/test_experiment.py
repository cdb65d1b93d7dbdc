"""Comparisons of rows, seed by seed, and the curves and panels of rows."""

import pytest

from diloco.experiments.papers.comparison import Change, at_best, change
from diloco.experiments.papers.experiment import curves, wall_clock_panels


def test_seeds_are_compared_with_themselves():
    rows = [
        {"method": method, "seed": seed, "eval_loss": loss}
        for method, losses in {"a": (1.0, 2.0), "b": (1.1, 2.2)}.items()
        for seed, loss in enumerate(losses)
    ]
    tenth = change(rows, {"method": "b"}, {"method": "a"})
    assert tenth.by_seed == pytest.approx({0: 0.1, 1: 0.1})
    assert (tenth.within(0.11), tenth.within(0.09), tenth.rises()) == ("agrees", "disagrees", "agrees")
    assert (tenth.rises(0.2), Change({0: 0.3, 1: 0.05}).rises()) == ("disagrees", "cannot tell")
    steeper = Change({0: 0.3, 1: 0.2})
    assert steeper.rises_over(tenth) == "agrees" and tenth.rises_over(tenth) == "cannot tell"
    assert steeper.rises_over(Change({0: 0.4, 1: 0.29})) == "disagrees"
    assert steeper.rises_over(Change({1: 0.29})) == "cannot tell", "one seed"
    assert (
        Change({0: 0.1, 1: -0.1}).rises() == Change({0: 0.1}).rises() == "cannot tell"
        and str(Change({})) == "no run"
    )


def test_the_best_value_is_that_of_the_lowest_mean_in_each_setting():
    losses = {("a", 1): (1.0, 3.0), ("a", 2): (1.9, 1.9), ("b", 1): (1.0, 1.0), ("b", 2): (0.5, 2.0)}
    rows = [
        {"method": method, "rate": rate, "seed": seed, "eval_loss": loss}
        for (method, rate), of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    rows.append({"method": "b", "rate": 3, "seed": 0, "failed": "diverged"})
    rows.append({"method": "b", "rate": 3, "seed": 1, "eval_loss": 0.1})  # lucky
    best = at_best(rows, "rate", "method")
    assert [(row["method"], row["rate"], row["seed"]) for row in best] == [
        ("a", 2, 0),
        ("a", 2, 1),
        ("b", 1, 0),
        ("b", 1, 1),
    ]
    assert {row["rate"] for row in at_best(rows, "rate")} == {1}, "of all methods together"


def test_a_point_is_the_mean_over_the_seeds_with_their_range():
    rows = [{"method": "diloco", "x": 1, "seed": seed, "eval_loss": loss} for seed, loss in enumerate((1.0, 2.0))]
    rows.append({"method": "diloco", "x": 2, "seed": 0, "failed": "lost"})
    assert curves(rows, "x", "method") == {"DiLoCo": [(1, 1.5, 1.0, 2.0)]}


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
    chips = 63  # 6·N·B/Q = 62.9 chip seconds per step
    compute = 6 * N * BATCH / 300e12 / chips
    outer = 2 * N * 16 / 10e9 * (1 - 1 / chips) + 1e-2
    inner = 2 * N * 16 / 400e9 * (1 - 2 / chips) + 1e-4
    (baseline,), (ours,) = (panels[0].curves[row["method"]] for row in ROWS)
    assert baseline.x == pytest.approx(STEPS * (compute + outer))
    assert ours.x == pytest.approx(STEPS * (compute + inner + outer / 10))
    assert baseline.mean == 2.0
