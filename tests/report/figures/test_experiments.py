"""Figures of experiments: ours beside the paper's, with labels that a reader understands."""

from itertools import pairwise

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.experiment import Panel, Point
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import read_rows
from diloco.report.figures.drawing import draw_experiment, draw_panel, new_figure

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


@pytest.mark.parametrize(("low", "high"), [(2e6, 1.6e7), (5e6, 9e6), (0.5, 90), (1e17, 1e21), (1e3, 2e4)])
def test_ticks_of_a_logarithmic_axis_do_not_overlap(low, high):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(4.6, 3.9)
    axes = figure.subplots()
    curve = [Point(x, 1.0, 0.9, 1.1) for x in (low, high)]
    draw_panel(Panel(title="", x_label="tokens", curves={"ours": curve}, x_log=True), axes)
    FigureCanvasAgg(figure).draw()
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    left, right = axes.bbox.x0 - 1, axes.bbox.x1 + 1
    boxes = [text.get_window_extent() for text in labels if text.get_text()]
    spans = sorted((box.x0, box.x1) for box in boxes if left < (box.x0 + box.x1) / 2 < right)
    assert len(spans) > 1
    assert all(end < begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_stored_table_has_a_figure_and_a_finding(name, pytestconfig):
    one = experiment(name, TIERS["small"]())
    rows = read_rows(pytestconfig.rootpath / "docs" / "results" / "experiments" / f"{name}.csv")
    curves = [panel for panel in one.panels(rows) if panel.curves and not panel.published]
    assert curves and one.finding(rows).measured != "no run"
