"""Figures of experiments, of laws and of simulated runs: what their curves, points and bars must show."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.experiments.papers.made_up import made_up
from tests.scaling.test_prediction import SIZES, sweep

from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.experiment import Panel
from diloco.experiments.papers.experiment import Point as CurvePoint
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import read_rows
from diloco.report.figures.drawing import draw_experiment, draw_panel, new_figure
from diloco.report.figures.laws import (
    FIGURES as OF_LAWS,
)
from diloco.report.figures.laws import (
    _can_draw,
    best_outer_learning_rate,
    difference_to_data_parallel,
    draw_laws,
    loss_over_batch,
    loss_over_outer_learning_rate,
    loss_over_params,
)
from diloco.report.figures.simulator import (
    FIGURES as SIMULATED,
)
from diloco.report.figures.simulator import (
    fragment_bandwidth,
    fragment_patterns,
    fragments,
    schedules,
    step_seconds,
    wall_clock,
)
from diloco.scaling.judgement import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.laws import Laws
from diloco.scaling.table import PUBLISHED_PARAMS, Point, published_table
from diloco.simulator.description import GBIT_S

pytest.importorskip("matplotlib")


def axes_of(name):
    one = experiment(name, TIERS["small"]())
    rows = made_up(one)
    axes = draw_experiment(one, rows).axes
    assert len(axes) == len(one.panels(rows))
    return axes


def test_names_are_ticks():
    ours, *_ = axes_of("compression")
    assert [tick.get_text() for tick in ours.get_xticklabels()][:2] == ["fp32", "bf16"]


def test_many_panels_stand_in_rows_of_four():
    places = [axes.get_subplotspec() for axes in axes_of("batch_size")]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        divmod(index, 4) for index in range(len(places))
    ]
    assert len(places) > 4


@pytest.mark.parametrize(("low", "high"), [(5e6, 9e6), (0.5, 90), (1e17, 1e21)])
def test_ticks_of_a_logarithmic_axis_do_not_overlap(low, high):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(4.6, 3.9)
    axes = figure.subplots()
    curve = [CurvePoint(x, 1.0, 0.9, 1.1) for x in (low, high)]
    draw_panel(Panel(title="", x_label="tokens", curves={"ours": curve}, x_log=True), axes)
    FigureCanvasAgg(figure).draw()
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    left, right = axes.bbox.x0 - 1, axes.bbox.x1 + 1
    boxes = [text.get_window_extent() for text in labels if text.get_text()]
    spans = sorted((box.x0, box.x1) for box in boxes if left < (box.x0 + box.x1) / 2 < right)
    assert len(spans) > 1
    assert all(end < begin for (_, end), (begin, _) in pairwise(spans))


TABLES = Path(__file__).parents[2] / "docs" / "results" / "experiments"


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if (TABLES / f"{name}.csv").exists()])
def test_a_stored_table_has_a_figure_and_a_finding(name):
    one = experiment(name, TIERS["small"]())
    rows = read_rows(TABLES / f"{name}.csv")
    curves = [panel for panel in one.panels(rows) if panel.curves and not panel.published]
    assert curves and one.finding(rows).measured != "no run"


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
        return [name for name in OF_LAWS if _can_draw(name, Laws(points))]

    bare = [Point(n, m, 2.0 + m - n / 1e7) for n in (1e6, 2e6) for m in (1, 2)]
    assert names(bare) == ["loss_over_params"]
    assert names(None) == ["loss_over_params", "difference_to_data_parallel"]
    assert names(sweep()) == list(OF_LAWS)
    assert {path.stem for path in draw_laws(Laws(), tmp_path)} == {*names(None)}
    assert all(axes.get_lines() for axes in loss_over_outer_learning_rate(Laws(sweep())).axes)


@pytest.mark.parametrize("name", SIMULATED)
def test_every_figure_shows_something_in_each_panel(name):
    assert all(axes.get_lines() or axes.patches for axes in SIMULATED[name]().axes)


def curves(axes) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def test_longer_steps_need_less_bandwidth():
    panels = step_seconds().axes
    assert [axes.get_title() for axes in panels] == ["100B, 1 s a step", "100B, 5 s a step", "100B, 10 s a step"]
    for method in curves(panels[0]):
        for shorter, longer in zip(*(curves(panels[i])[method] for i in (0, 2)), strict=True):
            assert longer >= shorter - 1e-9
    streaming = curves(panels[1])["streaming_overlapped_fp4"]
    assert streaming[next(i for i, gbit_s in enumerate(GBIT_S) if gbit_s > 4)] > 0.99


def test_strided_fragments_overlap_better_than_sequential_ones():
    for axes in fragments().axes:
        strided, sequential = curves(axes).values()
        assert list(curves(axes)) == ["strided", "sequential"] and sum(strided) > sum(sequential)


def test_smaller_fragments_need_less_bandwidth_down_to_the_average_traffic():
    for axes in fragment_bandwidth().axes:
        payload, strided, _ = curves(axes).values()
        assert payload[-1] == strided[-1] == 1 and payload[0] < 0.05
        assert strided == sorted(strided) and payload[0] < strided[0] < 0.2


def test_a_pattern_shows_each_layer_once_a_round():
    for axes, first in zip(fragment_patterns().axes, ([0, 1, 2], [0, 3, 6]), strict=True):
        bars = [(bar.get_x(), round(bar.get_y() + bar.get_height() / 2)) for bar in axes.patches]
        assert sorted(layer for _, layer in bars) == sorted([*range(10)] * 2)
        assert [layer for sync, layer in bars if sync == 0] == first


def test_each_method_has_its_schedule():
    """Data-Parallel reduces two layers at each of 4 steps, DiLoCo at every second, Streaming one layer a step."""
    figure = schedules()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "data_parallel",
        "diloco",
        "streaming",
        "streaming_overlapped",
    ]
    exchanges = [len([bar for bar in axes.patches if bar.get_y() > 0.5]) for axes in figure.axes]
    assert exchanges == [8, 4, 4, 4]


def test_wall_clock_goes_on_to_the_losses_at_10b():
    for axes in wall_clock().axes:
        baseline, *_, eight = axes.get_lines()
        losses, of_eight = (np.asarray(line.get_ydata()).tolist() for line in (baseline, eight))
        assert losses[-2:] == list(EXTRAPOLATED["independent", 0]) == [2.224, 2.09]
        assert len(losses) == 9 and len(of_eight) == 7, "of M = 8 there are none"
