import numpy as np
import pytest

from diloco.presets import METHODS
from diloco.simulator.description import (
    GBIT_S,
    MethodSettings,
    ModelSize,
    Replica,
    Stragglers,
    needed_gbit_s,
    replicas_of,
)


@pytest.mark.parametrize("fragments", ["strided", "sequential"])
@pytest.mark.parametrize("num_layers", [6, 7, 61])
def test_fragments_partition_the_layers(fragments, num_layers):
    cut = MethodSettings(method="streaming", fragments=fragments).layers(num_layers)
    assert sorted(layer for layers in cut for layer in layers) == list(range(num_layers))
    assert len(cut) == -(-num_layers // 3) and max(map(len, cut)) == 3
    assert {layers.step for layers in cut} == ({len(cut)} if fragments == "strided" else {1})


def test_a_method_without_streaming_has_one_fragment():
    streams = {method: MethodSettings(method=method).layers(7) != (range(7),) for method in METHODS}
    assert list(streams.values()) == [False, False, True, True, True]


def test_a_method_has_the_overlap_of_its_preset_unless_it_is_set():
    overlaps = [MethodSettings(method=method).schedule(2).overlap_steps for method in METHODS]
    assert overlaps == [0, 0, 0, 1, 1]
    for method in METHODS[1:]:
        assert MethodSettings(method=method, overlap_steps=(0, 2)).schedule(2).overlap_steps == (0, 2)


@pytest.mark.parametrize("untied", [True, False])
def test_the_width_follows_from_the_number_of_parameters(untied):
    size = ModelSize(num_params=7e9, num_layers=32, untied_embeddings=untied)
    matrices = 2 if untied else 1
    width = size.outside_params / 32_000 / matrices
    assert 12 * 32 * width**2 + matrices * 32_000 * width == pytest.approx(7e9)
    assert 32 * size.block_params + size.outside_params == pytest.approx(7e9)


def test_there_are_as_many_replicas_as_numbers():
    assert len(replicas_of(None, (0.1,), (0.0,), (None,))) == 2
    assert len(replicas_of(None, (0.1,), (0.0,), (None,), least=3)) == 3
    first, second = replicas_of(2, (0.1,), (0.0, 0.5), (1.0,))
    assert first == Replica(step_seconds=0.1, gbit_s=1.0)
    assert second == Replica(step_seconds=0.1, gbit_s=1.0, latency_seconds=0.5)


def test_compute_times_are_drawn_around_their_average():
    drawn = Stragglers(step_variation=0.5).draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(2, rel=0.01) and drawn.std() == pytest.approx(1, rel=0.02)
    stalls = Stragglers(stall_probability=0.1, stall_seconds=3)
    stalled = stalls.draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert set(stalled) == {2.0, 5.0} and stalled.mean() == pytest.approx(2.3, rel=0.01)


def test_the_needed_bandwidth_is_the_first_of_the_grid_that_reaches_the_target():
    utilization = np.linspace(0, 0.98, 50)
    assert needed_gbit_s(utilization, 0.5) == GBIT_S[25]
    assert needed_gbit_s(utilization, 0.98) == GBIT_S[49] == 1000
    assert needed_gbit_s(utilization, 0.99) is None
