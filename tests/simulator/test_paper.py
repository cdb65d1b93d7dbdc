import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.simulator.reference import paper_seconds

from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.methods import METHODS, MethodSettings
from diloco.simulator.paper import PaperModel
from diloco.simulator.published import (
    BANDWIDTHS,
    WALL_CLOCK_HOURS,
    bandwidth_table,
    wall_clock_table,
)


@st.composite
def models(draw) -> PaperModel:
    method, num_layers = draw(st.sampled_from(METHODS)), draw(st.integers(1, 9))
    sync_every = draw(st.integers(2, 12))
    overlaps = method.startswith("streaming_overlapped")
    settings = MethodSettings(
        method=method,
        sync_every=sync_every,
        layers_per_fragment=draw(st.integers(1, num_layers)),
        fragments=draw(st.sampled_from(["strided", "sequential"])),
        overlap_steps=draw(st.integers(0, sync_every - 1)) if overlaps else None,
    )
    try:
        return PaperModel(
            settings=settings, num_params=1e9, num_layers=num_layers, step_seconds=draw(st.floats(0.01, 2))
        )
    except ValueError as error:  # the period was rounded down to the overlap, or to nothing
        assert "overlap_steps=" in str(error) or "is too short for" in str(error)
        reject()


def by_hand(model: PaperModel, gbit_s: float, num_steps: int) -> float:
    cut = model.settings.layers(model.num_layers)

    def layers_at(step: int) -> list[int]:
        return [layer + 1 for sync in model.schedule.sent(step) for layer in cut[sync.fragment]]

    quarter = 4 if model.settings.method.endswith("fp4") else 1
    reduction = 13.4 / quarter * model.num_params / model.num_layers / (gbit_s * 1e9)
    seconds = paper_seconds(
        model.num_layers, model.step_seconds, reduction, layers_at, model.schedule.max_overlap, num_steps
    )
    return num_steps * model.step_seconds / seconds


@given(models(), st.integers(1, 40), st.lists(st.floats(0.5, 500), min_size=1, max_size=3))
def test_a_run_is_the_one_simulated_node_by_node(model, num_steps, gbit_s):
    expected = [by_hand(model, g, num_steps) for g in gbit_s]
    np.testing.assert_allclose(model.compute_utilization(gbit_s, num_steps=num_steps), expected, rtol=1e-9)


@given(models(), st.floats(0.5, 500))
def test_the_steady_state_is_what_a_long_run_goes_at(model, gbit_s):
    period = model.schedule.sync_every
    few, many = 1000 // period * period, 3000 // period * period
    seconds = [n / model.compute_utilization([gbit_s], num_steps=n) for n in (few, many)]
    expected = (many - few) / (seconds[1] - seconds[0])
    np.testing.assert_allclose(model.compute_utilization([gbit_s]), expected, rtol=1e-3)


def test_the_published_bandwidths_are_met():
    cells = [cell for row in bandwidth_table().values() for cell in row]
    assert len(cells) == 50
    assert sum(cell.distance == 0 for cell in cells) >= 48
    assert max(abs(cell.distance) for cell in cells) == 1


def test_the_published_wall_clock_is_met_but_for_data_parallel():
    ours = wall_clock_table()
    for method in ("diloco", "streaming_overlapped_fp4"):
        np.testing.assert_allclose(ours[method], WALL_CLOCK_HOURS[method], rtol=0.1)
    assert max(np.abs(np.divide(ours["data_parallel"], WALL_CLOCK_HOURS["data_parallel"]) - 1)) > 0.3


def test_the_published_figures_are_those_of_the_paper(pytestconfig):
    """A transcription is checked against another, where that is at hand."""
    source = pytestconfig.rootpath.parent / "shared" / "published" / "streaming_bandwidth.csv"
    if not source.exists():
        pytest.skip("the published tables are not beside the project")
    for line in source.read_text().splitlines()[3:]:
        size, _, _, method, *cells = line.split(",")
        assert BANDWIDTHS[size, method] == tuple(map(float, cells))


@pytest.mark.parametrize(("num_layers", "between"), [(24, 12), (48, 6), (108, 3)])
def test_a_fragment_is_sent_every_so_many_steps(num_layers, between):
    settings = MethodSettings(method="streaming")
    schedule = PaperModel(settings=settings, num_params=1e9, num_layers=num_layers, step_seconds=1).schedule
    sent = [step for step in range(1, 500) if schedule.sent(step)]
    assert set(np.diff(sent)) == {between}


def test_layers_that_the_fragment_size_does_not_divide_are_sent_all_the_same():
    cut = MethodSettings(method="streaming").layers(61)
    assert sorted(layer for layers in cut for layer in layers) == list(range(61))
    assert {len(layers) for layers in cut} == {2, 3}
    model = PaperModel(
        settings=MethodSettings(method="streaming_overlapped"), num_params=671e9, num_layers=61, step_seconds=20
    )
    assert (np.diff(model.compute_utilization(GBIT_S)) >= -1e-9).all()


def test_the_least_bandwidth_is_the_first_point_of_the_grid_that_is_enough():
    utilization = np.linspace(0, 0.98, 50)
    assert needed_gbit_s(utilization, 0.5) == GBIT_S[25]
    assert needed_gbit_s(utilization, 0.98) == GBIT_S[49] == 1000
    assert needed_gbit_s(utilization, 0.99) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": MethodSettings(method="streaming", layers_per_fragment=1, sync_every=2)},
            "sync_every=2 is too short for 6 fragments",
        ),
        ({"num_params": 0}, "num_params must be above 0 and finite, not 0"),
        ({"num_layers": -1}, "num_layers must be above 0 and finite, not -1"),
        ({"step_seconds": float("nan")}, "step_seconds must be above 0 and finite, not nan"),
        (
            {"settings": MethodSettings(method="streaming", layers_per_fragment=7)},
            "layers_per_fragment=7, but the",
        ),
        (
            {"settings": MethodSettings(method="streaming_overlapped", overlap_steps=(1, 2))},
            "one replica, and takes one overlap_steps",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    fields = {"settings": MethodSettings(method="diloco"), "num_params": 1e9, "num_layers": 6, "step_seconds": 0.1}
    with pytest.raises(ValueError, match=message):
        PaperModel(**(fields | changes))
