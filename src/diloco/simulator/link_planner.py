"""A search over H, τ, fragment size, codec and combine for the settings that reach a compute utilization.

Where there are none, the smallest changes to a task's links or steps that make its target feasible.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from diloco.errors import UserError
from diloco.presets import METHODS, PRESETS, Method
from diloco.rendezvous.prices import Traffic, longest_poll, run_traffic
from diloco.simulator.description import MethodSettings, ModelSize, Replica, reaches
from diloco.simulator.physical import PhysicalModel
from diloco.wire.formats import parse

SYNC_EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
MIN_STEPS = 2 * SYNC_EVERY[0]
"""Fewest steps of a run: in a shorter one no replica syncs twice."""
OVERLAP_STEPS = (0, 1, 2, 5, 10, 20)
WIRES = ("fp32", "bf16", "int8", "e3m0")
"""The codecs without a measured cost to quality, finest first; every coarser one has a cost."""
LAYERS_PER_FRAGMENT = (3, 2, 4, 1, 6, 8, 12)
"""Layers in a fragment, by preference: the paper finds 3 the best compromise."""
MOST_LOAD = 0.8
"""Part of the time in which a replica's link to a bucket may be busy, so that outer steps do not fall behind."""
_DAY_SECONDS, _POLL_SECONDS = 86400.0, 0.5
"""Length of a day, and time between two looks of a replica into a bucket, by default."""


@dataclass(frozen=True, kw_only=True)
class LinkTask:
    """A model to train, and the machines to train it on.

    Raises:
        UserError: if no plan could exist.
    """

    size: ModelSize
    """The model."""
    replicas: tuple[Replica, ...]
    """Step time and link of each; every link has a bandwidth."""
    num_steps: int
    """T, of the whole run."""
    target: float = 0.95
    """The compute utilization to reach."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise UserError(f"target must be above 0 and below 1, not {self.target}", "target")
        if self.num_steps < MIN_STEPS:
            raise UserError(f"num_steps={self.num_steps} must be at least {MIN_STEPS}", "num_steps")
        if any(replica.gbit_s is None for replica in self.replicas):
            raise UserError("link: each replica's link needs a bandwidth", "link")

    @property
    def most_utilization(self) -> float:
        """The utilization on infinitely fast links, where all replicas wait for the slowest."""
        times = [replica.step_seconds for replica in self.replicas]
        return float(np.mean(times) / max(times))


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """Settings for the links of a task, and what to expect of them."""

    task: LinkTask
    model: PhysicalModel

    @property
    def risk(self) -> tuple[int, int, float, bool]:
        """The settings that may cost quality, each the smaller the better.

        They are H, τ, minus the codec's bits per parameter, and whether averages are encoded a second time.
        """
        return (
            self.model.schedule.sync_every,
            self.model.schedule.max_overlap,
            -parse(self.wire).bits_per_value,
            self.combine != "gather",
        )

    @property
    def base(self) -> tuple[int, int, str]:
        """H, fragment size and combine: for plans that share them, larger τ or coarser codecs are never slower."""
        return self.model.settings.sync_every, self.model.settings.layers_per_fragment, self.combine

    @property
    def wire(self) -> str:
        """The codec."""
        return self.model.wire or self.model.settings.wire

    @property
    def combine(self) -> str:
        """The reduction: gather or reduce_scatter."""
        return self.model.combine

    @cached_property
    def compute_utilization(self) -> float:
        """Compute time as a part of all time, in the steady state."""
        return float(self.model.compute_utilization([1.0])[0])

    @property
    def reaches_target(self) -> bool:
        """True if the utilization reaches the task's target."""
        return bool(reaches(np.array(self.compute_utilization), self.task.target))

    @property
    def hours(self) -> float:
        """Duration of the whole run."""
        mean = float(np.mean([replica.step_seconds for replica in self.task.replicas]))
        return self.task.num_steps * mean / self.compute_utilization / 3600

    @property
    def store_traffic_a_day(self) -> Traffic:
        """The traffic of all replicas in a bucket; reduce_scatter has a share per replica."""
        num_replicas, num_fragments = len(self.task.replicas), len(self.model.fragment_params)
        steps = _DAY_SECONDS / (3600 * self.hours / self.task.num_steps)
        num_outer_steps = num_fragments * steps / self.model.settings.sync_every
        payload_bytes = self.task.size.num_params * parse(self.wire).bits_per_value / 8 / num_fragments
        return run_traffic(
            num_replicas=num_replicas,
            num_fragments=num_fragments,
            num_payloads=num_replicas * num_outer_steps,
            num_steps=num_outer_steps,
            payload_bytes=payload_bytes,
            num_shares=1 if self.combine == "gather" else num_replicas,
            state_bytes=8 * self.task.size.num_params,
            seconds=_DAY_SECONDS,
            poll_seconds=_POLL_SECONDS,
            longest_seconds=self._longest_poll_seconds,
            round_trip_seconds=2 * float(np.mean([one.latency_seconds for one in self.task.replicas])),
        )

    @property
    def _longest_poll_seconds(self) -> float:
        step_seconds = np.mean([replica.step_seconds for replica in self.task.replicas])
        return longest_poll(_POLL_SECONDS, self.model.schedule.max_overlap * float(step_seconds))

    @property
    def store_seconds(self) -> float:
        """The time from a send to its outer step in a bucket: polls + round trips + size / uplink + downloads."""
        payload_bits = max(self.model.fragment_params) * parse(self.wire).bits_per_value
        slowest = min(one.gbit_s for one in self.task.replicas if one.gbit_s is not None)
        is_gather = self.combine == "gather"
        return decided_seconds(
            is_gather=is_gather,
            upload_seconds=payload_bits / (1e9 * slowest),
            download_seconds=(len(self.task.replicas) - 1 if is_gather else 2) * payload_bits / (1e9 * slowest),
            latency_seconds=max(one.latency_seconds for one in self.task.replicas),
            poll_seconds=_POLL_SECONDS,
        )

    @property
    def store_load(self) -> float:
        """The part of the time in which the slowest replica's link is busy with a bucket, snapshots included."""
        traffic, slowest = self.store_traffic_a_day, min(one.gbit_s or math.inf for one in self.task.replicas)
        bytes_each = max(traffic.bytes_up, traffic.bytes_down) / len(self.task.replicas)
        return 8e-9 * bytes_each / _DAY_SECONDS / slowest

    @property
    def needed_gbit_s(self) -> float | None:
        """Least bandwidth of all links, in steps of 12 %, that reaches the target; None if none is enough."""
        return _first_that_reaches([self], _GBIT_S, lambda replica, gbit_s: replace(replica, gbit_s=gbit_s))

    @property
    def terabytes(self) -> float:
        """Payload that each replica sends in the whole run, in 10¹² bytes."""
        schedule, num_steps = self.model.schedule, self.task.num_steps
        num_params = sum(
            size * max(0, 1 + (num_steps - schedule.send_step(fragment)) // schedule.sync_every)
            for fragment, size in enumerate(self.model.fragment_params)
        )
        return self._bytes_per_param * num_params / 1e12

    @property
    def peak_gbit_s(self) -> float | None:
        """A bandwidth at which training never waits but for latency; None if τ = 0, when it always waits.

        It is the least one where all replicas are equally fast. Everything due from step s to step t must have
        arrived τ steps after t, in the schedule's order: the worst stretch from s to t decides. Steps are those of
        the slowest replica, for which the others wait; meanwhile their links go on, so that less may do.
        """
        schedule, sizes = self.model.schedule, self.model.fragment_params
        if not schedule.max_overlap:
            return None
        steps = np.array([schedule.send_step(fragment) for fragment in range(len(sizes))] * 2)
        steps[len(sizes) :] += schedule.sync_every
        steps, params = steps[order := np.argsort(steps, kind="stable")], np.array(sizes * 2)[order]
        sent = params.cumsum()
        stretches = [
            (sent[i:] - sent[i] + params[i]) / (steps[i:] - steps[i] + schedule.max_overlap)
            for i in range(len(sizes))
        ]
        average = self.task.size.num_params / schedule.sync_every
        longest_seconds = max(replica.step_seconds for replica in self.task.replicas)
        return float(8e-9 * self._bytes_per_param * max(average, *map(np.max, stretches)) / longest_seconds)

    @property
    def _bytes_per_param(self) -> float:
        return self.model.bytes_sent_per_sync / self.task.size.num_params

    def device_memory_gib(self, *, offload: bool = False) -> float:
        """A replica's parameters, Adam's two moments, Θ and outer momentum in FP32; not gradients and activations.

        With `offload`, Θ and momentum of one fragment at a time are on the device.
        """
        num_outer = max(self.model.fragment_params) if offload else self.task.size.num_params
        return device_memory_gib(self.task.size.num_params, num_outer)

    @property
    def train_settings(self) -> dict[str, str | int]:
        """The settings of a training run that follows this plan, by dotted field name of `TrainConfig`."""
        settings = self.model.settings
        return {
            "method": settings.method,
            "num_replicas": len(self.task.replicas),
            "diloco.sync_every": settings.sync_every,
            "diloco.overlap_steps": self.model.schedule.max_overlap,
            "diloco.layers_per_fragment": settings.layers_per_fragment,
            "diloco.wire": self.wire,
            "diloco.combine": self.combine,
        }


def decided_seconds(
    *, is_gather: bool, upload_seconds: float, download_seconds: float, latency_seconds: float, poll_seconds: float
) -> float:
    """The time from a send to its outer step in a bucket: polls + round trips + upload + downloads.

    Args:
        is_gather: False where shares are averaged and read once more.
        upload_seconds: of an own payload.
        download_seconds: of all that a replica reads for an outer step.
        latency_seconds: one way.
        poll_seconds: between two looks.

    >>> times = {"upload_seconds": 10.0, "download_seconds": 14.0, "latency_seconds": 0.02, "poll_seconds": 0.5}
    >>> round(decided_seconds(is_gather=True, **times), 1)
    28.2
    """
    num_polls, num_round_trips = (1, 5) if is_gather else (2, 9)
    others = num_polls * poll_seconds + num_round_trips * 2 * latency_seconds + upload_seconds + download_seconds
    # One poll more is an eighth of τ, if that takes longer, and 30 s at the most; τ is as long as all of it.
    return others + longest_poll(poll_seconds, others * 8 / 7)


def device_memory_gib(num_params: float, num_outer: float) -> float:
    """Parameters and Adam's two moments of N parameters, Θ and outer momentum of some of them, in FP32."""
    return 4 * (3 * num_params + 2 * num_outer) / 2**30


def feasible(task: LinkTask) -> list[LinkPlan]:
    """The plans that reach the target, the least risky first.

    A plan is left out if another one that reaches the target is no riskier in any respect. Among plans of the same
    risk, the preferred fragment size stays.
    """
    plans = all_plans(task)
    possible = {plan.base for plan in fastest(plans) if plan.reaches_target}
    chosen: list[LinkPlan] = []
    for plan in sorted(plans, key=lambda plan: plan.risk):
        beaten = any(all(a <= b for a, b in zip(other.risk, plan.risk, strict=True)) for other in chosen)
        if plan.base in possible and not beaten and plan.reaches_target:
            chosen.append(plan)
    return chosen


def presets(task: LinkTask, *, sync_every: int) -> list[LinkPlan]:
    """The methods as they are by default, at one H, Data-Parallel first: for comparison."""
    size = min(LAYERS_PER_FRAGMENT[0], task.size.num_layers)
    settings = [MethodSettings(method=one, sync_every=sync_every, layers_per_fragment=size) for one in METHODS]
    return [
        LinkPlan(task=task, model=PhysicalModel(settings=one, size=task.size, replicas=task.replicas))
        for one in settings
    ]


def fastest(plans: Sequence[LinkPlan]) -> list[LinkPlan]:
    """The plan of each base with the largest τ and the coarsest codec: no other plan of that base is faster."""
    return list({plan.base: plan for plan in sorted(plans, key=lambda plan: plan.risk)}.values())


@lru_cache(maxsize=4)
def all_plans(task: LinkTask) -> tuple[LinkPlan, ...]:
    """Every setting of the search; the cache keeps their simulations."""
    num_layers, num_replicas = task.size.num_layers, len(task.replicas)
    sizes = dict.fromkeys([size for size in LAYERS_PER_FRAGMENT if size < num_layers] + [num_layers])
    combines = ("gather",) if num_replicas <= 2 else ("gather", "reduce_scatter")
    plans: list[LinkPlan] = []
    for sync_every, overlap_steps, wire, combine, size in product(
        SYNC_EVERY, OVERLAP_STEPS, WIRES, combines, sizes
    ):
        if overlap_steps < sync_every and 2 * sync_every <= task.num_steps:  # every replica syncs at least once
            settings = MethodSettings(
                method=_method(overlap_steps, wire),
                sync_every=sync_every,
                overlap_steps=overlap_steps,
                layers_per_fragment=size,
            )
            model = PhysicalModel(
                settings=settings, size=task.size, replicas=task.replicas, wire=wire, combine=combine
            )
            plans.append(LinkPlan(task=task, model=model))
    return tuple(plans)


def _method(overlap_steps: int, wire: str) -> Method:
    """The method whose preset is closest, which decides the mixing α that the trainer takes."""
    if overlap_steps == 0:
        return "streaming"
    overlapped_fp4: Method = "streaming_overlapped_fp4"
    return overlapped_fp4 if wire == PRESETS[overlapped_fp4].wire else "streaming_overlapped"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes each of which alone reaches a target that no plan reaches."""

    best: LinkPlan
    """The plan that comes closest."""
    link_gbit_s: float | None
    """Bandwidth of every link with which the largest H reaches the target; None if no bandwidth is enough."""
    latency_seconds: float | None
    """The largest latency of every link with which a plan reaches the target, to 1 % of the largest that the task
    has; None if none is low enough."""
    step_factor: float | None
    """Factor by which steps must compute longer, with batches as many times as large and as many times fewer
    steps; None if no factor is enough."""


def remedy(task: LinkTask) -> Remedy:
    """The changes that make an infeasible target feasible."""
    plans = sorted(
        fastest(all_plans(task)),
        key=lambda plan: (round(plan.compute_utilization, 6), [-risk for risk in plan.risk]),
        reverse=True,
    )
    longest = max(plan.model.settings.sync_every for plan in plans)
    slowest = max(replica.latency_seconds for replica in task.replicas)
    return Remedy(
        best=plans[0],
        link_gbit_s=_first_that_reaches(
            [plan for plan in plans if plan.model.settings.sync_every == longest],
            _GBIT_S,
            lambda replica, gbit_s: replace(replica, gbit_s=gbit_s),
        ),
        latency_seconds=_first_that_reaches(
            plans,
            [slowest * part / 128 for part in reversed(range(128))],
            lambda replica, seconds: replace(replica, latency_seconds=seconds),
        ),
        # Longer steps lower no utilization; H must still fit twice.
        step_factor=_first_that_reaches(
            plans,
            _FACTORS,
            lambda replica, factor: replace(replica, step_seconds=factor * replica.step_seconds),
            lambda plan, factor: task.num_steps / factor >= 2 * plan.model.settings.sync_every,
        ),
    )


_GBIT_S = np.logspace(-3, 5, 161).tolist()
"""20 points per decade."""
_FACTORS = np.logspace(0, 3, 61).tolist()


def _first_that_reaches(
    plans: Sequence[LinkPlan],
    values: Sequence[float],
    change: Callable[[Replica, float], Replica],
    is_allowed: Callable[[LinkPlan, float], bool] = lambda *_: True,
) -> float | None:
    """The first value with which any plan reaches its target; None if there is none.

    Args:
        plans: those first that are likely to reach it, since a plan is tried with better values than those before.
        values: a plan that reaches the target with one of them reaches it with all later ones.
        change: a replica with one of the values.
        is_allowed: True for the values that a plan may have, which are the first ones.
    """
    first = len(values)
    for plan in plans:

        def reaches_with(value: float, plan: LinkPlan = plan) -> bool:
            replicas = tuple(change(replica, value) for replica in plan.task.replicas)
            return replace(plan, model=replace(plan.model, replicas=replicas)).reaches_target

        better = [value for value in values[:first] if is_allowed(plan, value)]
        if better and reaches_with(better[-1]):
            first = bisect_left(better[:-1], True, key=reaches_with)
    return values[first] if first < len(values) else None
