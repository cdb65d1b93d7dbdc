from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.cases import events, models

from diloco.presets import METHODS
from diloco.simulator.description import MethodSettings, ModelSize, Replica, Stragglers
from diloco.simulator.physical import PhysicalModel, PhysicalRun
from diloco.simulator.steady import growth_rate


def test_a_replica_alone_never_waits():
    for method in METHODS:
        model = PhysicalModel(
            settings=MethodSettings(method=method),
            size=ModelSize(num_params=1e9, num_layers=6),
            replicas=[Replica(step_seconds=0.1, latency_seconds=9)],
        )
        np.testing.assert_allclose(model.compute_utilization([0.1, 10]), 1)
        assert model.bytes_sent_per_sync == 0


def test_diloco_equals_the_sum_of_its_parts():
    """H steps, then a payload to each of two others, at half of the link's rate each, and its latency."""
    model = PhysicalModel(
        settings=MethodSettings(method="diloco", sync_every=10),
        size=ModelSize(num_params=1e9, num_layers=6),
        replicas=[Replica(step_seconds=0.5, latency_seconds=0.25)] * 3,
        wire="bf16",
    )
    np.testing.assert_allclose(model.compute_utilization([8.0]), 5 / (5 + 2 * 16 / 8 + 0.25))
    assert model.bytes_sent_per_sync == 2 * 2e9
    shared = replace(model, combine="reduce_scatter:fp32")
    np.testing.assert_allclose(shared.compute_utilization([8.0]), 5 / (5 + 2 * (16 / 3 + 32 / 3) / 8 + 2 * 0.25))
    assert shared.bytes_sent_per_sync == pytest.approx(2 / 3 * (2e9 + 4e9))


def test_stragglers_slow_all_replicas_down():
    model = PhysicalModel(
        settings=MethodSettings(method="diloco", sync_every=5),
        size=ModelSize(num_params=1e6, num_layers=6, width=64, vocab_size=100),
        replicas=[Replica(step_seconds=1.0)] * 8,
    )
    some = Stragglers(step_variation=0.3), Stragglers(stall_probability=0.01, stall_seconds=5)
    uneven = [replace(model, stragglers=stragglers).compute_utilization([1e3])[0] for stragglers in some]
    assert model.compute_utilization([1e3])[0] > 0.999 and max(uneven) < 0.9


@given(models(), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0.5, 500))
def test_a_run_equals_its_simulation_event_by_event(model, num_steps, seed, gbit_s):
    compute_SxM = np.random.default_rng(seed).gamma(2, 0.5, (num_steps, len(model.replicas)))
    expected = events(model, compute_SxM, gbit_s).run()
    np.testing.assert_allclose(model.run_seconds([gbit_s, 1e9], compute_SxM)[0], expected, rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=30)
@given(models(), st.floats(0.5, 500))
def test_the_steady_state_is_the_rate_of_a_long_run(model, gbit_s):
    compute_SxM = np.array([[replica.step_seconds for replica in model.replicas]] * 2000)
    steps = 1500 // model.settings.sync_every * model.settings.sync_every
    seconds = model.run_seconds([gbit_s], compute_SxM) - model.run_seconds([gbit_s], compute_SxM[steps:])
    expected = steps * compute_SxM[0].mean() / seconds
    np.testing.assert_allclose(model.compute_utilization([gbit_s]), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("num_layers", "layers_per_fragment", "sync_every", "overlap", "step_seconds", "latency", "num_replicas"),
    [
        (32, 2, 17, 13, 0.1, 6.0, 2),
        (17, 1, 17, 12, 0.1, 3.0, 3),
    ],
)
@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_the_steady_state_is_exact_when_latency_rules(
    num_layers, layers_per_fragment, sync_every, overlap, step_seconds, latency, num_replicas, combine
):
    """Training then waits for every k-th sync, and k syncs are not a whole number of periods."""
    model = PhysicalModel(
        settings=MethodSettings(
            method="streaming_overlapped",
            sync_every=sync_every,
            layers_per_fragment=layers_per_fragment,
            overlap_steps=overlap,
        ),
        size=ModelSize(num_params=1e8, num_layers=num_layers),
        replicas=[Replica(step_seconds=step_seconds, latency_seconds=latency)] * num_replicas,
        wire="e3m0",
        combine=combine,
    )
    gbit_s = [0.3, 1.0, 30.0, 1000.0]
    cycle = sync_every * (overlap + 1)
    run = PhysicalRun(model, gbit_s)
    run.advance(np.full((8 * cycle, num_replicas), step_seconds))
    before = run.ready_BxM[:, 0]
    run.advance(np.full((24 * cycle, num_replicas), step_seconds))
    expected = 24 * cycle * step_seconds / (run.ready_BxM[:, 0] - before)
    np.testing.assert_allclose(model.compute_utilization(gbit_s), expected, rtol=1e-9)


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_a_step_ends_with_the_last_of_its_all_reduces(num_replicas):
    """Each layer's all-reduce begins when the slowest replica has its gradients and the link is free."""
    num_layers, steps, gbit_s = 4, [1.0] * (num_replicas - 1) + [1.5], 10.0
    model = PhysicalModel(
        settings=MethodSettings(method="data_parallel"),
        size=ModelSize(num_params=1e9, num_layers=num_layers, width=2048, vocab_size=50_000),
        replicas=[Replica(step_seconds=s, latency_seconds=0.01) for s in steps],
        wire="bf16",
    )
    link = 0.0
    for layer in range(num_layers, 0, -1):
        nodes = num_layers + 2 * (num_layers - layer + 1) - (layer == 1)
        link = max(link, 1.5 * nodes / (3 * num_layers - 1))
        link += 2 * (num_replicas - 1) / num_replicas * 16 * model.size.block_params / 1e10
    link = max(link, 1.5) + 2 * (num_replicas - 1) / num_replicas * 16 * 50_000 * 2048 / 1e10
    link += 2 * (num_replicas - 1) * 0.01
    expected = np.mean(steps) / link
    np.testing.assert_allclose(model.compute_utilization([gbit_s]), expected)
    np.testing.assert_allclose(model.compute_utilization([gbit_s], num_steps=2500), expected)


SECONDS = st.floats(0, 10)


@given(st.lists(st.lists(SECONDS, min_size=9, max_size=9), min_size=1, max_size=3), st.lists(SECONDS, min_size=3))
def test_the_rate_of_a_max_plus_matrix_is_its_largest_cycle_mean(matrices, start):
    a_BxSxS = np.array(matrices).reshape(-1, 3, 3)

    def period(x_SxB):
        return (a_BxSxS + x_SxB.T[:, None, :]).max(2).T

    cycles = [cycle for length in (1, 2, 3) for cycle in permutations(range(3), length)]
    means = [
        [np.mean([a_SxS[i, j] for i, j in zip(cycle, (*cycle[1:], cycle[0]), strict=True)]) for cycle in cycles]
        for a_SxS in a_BxSxS
    ]
    start_SxB = np.repeat(np.array(start[:3])[:, None], len(matrices), axis=1)
    rate_B = growth_rate(period, start_SxB, longest_cycle=6)
    np.testing.assert_allclose(rate_B, np.max(means, axis=1), rtol=1e-9, atol=1e-9)
