import math
from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, Network

RUN = IdealizedRun(
    num_params=1e9,
    num_tokens=20e9,
    batch_tokens=1e6,
    num_chips=100,
    inside=Network(400, 1e-4),
    between=Network(10, 1e-2),
    inner_bits_per_param=16,
    outer_bits_per_param=16,
)
STEPS, ALL_REDUCE = 20_000, 2 * 16e9 / 10e9 * 0.99 + 1e-2


def test_compute_is_six_flops_a_parameter_and_token():
    assert RUN.compute_seconds == pytest.approx(6 * 1e9 * 20e9 / (100 * 300e12))


def test_data_parallel_reduces_across_sites_at_every_step():
    assert RUN.inside_seconds == pytest.approx(STEPS * ALL_REDUCE)
    assert RUN.between_seconds == 0


def test_one_replica_pays_once_more_every_h_steps():
    run = replace(RUN, num_replicas=1, sync_every=50)
    assert run.inside_seconds + run.between_seconds == pytest.approx(STEPS * ALL_REDUCE * (1 + 1 / 50))


def test_several_replicas_reduce_gradients_within_their_site():
    run = replace(RUN, num_replicas=4, sync_every=50)
    assert run.inside_seconds == pytest.approx(STEPS * (2 * 16e9 / 400e9 * (1 - 4 / 100) + 1e-4))
    assert run.between_seconds == pytest.approx(STEPS / 50 * ALL_REDUCE)
    assert run.seconds == pytest.approx(run.compute_seconds + run.inside_seconds + run.between_seconds)


def test_gradients_and_outer_gradients_have_bits_of_their_own():
    """Each traffic is proportional to its own bits, latency apart, and independent of the other's."""
    fast, slow = Network(400, 0.0), Network(10, 0.0)
    for num_replicas in (0, 1, 4):
        run = replace(RUN, num_replicas=num_replicas, inside=fast, between=slow)
        inner, outer = replace(run, inner_bits_per_param=32), replace(run, outer_bits_per_param=4)
        assert inner.inside_seconds == pytest.approx(2 * run.inside_seconds)
        assert inner.between_seconds == pytest.approx(run.between_seconds)
        assert outer.inside_seconds == pytest.approx(run.inside_seconds)
        assert outer.between_seconds == pytest.approx(run.between_seconds / 4)


def test_overlap_hides_the_exchange_for_the_duration_of_its_steps():
    run = replace(RUN, num_replicas=4, sync_every=50)
    step = (run.compute_seconds + run.inside_seconds) / STEPS
    some = replace(run, overlap_steps=2)
    assert some.between_seconds == pytest.approx(STEPS / 50 * (ALL_REDUCE - 2 * step))
    assert replace(run, overlap_steps=math.ceil(ALL_REDUCE / step)).between_seconds == 0


def test_the_archetypes_are_the_papers():
    assert {name: (n.gbit_s, n.latency_seconds) for name, n in NETWORKS.items()} == {
        "high": (400, 1e-4),
        "medium": (100, 1e-3),
        "low": (10, 1e-2),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": -1}, "num_tokens must be above 0 and finite, not -1"),
        ({"inner_bits_per_param": 0}, "inner_bits_per_param must be above 0"),
        ({"outer_bits_per_param": -4}, "outer_bits_per_param must be above 0"),
        ({"num_replicas": 101}, "num_replicas=101 must be at least 0, and at most num_chips=100"),
        ({"overlap_steps": 30, "num_replicas": 2}, "overlap_steps=30 must be at least 0 and below sync_every=30"),
        ({"overlap_steps": 1}, "overlap_steps=1, but num_replicas=0 is Data-Parallel"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(RUN, **changes)


def test_a_network_without_bandwidth_is_refused():
    with pytest.raises(UserError, match="gbit_s must be above 0"):
        Network(0, 0)
    with pytest.raises(UserError, match="latency_seconds must be at least 0"):
        Network(1, -1)
