"""Comparisons of rows, seed by seed."""

import pytest

from diloco.experiments.papers.comparison import Change, at_best, change


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
    best = at_best(rows, "rate", "method")
    assert [(row["method"], row["rate"], row["seed"]) for row in best] == [
        ("a", 2, 0),
        ("a", 2, 1),
        ("b", 1, 0),
        ("b", 1, 1),
    ]
    assert {row["rate"] for row in at_best(rows, "rate")} == {1}, "of all methods together"
