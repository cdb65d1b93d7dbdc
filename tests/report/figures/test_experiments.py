"""Figures of experiments: ours beside the paper's, with labels that a reader understands."""

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.experiments.papers.recipes import experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.report.figures.experiments import draw_experiment

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("name", "labels"),
    [("scaling", ["Data-Parallel", "DiLoCo", "Streaming"]), ("compression", None)],
)
def test_curves_are_labelled_and_names_are_ticks(name, labels):
    one = experiment(name, TIERS["small"]())
    ours, *theirs = draw_experiment(one, made_up(one)).axes
    if labels is None:
        assert [tick.get_text() for tick in ours.get_xticklabels()][:2] == ["fp32", "bf16"]
    else:
        for axes in (ours, theirs[0]):
            assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
