import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.cases import events, models
from tests.simulator.reference import OneLane

from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica


@given(models(), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0.5, 500))
def test_a_run_equals_its_simulation_event_by_event(model, num_steps, seed, gbit_s):
    compute_SxM = np.random.default_rng(seed).gamma(2, 0.5, (num_steps, len(model.replicas)))
    expected = events(model, compute_SxM, gbit_s).run()
    np.testing.assert_allclose(model.run_seconds([gbit_s, 1e9], compute_SxM)[0], expected, rtol=1e-9)


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
        (32, 1, 25, 20, 0.01, 0.3, 2),
        (32, 2, 17, 13, 0.1, 6.0, 2),
        (17, 1, 17, 12, 0.1, 3.0, 3),
        (24, 3, 100, 5, 0.1, 0.5, 3),
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
    run = model.start(gbit_s)
    run.advance(np.full((24 * cycle, num_replicas), step_seconds))
    before = run.ready_BxM[:, 0]
    run.advance(np.full((24 * cycle, num_replicas), step_seconds))
    expected = 24 * cycle * step_seconds / (run.ready_BxM[:, 0] - before)
    np.testing.assert_allclose(model.compute_utilization(gbit_s), expected, rtol=1e-9)


def test_reduce_scatter_is_a_little_faster_than_first_come_first_served():
    """A lane's phases share it without waiting, the most that a lane can do: the error has a bound and a sign."""
    generator, differences = np.random.default_rng(0), []
    for _ in range(60):
        num_replicas, sync_every = int(generator.integers(2, 6)), int(generator.integers(4, 40))
        model = PhysicalModel(
            settings=MethodSettings(
                method="streaming_overlapped",
                sync_every=sync_every,
                layers_per_fragment=int(generator.integers(1, 4)),
                overlap_steps=(int(generator.integers(0, min(sync_every, 12))),) * num_replicas,
            ),
            size=ModelSize(num_params=7e9, num_layers=int(generator.integers(4, 13))),
            replicas=[
                Replica(step_seconds=step, latency_seconds=generator.uniform(0, 2))
                for step in generator.uniform(0.5, 1.5, num_replicas)
            ],
            wire="e3m0",
            combine="reduce_scatter",
        )
        compute_SxM, gbit_s = np.ones((120, num_replicas)), 10 ** generator.uniform(-1, 2)
        ours = model.run_seconds([gbit_s], compute_SxM)[0]
        theirs = events(model, compute_SxM, gbit_s, OneLane).run()
        differences.append(120 / ours - 120 / theirs)
    assert min(differences) >= -1e-9
    assert np.mean(differences) < 0.01 and np.quantile(differences, 0.95) < 0.05
