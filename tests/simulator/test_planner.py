import io
import re
from dataclasses import replace

import pytest
import tyro
from rich.console import Console

from diloco.report.terminal.plan import print_remedy
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
    sent = [sync.fragment for step in range(1, 66_758) for sync in model.schedule.sent(step)]
    share = sum(model.fragment_params[fragment] for fragment in sent) / 7e9
    assert plan.terabytes == pytest.approx(share * model.bytes_sent_per_sync / 1e12)
    assert plan.terabytes == pytest.approx(
        66_757 / settings.sync_every * model.bytes_sent_per_sync / 1e12, rel=1e-3
    )


@pytest.mark.parametrize("gbit_s", [0.05, 0.3, 1.0])
def test_a_link_of_the_peak_loses_nothing_and_a_slower_one_something(gbit_s):
    for plan in feasible(task(gbit_s, num_replicas=2, latency=0.0)):
        settings = plan.model.settings
        if settings.overlap_steps == 0:
            fastest = replace(plan.model, replicas=[replace(one, gbit_s=1e6) for one in plan.task.replicas])
            assert plan.peak_gbit_s is None and fastest.compute_utilization([1])[0] < 1
            continue
        found = []
        for factor in (1.000001, 0.99):
            links = [replace(replica, gbit_s=factor * plan.peak_gbit_s) for replica in plan.task.replicas]
            found.append(replace(plan.model, replicas=links).compute_utilization([1])[0])
        assert found[0] == pytest.approx(1, abs=1e-9) and found[1] < 1 - 1e-4
        mean = 8e3 * plan.terabytes / (plan.task.num_steps * 2.3)
        assert plan.peak_gbit_s >= 0.99 * mean


@pytest.mark.parametrize("slower", [1.02, 1.5, 3.0])
def test_the_peak_is_that_of_the_slowest_replicas_steps(slower):
    equal = task(1.0, num_replicas=2, latency=0.0)
    one, other = equal.replicas
    replicas = (one, replace(other, step_seconds=slower * other.step_seconds))
    plans = feasible(replace(equal, replicas=replicas, target=0.3))
    overlapped = [plan for plan in plans if plan.model.settings.overlap_steps]
    assert overlapped
    for plan in overlapped:

        def utilization(gbit_s: float, plan: Plan = plan) -> float:
            links = [replace(replica, gbit_s=gbit_s) for replica in replicas]
            return replace(plan.model, replicas=links).compute_utilization([1])[0]

        assert utilization(1.000001 * plan.peak_gbit_s) == pytest.approx(utilization(1e6), abs=1e-6)
        both_slow = replace(plan, task=replace(plan.task, replicas=replicas[1:] * 2))
        assert plan.peak_gbit_s == pytest.approx(both_slow.peak_gbit_s)


def test_a_run_that_is_too_short_to_sync_is_not_planned():
    plans = feasible(replace(task(1.0), num_steps=150))
    assert plans and all(2 * plan.model.settings.sync_every <= 150 for plan in plans)
    assert all(plan.terabytes > 0 for plan in plans)


def test_device_memory_is_the_papers_arithmetic():
    """5/3 of Data-Parallel's state; with offload, 3 of 108 layers at 100B add 20 to 1,117 GiB."""
    size = ModelSize(num_params=100e9, num_layers=108, width=1, vocab_size=1)
    replicas = (Replica(step_seconds=4.9, gbit_s=1.0),) * 2
    model = PhysicalModel(settings=MethodSettings(method="streaming"), size=size, replicas=replicas)
    plan = Plan(task=Task(size=size, replicas=replicas, num_steps=100), model=model)
    data_parallel = 3 * 4 * 100e9 / 2**30
    assert int(data_parallel) == 1117
    assert plan.device_memory_gib() == pytest.approx(5 / 3 * data_parallel)
    added = plan.device_memory_gib(offload=True) - data_parallel
    assert int(added) == 20 and 0.018 < added / data_parallel < 0.02


def test_the_flags_are_those_of_that_run():
    from diloco.training.config import TrainConfig
    from diloco.training.recipes import recipe

    plans = feasible(task(1.0))
    for plan in (plans[0], plans[-1]):
        config = tyro.cli(TrainConfig, default=recipe("laptop"), args=plan.flags.split())
        settings = plan.model.settings
        assert (config.method, config.num_replicas) == ("streaming", 4)
        assert config.diloco.sync_every == settings.sync_every
        assert config.diloco.overlap_steps == settings.overlap_steps
        assert config.diloco.layers_per_fragment == settings.layers_per_fragment
        assert (config.diloco.wire, config.diloco.combine) == (plan.wire, plan.combine)


def printed(wanted: Task) -> tuple[str, dict[str, float]]:
    """What is told of a target out of reach, and its numbers as they are printed."""
    assert feasible(wanted) == []
    console = Console(width=10_000, file=io.StringIO())
    print_remedy(wanted, remedy(wanted), console)
    sentence = console.file.getvalue()
    patterns = {
        "gbit_s": "links of ([^ ]+) G",
        "latency": "latency of ([^ ]+) s on every link",
        "factor": "compute ([^ ]+) times",
    }
    found = {name: re.search(pattern, sentence) for name, pattern in patterns.items()}
    target = re.search(r"a target of ([0-9.]+?)[.;]?( |$)", sentence)
    return sentence, {name: float(m[1]) for name, m in (found | {"target": target}).items() if m is not None}


def with_links(wanted: Task, **changes: float) -> Task:
    return replace(wanted, replicas=tuple(replace(replica, **changes) for replica in wanted.replicas))


@pytest.mark.parametrize("gbit_s", [0.003, 0.01, 0.0177])
def test_a_target_out_of_reach_is_told_with_what_would_reach_it(gbit_s):
    wanted = task(gbit_s, latency=0.0)
    sentence, numbers = printed(wanted)
    assert "No setting reaches a compute utilization of 0.95 here." in sentence and "latency" not in numbers
    assert feasible(with_links(wanted, gbit_s=numbers["gbit_s"]))
    assert not feasible(with_links(wanted, gbit_s=numbers["gbit_s"] / 1.13))
    longer = with_links(wanted, step_seconds=2.3 * numbers["factor"])
    assert feasible(replace(longer, num_steps=int(66_757 / numbers["factor"])))
    assert not feasible(with_links(wanted, step_seconds=2.3 * numbers["factor"] / 1.14))
    assert feasible(replace(wanted, target=numbers["target"]))


def test_longer_steps_leave_room_for_the_syncs_that_they_need():
    """A batch k times as large makes as many times fewer steps, and a long H may no longer fit in twice."""
    size, replica = ModelSize(num_params=1e9, num_layers=24), Replica(step_seconds=0.5, gbit_s=0.004)
    wanted = Task(size=size, replicas=(replica,) * 2, num_steps=2000)
    _, numbers = printed(wanted)
    assert "factor" not in numbers
    for factor in (2, 4, 8, 16, 64):
        longer = with_links(wanted, step_seconds=0.5 * factor)
        assert not feasible(replace(longer, num_steps=2000 // factor))
    assert feasible(with_links(wanted, step_seconds=2.0)), "but for its length"


def test_a_latency_is_told_for_every_link():
    far = with_links(task(10.0, num_layers=6), latency_seconds=0.0)
    first, *others = far.replicas
    wanted = replace(far, replicas=(replace(first, latency_seconds=600.0), *others))
    _, numbers = printed(wanted)
    assert feasible(with_links(wanted, latency_seconds=numbers["latency"]))
    assert not feasible(with_links(wanted, latency_seconds=1.05 * numbers["latency"] + 6.0))


def test_a_latency_out_of_reach_is_told_as_well():
    wanted = task(10.0, latency=300.0, num_layers=6)
    _, numbers = printed(wanted)
    assert feasible(with_links(wanted, latency_seconds=numbers["latency"]))
    assert numbers["latency"] < 300 and "gbit_s" not in numbers


def test_what_a_slow_replica_costs_is_no_matter_of_links():
    replicas = (Replica(step_seconds=1, gbit_s=1e3), Replica(step_seconds=3, gbit_s=1e3))
    sentence, numbers = printed(replace(task(1.0), replicas=replicas))
    assert "More than 0.667 can't be reached by replicas with these step times" in sentence
    assert set(numbers) == {"target"}
    assert feasible(replace(task(1.0), replicas=replicas, target=numbers["target"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 1.0}, "target must be above 0 and below 1, not 1.0"),
        ({"num_steps": 19}, "num_steps=19: so short a run is over before"),
        ({"replicas": (Replica(step_seconds=1),) * 2}, "each replica's link needs a bandwidth"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(task(1.0), **changes)
