"""Figures of simulated runs: what their curves and bars must show."""

import pytest

from diloco.report.figures.simulator import (
    FIGURES,
    fragment_bandwidth,
    fragment_patterns,
    fragments,
    schedules,
    step_seconds,
)
from diloco.simulator.bandwidth import GBIT_S

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_shows_something_in_each_panel(name):
    assert all(axes.get_lines() or axes.patches for axes in FIGURES[name]().axes)


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
