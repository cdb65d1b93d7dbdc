from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.reference import Events, OneLane

from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.methods import METHODS, MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica, Stragglers
from diloco.simulator.volume import bits_per_param

SECONDS = st.floats(0.05, 2)
WAYS = ("gather", "reduce_scatter", "reduce_scatter:bf16")


@st.composite
def models(draw, methods=METHODS[1:]) -> PhysicalModel:
    """Of small size, with everything that can differ between replicas."""
    num_replicas = draw(st.integers(1, 4))
    method, num_layers = draw(st.sampled_from(methods)), draw(st.integers(1, 6))
    sync_every = draw(st.integers(2, 9))
    overlap = st.integers(0, sync_every - 1)
    settings = MethodSettings(
        method=method,
        sync_every=sync_every,
        layers_per_fragment=draw(st.integers(1, num_layers)),
        overlap_steps=tuple(draw(overlap) for _ in range(num_replicas)) if "overlapped" in method else None,
    )
    reduces = method == "data_parallel"
    return PhysicalModel(
        settings=settings,
        size=ModelSize(num_params=1e9, num_layers=num_layers),
        replicas=[
            Replica(
                step_seconds=draw(SECONDS),
                gbit_s=draw(st.none() | st.floats(0.5, 100)),
                latency_seconds=draw(st.sampled_from([0.0, 0.1]) | st.floats(0, 3)),
            )
            for _ in range(num_replicas)
        ],
        wire=draw(st.sampled_from(["fp32", "bf16" if reduces else "e3m0"])),
        combine="gather"
        if reduces
        else draw(st.sampled_from(["gather", "reduce_scatter", "reduce_scatter:bf16"])),
    )


def events(model: PhysicalModel, compute: np.ndarray, gbit_s: float, kind: type[Events] = Events) -> Events:
    num_replicas, block = len(model.replicas), model.size.block_params
    sizes = [len(layers) * block for layers in model.settings.layers(model.size.num_layers)]
    sizes = [*sizes, model.size.outside_params] if model.settings.streams else [1e9]
    first = {"fp32": 32, "e3m0": 4 + 8 / 256}[model.wire]
    second = 16 if model.combine.endswith("bf16") else first

    def bits(fragment: int, phase: int) -> float:
        share = 1 if model.combine == "gather" else num_replicas
        return sizes[fragment] * (first, second)[phase] / share

    schedule = model.schedule
    return kind(
        compute.tolist(),
        lambda step: [sync.fragment for sync in schedule.sent(step)],
        bits,
        1 if model.combine == "gather" else 2,
        [replica.gbit_s or gbit_s for replica in model.replicas],
        [replica.latency_seconds for replica in model.replicas],
        [schedule.overlap(m) for m in range(num_replicas)],
    )


@given(models(), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(0.5, 500))
def test_a_run_is_the_one_simulated_event_by_event(model, num_steps, seed, gbit_s):
    compute = np.random.default_rng(seed).gamma(2, 0.5, (num_steps, len(model.replicas)))
    expected = events(model, compute, gbit_s).run()
    np.testing.assert_allclose(model.run_seconds([gbit_s, 1e9], compute)[0], expected, rtol=1e-9)


@given(models(), st.floats(0.5, 500))
def test_the_steady_state_is_what_a_long_run_goes_at(model, gbit_s):
    compute = np.array([[replica.step_seconds for replica in model.replicas]] * 2000)
    steps = 1500 // model.settings.sync_every * model.settings.sync_every
    seconds = model.run_seconds([gbit_s], compute) - model.run_seconds([gbit_s], compute[steps:])
    expected = steps * compute[0].mean() / seconds
    np.testing.assert_allclose(model.compute_utilization([gbit_s]), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("num_layers", "layers_per_fragment", "sync_every", "overlap", "step_seconds", "latency", "num_replicas"),
    [
        (32, 1, 50, 20, 0.01, 0.3, 4),
        (32, 1, 25, 20, 0.01, 0.3, 2),
        (32, 2, 17, 13, 0.1, 6.0, 2),
        (30, 1, 31, 28, 0.1, 6.0, 2),
        (61, 1, 30, 12, 0.1, 2.0, 3),
        (17, 1, 17, 12, 0.1, 3.0, 2),
        (24, 3, 100, 5, 0.1, 0.5, 3),
    ],
)
@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_the_steady_state_is_exact_where_latency_rules(
    num_layers, layers_per_fragment, sync_every, overlap, step_seconds, latency, num_replicas, combine
):
    """Training then waits for every so many syncs, which is no whole number of them a period."""
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
    compute = np.full((48 * cycle, num_replicas), step_seconds)
    seconds = model.run_seconds(gbit_s, compute) - model.run_seconds(gbit_s, compute[: 24 * cycle])
    expected = 24 * cycle * step_seconds / seconds
    np.testing.assert_allclose(model.compute_utilization(gbit_s), expected, rtol=1e-9)


def test_reduce_scatter_is_a_little_better_than_first_come_first_served():
    """A lane is shared without waiting, which is the most it could do: so much off, and on that side."""
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
        compute, gbit_s = np.ones((120, num_replicas)), 10 ** generator.uniform(-1, 2)
        ours, theirs = model.run_seconds([gbit_s], compute)[0], events(model, compute, gbit_s, OneLane).run()
        differences.append(120 / ours - 120 / theirs)
    assert min(differences) >= -1e-9
    assert np.mean(differences) < 0.01 and np.quantile(differences, 0.95) < 0.05


@given(models(METHODS))
def test_more_bandwidth_never_makes_it_slower(model):
    assert (np.diff(model.compute_utilization(GBIT_S)) >= -1e-9).all()
    assert (np.diff(model.compute_utilization(GBIT_S, num_steps=30)) >= -1e-9).all()


@given(models(METHODS[3:]), st.integers(0, 3), st.integers(1, 4))
def test_more_overlap_never_makes_it_slower(model, replica, more):
    settings, replica = model.settings, replica % len(model.replicas)
    overlaps = list(settings.overlap_steps)
    overlaps[replica] = min(overlaps[replica] + more, settings.sync_every - 1)
    longer = replace(model, settings=replace(settings, overlap_steps=tuple(overlaps)))
    for num_steps in (None, 30):
        before = model.compute_utilization(GBIT_S, num_steps=num_steps)
        assert (longer.compute_utilization(GBIT_S, num_steps=num_steps) >= before - 1e-9).all()


@given(models())
def test_fewer_bits_never_make_it_slower(model):
    wires = ("fp32", "bf16", "int8", "e3m0", "int2")
    found = [replace(model, wire=wire).compute_utilization(GBIT_S) for wire in wires]
    assert all((coarse >= fine - 1e-9).all() for fine, coarse in pairwise(found))


@given(models(), st.integers(0, 3), st.floats(1, 3))
def test_a_slower_replica_never_makes_it_faster(model, replica, factor):
    replicas = list(model.replicas)
    slow = replica % len(replicas)
    replicas[slow] = replace(replicas[slow], step_seconds=factor * replicas[slow].step_seconds)
    compute = np.array([[r.step_seconds for r in model.replicas]] * 30)
    slower = np.array([[r.step_seconds for r in replicas]] * 30)
    later = replace(model, replicas=replicas).run_seconds(GBIT_S, slower)
    assert (later >= model.run_seconds(GBIT_S, compute) * (1 - 1e-12)).all()


def test_a_replica_alone_never_waits():
    for method in METHODS:
        model = PhysicalModel(
            settings=MethodSettings(method=method),
            size=ModelSize(num_params=1e9, num_layers=6),
            replicas=[Replica(step_seconds=0.1, latency_seconds=9)],
        )
        np.testing.assert_allclose(model.compute_utilization([0.1, 10]), 1)
        assert model.bytes_sent_per_sync == 0


def test_diloco_by_hand():
    """H steps, then a payload to each of two others, at a third of the time each, and its latency."""
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


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_data_parallel_by_hand(num_replicas):
    """The gradients' ring all-reduces, one after the other, each when the slowest replica has it."""
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


def test_stragglers_slow_everybody_down():
    model = PhysicalModel(
        settings=MethodSettings(method="diloco", sync_every=5),
        size=ModelSize(num_params=1e6, num_layers=6, width=64, vocab_size=100),
        replicas=[Replica(step_seconds=1.0)] * 8,
    )
    some = Stragglers(variation=0.3), Stragglers(stall_probability=0.01, stall_seconds=5)
    uneven = [replace(model, stragglers=stragglers).compute_utilization([1e3])[0] for stragglers in some]
    assert model.compute_utilization([1e3])[0] > 0.999 and max(uneven) < 0.9


def test_stragglers_are_drawn_around_the_given_time():
    drawn = Stragglers(variation=0.5).draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(2, rel=0.01) and drawn.std() == pytest.approx(1, rel=0.02)
    stalls = Stragglers(stall_probability=0.1, stall_seconds=3)
    stalled = stalls.draw(np.full(200_000, 2.0), np.random.default_rng(0))
    assert set(stalled) == {2.0, 5.0} and stalled.mean() == pytest.approx(2.3, rel=0.01)


def test_embeddings_are_a_fragment_of_their_own():
    size = ModelSize(num_params=1.2e9, num_layers=24, width=2048)
    model = PhysicalModel(
        settings=MethodSettings(method="streaming"), size=size, replicas=[Replica(step_seconds=1)] * 2
    )
    assert len(model.fragment_params) == 9 == model.schedule.num_fragments
    assert model.fragment_params[-1] == 32_000 * 2048
    assert sum(model.fragment_params) == pytest.approx(1.2e9)


@pytest.mark.parametrize("tied", [True, False])
def test_a_width_is_found_for_a_number_of_parameters(tied):
    size = ModelSize(num_params=7e9, num_layers=32, tied_embeddings=tied)
    matrices = 1 if tied else 2
    width = size.outside_params / 32_000 / matrices
    assert 12 * 32 * width**2 + matrices * 32_000 * width == pytest.approx(7e9)


@pytest.mark.parametrize(
    "spec",
    [
        *("fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4", "int2"),
        *("topk", "feddropout", "dare", "e3m0:block=64", "int4:block=128,stochastic=true"),
        *("topk:density=0.01,values=e3m0", "topk:density=0.3", "dare:density=0.5,values=bf16"),
    ],
)
def test_bits_are_those_of_the_codec(spec):
    from diloco.wire import codec

    expected = 8 * codec(spec).payload_bytes(1 << 22) / (1 << 22)
    assert bits_per_param(spec) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "e9",
            "fp32:block=2",
            "e3m0:size=1",
            "e3m0:block=x",
            "e3m0:block=0",
            "e3m0:block=-100",
            "e3m0:block=255",
        ),
        *("int8:block=65537", "int8:stochastic=perhaps", "topk:density=0", "dare:density=5", "topk:values=topk"),
    ],
)
def test_bits_of_what_is_no_codec_are_refused(spec):
    from diloco.wire import codec

    with pytest.raises(ValueError):
        codec(spec)
    with pytest.raises(ValueError, match="is no wire format with options that it has: choose one of fp32, bf16"):
        bits_per_param(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": []}, "num_replicas must be from 1 to 256, not 0"),
        ({"combine": "broadcast"}, "combine='broadcast' is neither gather nor reduce_scatter"),
        ({"settings": MethodSettings(method="data_parallel"), "combine": "reduce_scatter"}, "leave it out"),
        ({"settings": MethodSettings(method="data_parallel"), "wire": "e3m0"}, "take fp32, bf16 or fp16"),
        (
            {"settings": MethodSettings(method="streaming_overlapped", overlap_steps=(1, 2, 3))},
            r"overlap_steps=\(1, 2, 3\) must hold one number for each of 2 replicas",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(changes, message):
    fields = {
        "settings": MethodSettings(method="streaming_overlapped"),
        "size": ModelSize(num_params=1e9, num_layers=6),
        "replicas": [Replica(step_seconds=0.1)] * 2,
    }
    with pytest.raises(ValueError, match=message):
        PhysicalModel(**(fields | changes))
