import math
from dataclasses import replace

import pytest

from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, step_seconds

RUN = IdealizedRun(
    num_params=1e9,
    num_tokens=20e9,
    batch_tokens=1e6,
    num_chips=100,
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


def test_gradients_and_outer_gradients_have_bits_of_their_own(monkeypatch):
    """Each traffic is proportional to its own bits, latency apart, and independent of the other's."""
    for name, network in NETWORKS.items():
        monkeypatch.setitem(NETWORKS, name, network._replace(latency_seconds=0.0))
    for num_replicas in (0, 1, 4):
        run = replace(RUN, num_replicas=num_replicas)
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


MACHINE = {"num_params": 1e9, "batch_tokens": 2**20, "num_chips": 512, "flops_per_chip": 300e12}


def test_a_step_is_its_part_of_the_whole_runs_compute():
    run = IdealizedRun(num_tokens=20e9, **MACHINE)
    assert step_seconds(**MACHINE) == pytest.approx(run.compute_seconds / run.num_steps)
    assert step_seconds(**MACHINE, mfu=0.4) == pytest.approx(step_seconds(**MACHINE) / 0.4)
