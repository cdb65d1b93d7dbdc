"""Figures of experiments: ours beside the paper's, with labels that a reader understands."""

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.experiments.papers.recipes import EXPERIMENTS, experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import read_rows
from diloco.report.figures.experiments import draw_experiment

pytest.importorskip("matplotlib")


def axes_of(name):
    one = experiment(name, TIERS["small"]())
    rows = made_up(one)
    axes = draw_experiment(one, rows).axes
    assert len(axes) == len(one.panels(rows))
    return axes


def test_curves_are_labelled():
    methods = ["Data-Parallel", "DiLoCo", "Streaming"]
    variants = [*methods, "Streaming, H=100", "Streaming, M=4", "Streaming, M=4, H=100"]
    for axes, labels in zip(axes_of("scaling"), (methods, variants, variants), strict=False):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == labels


def test_names_are_ticks():
    ours, *_ = axes_of("compression")
    assert [tick.get_text() for tick in ours.get_xticklabels()][:2] == ["fp32", "bf16"]


def test_many_panels_stand_in_rows_of_four():
    places = [axes.get_subplotspec() for axes in axes_of("batch_size")]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        divmod(index, 4) for index in range(len(places))
    ]
    assert len(places) > 4


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_stored_table_has_a_figure_and_a_finding(name, pytestconfig):
    one = experiment(name, TIERS["small"]())
    rows = read_rows(pytestconfig.rootpath / "docs" / "results" / "experiments" / f"{name}.csv")
    curves = [panel for panel in one.panels(rows) if panel.curves and not panel.published]
    assert curves and one.finding(rows).measured != "no run"
