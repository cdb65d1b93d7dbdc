from dataclasses import replace

import pytest
from tests.simulator.tasks import task, with_replicas

from diloco.simulator.model_size import ModelSize
from diloco.simulator.planner import Task, feasible
from diloco.simulator.remedy import remedy
from diloco.simulator.replicas import Replica


def test_each_change_alone_reaches_the_target_and_a_little_less_does_not():
    wanted = task(0.006, latency_seconds=0.0)
    assert not feasible(wanted)
    help_ = remedy(wanted)
    assert feasible(with_replicas(wanted, gbit_s=help_.link_gbit_s))
    assert not feasible(with_replicas(wanted, gbit_s=help_.link_gbit_s / 1.13))
    longer = with_replicas(wanted, step_seconds=2.3 * help_.step_factor)
    assert feasible(replace(longer, num_steps=int(66_757 / help_.step_factor)))
    assert not feasible(with_replicas(wanted, step_seconds=2.3 * help_.step_factor / 1.14))
    assert feasible(replace(wanted, target=help_.best.compute_utilization))


def test_longer_steps_leave_room_for_the_syncs_that_they_need():
    """A batch k times as large makes as many times fewer steps, and a long H may no longer fit in twice."""
    size, replica = ModelSize(num_params=1e9, num_layers=6), Replica(step_seconds=0.5, gbit_s=0.004)
    wanted = Task(size=size, replicas=(replica,) * 2, num_steps=2000)
    assert remedy(wanted).step_factor is None
    for factor in (2, 8, 64):
        longer = with_replicas(wanted, step_seconds=0.5 * factor)
        assert not feasible(replace(longer, num_steps=2000 // factor))
    assert feasible(with_replicas(wanted, step_seconds=10.0)), "only the length of the run is in the way"


def test_the_latency_is_that_of_every_link():
    near = task(10.0, latency_seconds=0.0)
    first, *others = near.replicas
    wanted = replace(near, replicas=(replace(first, latency_seconds=600.0), *others))
    latency_seconds = remedy(wanted).latency_seconds
    assert feasible(with_replicas(wanted, latency_seconds=latency_seconds))
    assert not feasible(with_replicas(wanted, latency_seconds=1.05 * latency_seconds + 6.0))


def test_no_bandwidth_makes_up_for_too_high_a_latency():
    wanted = task(10.0, latency_seconds=300.0)
    help_ = remedy(wanted)
    assert help_.link_gbit_s is None and help_.latency_seconds < 300
    assert feasible(with_replicas(wanted, latency_seconds=help_.latency_seconds))


def test_no_link_makes_up_for_a_slow_replica():
    replicas = (Replica(step_seconds=1, gbit_s=1e3), Replica(step_seconds=3, gbit_s=1e3))
    wanted = replace(task(1.0), replicas=replicas)
    help_ = remedy(wanted)
    assert wanted.most_utilization == pytest.approx(2 / 3)
    assert (help_.link_gbit_s, help_.latency_seconds, help_.step_factor) == (None, None, None)
    assert feasible(replace(wanted, target=help_.best.compute_utilization))


def test_the_latency_is_the_largest_with_which_any_plan_reaches_the_target():
    """The plan that comes closest at 8 s waits for large fragments, and is not the best one at 2 s."""
    replica = Replica(step_seconds=0.1, gbit_s=1.0, latency_seconds=8.0)
    wanted = Task(size=ModelSize(num_params=1e9, num_layers=24), replicas=(replica,) * 2, num_steps=100_000)
    latency_seconds = remedy(wanted).latency_seconds
    assert latency_seconds > 1.5 and feasible(with_replicas(wanted, latency_seconds=latency_seconds))
    assert not feasible(with_replicas(wanted, latency_seconds=1.05 * latency_seconds + 0.1))


def test_a_latency_of_nothing_is_an_answer():
    """A hundredth of 10⁷ s is too much already, and without any the target is reached."""
    assert remedy(task(10.0, latency_seconds=1e7)).latency_seconds == 0.0
