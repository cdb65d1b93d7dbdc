"""The smallest changes to a task's links or steps that make its target feasible."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from diloco.simulator.bandwidth import reaches
from diloco.simulator.planner import Plan, Task, all_plans, fastest
from diloco.simulator.replicas import Replica


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes each of which alone reaches a target that no plan reaches."""

    best: Plan
    """The plan that comes closest."""
    link_gbit_s: float | None
    """Bandwidth of every link with which the largest H reaches the target; None if no bandwidth is enough."""
    latency_seconds: float | None
    """The largest latency of every link with which a plan reaches the target; None if none is low enough."""
    step_factor: float | None
    """Factor by which steps must compute longer, with batches as many times as large and as many times fewer
    steps; None if no factor is enough."""


def remedy(task: Task) -> Remedy:
    """The changes that make an infeasible target feasible."""
    plans = fastest(all_plans(task))
    best = max(plans, key=lambda plan: (round(plan.compute_utilization, 6), [-risk for risk in plan.risk]))
    longest = max(plan.model.settings.sync_every for plan in plans)
    enough = [_least_gbit_s(plan) for plan in plans if plan.model.settings.sync_every == longest]
    low_enough = map(_most_latency_seconds, plans)
    return Remedy(
        best=best,
        link_gbit_s=min((gbit_s for gbit_s in enough if gbit_s is not None), default=None),
        latency_seconds=max((seconds for seconds in low_enough if seconds is not None), default=None),
        step_factor=min(filter(None, map(_least_step_factor, plans)), default=None),
    )


def _least_gbit_s(plan: Plan) -> float | None:
    links = tuple(replace(replica, gbit_s=None) for replica in plan.task.replicas)
    utilization = replace(plan.model, replicas=links).compute_utilization(_GBIT_S)
    enough = np.flatnonzero(reaches(utilization, plan.task.target))
    return float(_GBIT_S[enough[0]]) if enough.size else None


_GBIT_S = np.logspace(-3, 5, 161)
"""20 points a decade."""


def _most_latency_seconds(plan: Plan) -> float | None:
    """The largest latency that is low enough, by bisection, to 1 % of the largest possible one."""

    def is_enough(latency_seconds: float) -> bool:
        return _reaches_with(plan, lambda replica: replace(replica, latency_seconds=latency_seconds))

    if not is_enough(0.0):
        return None
    low, high = 0.0, max(replica.latency_seconds for replica in plan.task.replicas)
    precision = 0.01 * high
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low


def _least_step_factor(plan: Plan) -> float | None:
    """The smallest factor of the steps, by bisection: longer ones lower no utilization; H must still fit twice."""
    allowed = _FACTORS[plan.task.num_steps / _FACTORS >= 2 * plan.model.settings.sync_every]

    def is_enough(factor: float) -> bool:
        return _reaches_with(plan, lambda replica: replace(replica, step_seconds=factor * replica.step_seconds))

    if not allowed.size or not is_enough(allowed[-1]):
        return None
    return float(allowed[bisect_left(allowed, True, key=is_enough)])


_FACTORS = np.logspace(0, 3, 61)


def _reaches_with(plan: Plan, change: Callable[[Replica], Replica]) -> bool:
    replicas = tuple(map(change, plan.task.replicas))
    return replace(plan, model=replace(plan.model, replicas=replicas)).reaches_target
