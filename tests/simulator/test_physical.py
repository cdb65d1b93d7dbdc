from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.cases import models

from diloco.errors import UserError
from diloco.presets import METHODS
from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica, Stragglers


@given(models(METHODS))
def test_more_bandwidth_never_makes_a_run_slower(model):
    assert (np.diff(model.compute_utilization(GBIT_S)) >= -1e-9).all()
    assert (np.diff(model.compute_utilization(GBIT_S, num_steps=30)) >= -1e-9).all()


@given(models(), st.integers(0, 3), st.integers(1, 4))
def test_more_overlap_never_makes_a_run_slower(model, replica, more):
    settings, replica = model.settings, replica % len(model.replicas)
    overlaps = list(settings.overlap_steps)
    overlaps[replica] = min(overlaps[replica] + more, settings.sync_every - 1)
    longer = replace(model, settings=replace(settings, overlap_steps=tuple(overlaps)))
    for num_steps in (None, 30):
        before = model.compute_utilization(GBIT_S, num_steps=num_steps)
        assert (longer.compute_utilization(GBIT_S, num_steps=num_steps) >= before - 1e-9).all()


@given(models())
def test_fewer_bits_never_make_a_run_slower(model):
    wires = ("fp32", "int8", "e3m0", "int2")
    by_wire = [replace(model, wire=wire).compute_utilization(GBIT_S) for wire in wires]
    assert all((coarse >= fine - 1e-9).all() for fine, coarse in pairwise(by_wire))


@given(models(), st.integers(0, 3), st.floats(1, 3))
def test_a_slower_replica_never_makes_a_run_faster(model, replica, factor):
    compute_SxM = np.array([[r.step_seconds for r in model.replicas]] * 30)
    slower_SxM = compute_SxM.copy()
    slower_SxM[:, replica % len(model.replicas)] *= factor
    slower = model.run_seconds(GBIT_S, slower_SxM)
    assert (slower >= model.run_seconds(GBIT_S, compute_SxM) * (1 - 1e-12)).all()


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


def test_parameters_outside_the_blocks_are_the_last_fragment():
    size = ModelSize(num_params=1.2e9, num_layers=24, width=2048)
    model = PhysicalModel(
        settings=MethodSettings(method="streaming"), size=size, replicas=[Replica(step_seconds=1)] * 2
    )
    assert len(model.fragment_params) == 9 == model.schedule.num_fragments
    assert model.fragment_params[-1] == 32_000 * 2048
    assert sum(model.fragment_params) == pytest.approx(1.2e9)


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"replicas": []}, "num_replicas must be from 1 to 256, not 0", "num_replicas"),
        ({"combine": "broadcast"}, "combine='broadcast' is neither gather nor reduce_scatter", "combine"),
        (
            {"settings": MethodSettings(method="data_parallel"), "combine": "reduce_scatter"},
            "leave it out",
            "combine",
        ),
        ({"settings": MethodSettings(method="data_parallel"), "wire": "e3m0"}, "take fp32, bf16 or fp16", "wire"),
        (
            {"settings": MethodSettings(method="streaming_overlapped", overlap_steps=(1, 2, 3))},
            r"overlap_steps=\(1, 2, 3\) must hold one number for each of 2 replicas",
            "overlap_steps",
        ),
    ],
)
def test_contradictions_are_refused(changes, message, field):
    fields = {
        "settings": MethodSettings(method="streaming_overlapped"),
        "size": ModelSize(num_params=1e9, num_layers=6),
        "replicas": [Replica(step_seconds=0.1)] * 2,
    }
    with pytest.raises(UserError, match=message) as refusal:
        PhysicalModel(**(fields | changes))
    assert refusal.value.field == field
