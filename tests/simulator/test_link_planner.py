from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.simulator.cases import task, with_replicas

from diloco.simulator import link_planner
from diloco.simulator.description import MethodSettings, ModelSize, Replica
from diloco.simulator.link_planner import LinkPlan, LinkTask, all_plans, feasible, remedy
from diloco.simulator.physical import PhysicalModel
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import with_method_values


def utilization(plan: LinkPlan, **changes: float) -> float:
    replicas = [replace(replica, **changes) for replica in plan.task.replicas]
    return replace(plan.model, replicas=replicas).compute_utilization([1])[0]


@pytest.fixture(autouse=True)
def few_settings(monkeypatch) -> Iterator[None]:
    """A search over fewer settings: the tests simulate all of them, and some many times."""
    for name, values in {
        "SYNC_EVERY": (10, 50, 200, 500),
        "OVERLAP_STEPS": (0, 2, 10, 20),
        "LAYERS_PER_FRAGMENT": (3, 1),
    }.items():
        monkeypatch.setattr(link_planner, name, values)
    all_plans.cache_clear()
    yield
    all_plans.cache_clear()


@pytest.mark.parametrize(("gbit_s", "num_replicas"), [(0.3, 2), (0.5, 4), (1000.0, 2)])
def test_plans_reach_the_target_the_least_risky_first_and_none_beats_another(gbit_s, num_replicas):
    wanted = task(gbit_s, num_replicas=num_replicas)
    plans = feasible(wanted)
    risks = [plan.risk for plan in plans]
    assert risks == sorted(risks)
    assert all(plan.compute_utilization >= wanted.target for plan in plans)
    reach = {plan.risk for plan in all_plans(wanted) if plan.compute_utilization >= wanted.target}

    def beats(a: tuple, b: tuple) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    assert len(reach) > len(risks) > 0
    assert risks == sorted(risk for risk in reach if not any(beats(other, risk) for other in reach))


def test_a_fast_link_needs_no_risk():
    (plan,) = feasible(task(1e5, latency_seconds=0.0))
    assert plan.risk == (10, 0, -32, False)
    assert plan.model.settings.layers_per_fragment == 3


def test_a_plan_tells_duration_and_traffic():
    plan = feasible(task(1.0))[0]
    settings, model = plan.model.settings, plan.model
    assert plan.hours == pytest.approx(66_757 * 2.3 / 3600 / plan.compute_utilization)
    sent = [sync.fragment for step in range(1, 66_758) for sync in model.schedule.sent(step)]
    share = sum(model.fragment_params[fragment] for fragment in sent) / 7e9
    assert plan.terabytes == pytest.approx(share * model.bytes_sent_per_sync / 1e12)
    assert plan.terabytes == pytest.approx(
        66_757 / settings.sync_every * model.bytes_sent_per_sync / 1e12, rel=1e-3
    )


def test_an_outer_step_in_a_bucket_takes_polls_round_trips_and_transfers():
    """docs/how-to/choose-a-store.md, How soon is an outer step?"""
    plans = {plan.combine: plan for plan in all_plans(task(1.0, num_replicas=3)) if plan.wire == "fp32"}
    for combine, polls, round_trips, transfers in (("gather", 2, 5, 3), ("reduce_scatter", 3, 9, 3)):
        bits = 32 * max(plans[combine].model.fragment_params)
        others = 0.5 * (polls - 1) + 0.1 * round_trips + transfers * bits / 1e9
        assert plans[combine].store_seconds == pytest.approx(others + 30), "the last poll: an eighth of τ, or 30 s"


@pytest.mark.parametrize("gbit_s", [0.05, 0.3, 1.0])
def test_a_link_of_the_peak_loses_nothing_and_a_slower_one_something(gbit_s):
    for plan in feasible(task(gbit_s, num_replicas=2, latency_seconds=0.0)):
        if plan.model.settings.overlap_steps == 0:
            assert plan.peak_gbit_s is None and utilization(plan, gbit_s=1e6) < 1
            continue
        assert utilization(plan, gbit_s=1.000001 * plan.peak_gbit_s) == pytest.approx(1, abs=1e-9)
        assert utilization(plan, gbit_s=0.99 * plan.peak_gbit_s) < 1 - 1e-4
        mean_gbit_s = 8e3 * plan.terabytes / (plan.task.num_steps * 2.3)
        assert plan.peak_gbit_s >= 0.99 * mean_gbit_s


@pytest.mark.parametrize("slower", [1.02, 3.0])
def test_the_peak_follows_from_the_slowest_replicas_steps(slower):
    equal = task(1.0, num_replicas=2, latency_seconds=0.0)
    one, other = equal.replicas
    replicas = (one, replace(other, step_seconds=slower * other.step_seconds))
    plans = feasible(replace(equal, replicas=replicas, target=0.3))
    overlapped = [plan for plan in plans if plan.model.settings.overlap_steps]
    assert overlapped
    for plan in overlapped:
        on_peak = utilization(plan, gbit_s=1.000001 * plan.peak_gbit_s)
        assert on_peak == pytest.approx(utilization(plan, gbit_s=1e6), abs=1e-6)
        both_slow = replace(plan, task=replace(plan.task, replicas=replicas[1:] * 2))
        assert plan.peak_gbit_s == pytest.approx(both_slow.peak_gbit_s)


def test_device_memory_is_the_papers_arithmetic():
    """5/3 of Data-Parallel's state; with offload, 3 of 108 layers at 100B add 20 to 1,117 GiB."""
    size = ModelSize(num_params=100e9, num_layers=108, width=1, vocab_size=1)
    replicas = (Replica(step_seconds=4.9, gbit_s=1.0),) * 2
    model = PhysicalModel(settings=MethodSettings(method="streaming"), size=size, replicas=replicas)
    plan = LinkPlan(task=LinkTask(size=size, replicas=replicas, num_steps=100), model=model)
    data_parallel = 3 * 4 * 100e9 / 2**30
    assert int(data_parallel) == 1117
    assert plan.device_memory_gib() == pytest.approx(5 / 3 * data_parallel)
    added = plan.device_memory_gib(offload=True) - data_parallel
    assert int(added) == 20 and 0.018 < added / data_parallel < 0.02


def test_the_train_settings_of_a_plan_make_the_planned_run():
    plans = [*feasible(task(1.0)), *feasible(task(1e5, latency_seconds=0.0))]
    assert {plan.train_settings["method"] for plan in plans} >= {"streaming", "streaming_overlapped"}
    for plan in plans:
        config, model = recipe("laptop"), plan.model
        for field, value in plan.train_settings.items():
            room, _, name = field.rpartition(".")
            inner = replace(getattr(config, room), **{name: value}) if room else value
            config = replace(config, **{room or name: inner})
        config = with_method_values(config)
        diloco = config.diloco
        assert config.num_replicas == len(model.replicas)
        assert (diloco.wire, diloco.combine, diloco.fragments) == (plan.wire, plan.combine, "strided")
        assert diloco.layers_per_fragment == model.settings.layers_per_fragment
        schedule = model.schedule
        assert (diloco.sync_every, diloco.overlap_steps) == (schedule.sync_every, schedule.overlap_steps)
        assert (diloco.offsets, diloco.first_sync) == (schedule.offsets, schedule.first_sync)
        assert diloco.mixing == (0.5 if diloco.overlap_steps else 0.0)


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
    wanted = LinkTask(size=size, replicas=(replica,) * 2, num_steps=2000)
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
    wanted = LinkTask(size=ModelSize(num_params=1e9, num_layers=24), replicas=(replica,) * 2, num_steps=100_000)
    latency_seconds = remedy(wanted).latency_seconds
    assert latency_seconds > 1.5 and feasible(with_replicas(wanted, latency_seconds=latency_seconds))
    assert not feasible(with_replicas(wanted, latency_seconds=1.05 * latency_seconds + 0.1))


def test_a_latency_of_nothing_is_an_answer():
    """A hundredth of 40,000 s is too much already, and without any the target is reached."""
    assert remedy(task(10.0, latency_seconds=4e4)).latency_seconds == 0.0
