from itertools import pairwise

import pytest

from diloco.simulator.description import MethodSettings, ModelSize, Replica
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.timeline import Interval, paper_timeline, physical_timeline

SETTINGS = MethodSettings(method="streaming_overlapped", sync_every=4, overlap_steps=1)
PAPER = PaperModel(settings=SETTINGS, num_params=1e9, num_layers=6, step_seconds=0.1)
PHYSICAL = PhysicalModel(
    settings=SETTINGS,
    size=ModelSize(num_params=1e9, num_layers=6),
    replicas=[Replica(step_seconds=0.1), Replica(step_seconds=0.13, latency_seconds=0.02)],
)
TIMELINES = {
    "paper": lambda gbit_s: paper_timeline(PAPER, gbit_s=gbit_s, num_steps=12),
    "physical": lambda gbit_s: physical_timeline(PHYSICAL, gbit_s=gbit_s, num_steps=12),
}


@pytest.mark.parametrize("kind", TIMELINES)
@pytest.mark.parametrize("gbit_s", [5.0, 60.0, 1000.0])
def test_a_lane_does_one_thing_at_a_time_and_all_steps_are_computed(kind, gbit_s):
    bars = TIMELINES[kind](gbit_s)
    lanes: dict[str, list[Interval]] = {}
    for bar in bars:
        assert bar.end_seconds > bar.start_seconds >= 0
        lanes.setdefault(bar.lane, []).append(bar)
    for lane in lanes.values():
        lane.sort(key=lambda bar: bar.start_seconds)
        assert all(a.end_seconds <= b.start_seconds + 1e-9 for a, b in pairwise(lane))
    for lane, step_seconds in {"replica 0": 0.1, "replica 1": 0.13}.items():
        if lane in lanes:
            busy = sum(bar.end_seconds - bar.start_seconds for bar in lanes[lane])
            assert busy == pytest.approx(12 * step_seconds)
            assert len(lanes[lane]) == 12 * (3 * 6 - 1)


@pytest.mark.parametrize("gbit_s", [5.0, 60.0])
def test_the_last_interval_ends_with_the_run(gbit_s):
    ends = {kind: max(bar.end_seconds for bar in draw(gbit_s)) for kind, draw in TIMELINES.items()}
    assert ends["paper"] == pytest.approx(12 * 0.1 / PAPER.compute_utilization([gbit_s], num_steps=12)[0])
    whole = 12 * 0.115 / PHYSICAL.compute_utilization([gbit_s], num_steps=12)[0]
    assert ends["physical"] == pytest.approx(whole, abs=0.011)  # the last payload's latency is not drawn


def test_each_layer_and_each_fragment_has_intervals_of_its_own():
    bars = TIMELINES["paper"](5.0)
    reductions = {bar.layers: bar.end_seconds for bar in bars if bar.kind == "exchange"}
    assert set(reductions) == {(layer,) for layer in range(6)}
    sent = [bar.layers for bar in TIMELINES["physical"](60.0) if bar.lane == "link 0"]
    assert sent[:3] == [(0, 2, 4), (1, 3, 5), (6,)]
