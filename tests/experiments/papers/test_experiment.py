"""The curves of rows."""

from diloco.experiments.papers.experiment import curves


def test_a_point_is_the_mean_over_the_seeds_with_their_range():
    rows = [{"method": "diloco", "x": 1, "seed": seed, "eval_loss": loss} for seed, loss in enumerate((1.0, 2.0))]
    rows.append({"method": "diloco", "x": 2, "seed": 0, "failed": "lost"})
    assert curves(rows, "x", "method") == {"DiLoCo": [(1, 1.5, 1.0, 2.0)]}
