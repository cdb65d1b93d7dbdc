from dataclasses import replace

import pytest
import tyro

from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.planner import Plan, Task, _plans, feasible, remedy
from diloco.simulator.replicas import Replica


def task(gbit_s: float, *, num_replicas: int = 4, latency: float = 0.05, num_layers: int = 32) -> Task:
    replica = Replica(step_seconds=2.3, gbit_s=gbit_s, latency_seconds=latency)
    size = ModelSize(num_params=7e9, num_layers=num_layers)
    return Task(size=size, replicas=(replica,) * num_replicas, num_steps=66_757)


@pytest.mark.parametrize(("gbit_s", "num_replicas"), [(1.0, 4), (0.3, 2), (0.05, 4), (1000.0, 2)])
def test_plans_reach_the_target_the_least_risky_first_and_none_is_beaten(gbit_s, num_replicas):
    wanted = task(gbit_s, num_replicas=num_replicas, num_layers=7)
    plans = feasible(wanted)
    risks = [plan.risk for plan in plans]
    assert risks == sorted(risks)
    assert all(plan.compute_utilization >= wanted.target for plan in plans)
    reach = [plan.risk for plan in _plans(wanted) if plan.compute_utilization >= wanted.target]

    def beats(a: tuple, b: tuple) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    assert risks == sorted({risk for risk in reach if not any(beats(other, risk) for other in reach)})


def test_a_fast_link_needs_no_risk():
    (plan,) = feasible(task(1e5, latency=0.0))
    assert plan.risk == (10, 0, -32, False)
    assert plan.model.settings.layers_per_fragment == 3


def test_what_a_plan_costs():
    plan = feasible(task(1.0))[0]
    settings, model = plan.model.settings, plan.model
    assert plan.hours == pytest.approx(66_757 * 2.3 / 3600 / plan.compute_utilization)
    assert plan.terabytes == pytest.approx(66_757 / settings.sync_every * model.bytes_sent_per_sync / 1e12)
    largest = max(model.fragment_params) / 7e9
    assert plan.peak_gbit_s == pytest.approx(
        8 * model.bytes_sent_per_sync / 1e9 * largest / 2.3 / max(1, settings.overlap_steps)
    )


def test_a_link_of_the_peak_loses_nothing():
    plan = feasible(task(1.0, num_replicas=2, latency=0.0))[0]
    links = [replace(replica, gbit_s=plan.peak_gbit_s * 1.0001) for replica in plan.task.replicas]
    settings = replace(plan.model.settings, sync_every=500, overlap_steps=plan.model.settings.overlap_steps or 1)
    assert replace(plan.model, replicas=links, settings=settings).compute_utilization([1])[0] == pytest.approx(1)


def test_device_memory_is_the_papers_arithmetic():
    """5/3 of Data-Parallel's state; with offload, 3 of 108 layers at 100B add 20 to 1,117 GiB."""
    size = ModelSize(num_params=100e9, num_layers=108, width=1, vocab_size=1)
    replicas = (Replica(step_seconds=4.9, gbit_s=1.0),) * 2
    model = PhysicalModel(settings=MethodSettings(method="streaming"), size=size, replicas=replicas)
    plan = Plan(task=Task(size=size, replicas=replicas, num_steps=1), model=model)
    data_parallel = 3 * 4 * 100e9 / 2**30
    assert int(data_parallel) == 1117
    assert plan.device_memory_gib() == pytest.approx(5 / 3 * data_parallel)
    added = plan.device_memory_gib(offload=True) - data_parallel
    assert int(added) == 20 and 0.018 < added / data_parallel < 0.02


def test_the_flags_are_those_of_that_run():
    from diloco.training.config import TrainConfig
    from diloco.training.recipes import recipe

    for plan in feasible(task(1.0)):
        config = tyro.cli(TrainConfig, default=recipe("laptop"), args=plan.flags.split())
        settings = plan.model.settings
        assert (config.method, config.num_replicas) == ("streaming", 4)
        assert config.diloco.sync_every == settings.sync_every
        assert config.diloco.overlap_steps == settings.overlap_steps
        assert config.diloco.layers_per_fragment == settings.layers_per_fragment
        assert (config.diloco.wire, config.diloco.combine) == (plan.wire, plan.combine)


def test_a_target_out_of_reach_is_told_with_what_would_reach_it():
    wanted = task(0.01, latency=0.0)
    assert feasible(wanted) == []
    found = remedy(wanted)
    assert found.best.compute_utilization < 0.95
    assert found.latency_seconds is None
    enough = [replace(replica, gbit_s=found.link_gbit_s) for replica in wanted.replicas]
    assert feasible(replace(wanted, replicas=tuple(enough)))
    less = [replace(replica, gbit_s=found.link_gbit_s / 1.13) for replica in wanted.replicas]
    assert not feasible(replace(wanted, replicas=tuple(less)))
    longer = [replace(r, step_seconds=r.step_seconds * found.step_factor) for r in wanted.replicas]
    assert feasible(replace(wanted, replicas=tuple(longer)))


def test_a_latency_out_of_reach_is_told_as_well():
    wanted = task(10.0, latency=1e4)
    assert feasible(wanted) == []
    found = remedy(wanted)
    closer = [replace(replica, latency_seconds=found.latency_seconds) for replica in wanted.replicas]
    assert feasible(replace(wanted, replicas=tuple(closer)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 1.0}, "target must be above 0 and below 1, not 1.0"),
        ({"num_steps": 0}, "num_steps must be above 0"),
        ({"replicas": (Replica(step_seconds=1),) * 2}, "each replica's link needs a bandwidth"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(task(1.0), **changes)
