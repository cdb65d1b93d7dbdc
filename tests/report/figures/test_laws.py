"""Figures of laws: their points, and the columns that they need."""

import pytest
from tests.scaling.test_prediction import SIZES, sweep

from diloco.report.figures.laws import (
    FIGURES,
    _can_draw,
    best_outer_learning_rate,
    difference_to_data_parallel,
    draw_laws,
    loss_over_batch,
    loss_over_params,
)
from diloco.scaling.judgement import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.laws import Laws
from diloco.scaling.table import PUBLISHED_PARAMS, Point, published_table


def drawn(figure) -> dict[str, list[tuple[float, float]]]:
    """The points of each curve in the first panel's legend, by its label."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lines = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
    return {
        label: list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for label, line in zip(labels, lines, strict=True)
    }


def test_published_losses_are_drawn_with_their_laws_and_the_losses_measured_later():
    figure = loss_over_params(Laws())
    assert drawn(figure)["DiLoCo, M = 2"] == [
        (p.params, p.eval_loss) for p in published_table() if p.replicas == 2
    ]
    lines = figure.axes[0].lines
    later = [list(line.get_ydata()) for line in lines if tuple(line.get_xdata()) == EXTRAPOLATED_PARAMS]
    assert later == [list(losses) for losses in EXTRAPOLATED.values()]
    gaps = drawn(difference_to_data_parallel(Laws()))
    assert gaps["DiLoCo, M = 8"][0] == (PUBLISHED_PARAMS["35M"], pytest.approx(100 * (3.621 / 3.485 - 1)))
    assert list(gaps) == ["DiLoCo, M = 1", "DiLoCo, M = 2", "DiLoCo, M = 4", "DiLoCo, M = 8"]


def test_a_batch_is_drawn_at_one_outer_learning_rate_and_the_best_of_those_over_size():
    batches = drawn(loss_over_batch(Laws(sweep())))
    losses = [loss for _, loss in batches["DiLoCo, M = 1"]]
    assert losses[1] - losses[0] == pytest.approx(0.02 * (0.2**2 - 1.2**2))
    best = drawn(best_outer_learning_rate(Laws(sweep())))
    assert best["DiLoCo, M = 4"] == [(size, 0.8) for size in SIZES]


def test_figures_are_those_that_the_table_has_the_columns_for(tmp_path):
    def names(points) -> list[str]:
        return [name for name in FIGURES if _can_draw(name, Laws(points))]

    bare = [Point(n, m, 2.0 + m - n / 1e7) for n in (1e6, 2e6) for m in (1, 2)]
    assert names(bare) == ["loss_over_params"]
    assert names(None) == ["loss_over_params", "difference_to_data_parallel"]
    assert {path.stem for path in draw_laws(Laws(sweep()), tmp_path)} == set(FIGURES)
