"""The learning rate by which a grid is extended, of losses that are known."""

import pytest
from benchmarks.training_runs import rate_beyond_edge


@pytest.mark.parametrize(
    ("losses", "expected"),
    [((1.1, 1.2, 1.3), 0.000707), ((1.3, 1.2, 1.1), 0.00283), ((1.2, 1.1, 1.3), None), ((1.2,), None)],
    ids=["lowest", "highest", "between", "one"],
)
def test_a_best_rate_on_an_edge_has_a_neighbour_to_try(losses: tuple[float, ...], expected: float | None):
    rows = [
        {"variant": "streaming", "learning_rate": rate, "eval_loss": loss}
        for rate, loss in zip((0.001, 0.00141, 0.002), losses, strict=False)
    ]
    other = {"variant": "data_parallel", "learning_rate": 0.0005, "eval_loss": 1.0}
    assert rate_beyond_edge([*rows, other], "streaming") == expected
