"""What run does my link allow, and what link does my run need: a search over H, τ, fragment size and codec."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from diloco.errors import UserError
from diloco.simulator.bandwidth import reaches
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica
from diloco.simulator.volume import bits_per_param

SYNC_EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
OVERLAP_STEPS = (0, 1, 2, 5, 10, 20)
WIRES = ("fp32", "bf16", "int8", "e3m0")
"""Without a cost to quality that was measured, finest first; what is coarser has one."""
LAYERS_PER_FRAGMENT = (3, 2, 4, 1, 6, 8, 12)
"""By preference: the paper finds 3 the best compromise."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What shall be trained, on what.

    Raises:
        UserError: if it can't be; the message names the field.
    """

    size: ModelSize
    """The model."""
    replicas: tuple[Replica, ...]
    """Their step times and links; every link has a bandwidth."""
    num_steps: int
    """T, of the whole run."""
    target: float = 0.95
    """Compute utilization to be reached."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if not 0 < self.target < 1:
            raise UserError(f"target must be above 0 and below 1, not {self.target}")
        if self.num_steps < 2 * SYNC_EVERY[0]:
            raise UserError(
                f"num_steps={self.num_steps}: so short a run is over before replicas that sync every "
                f"{SYNC_EVERY[0]} steps have done so twice"
            )
        if any(replica.gbit_s is None for replica in self.replicas):
            raise UserError("link_gbit_s: each replica's link needs a bandwidth")

    @property
    def most_utilization(self) -> float:
        """What the slowest replica leaves the others, whatever the links."""
        times = [replica.step_seconds for replica in self.replicas]
        return float(np.mean(times) / max(times))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One setting, and what to expect of it."""

    task: Task
    model: PhysicalModel

    @property
    def risk(self) -> tuple[int, int, float, bool]:
        """What may cost quality, the smaller the better: H, τ, coarseness of the codec, a second rounding."""
        settings = self.model.settings
        assert isinstance(settings.overlap_steps, int)
        return settings.sync_every, settings.overlap_steps, -bits_per_param(self.wire), self.combine != "gather"

    @property
    def cut(self) -> tuple[int, int, str]:
        """What more overlap or a coarser codec can't make slower: H, fragment size, way to combine."""
        return self.model.settings.sync_every, self.model.settings.layers_per_fragment, self.combine

    @property
    def wire(self) -> str:
        """The codec."""
        return self.model.wire or self.model.settings.wire

    @property
    def combine(self) -> str:
        """How payloads are combined."""
        return self.model.combine

    @cached_property
    def compute_utilization(self) -> float:
        """In the steady state."""
        return float(self.model.compute_utilization([1.0])[0])

    @property
    def reaches_target(self) -> bool:
        """Whether that is enough."""
        return bool(reaches(np.array(self.compute_utilization), self.task.target))

    @property
    def hours(self) -> float:
        """Of the whole run."""
        mean = float(np.mean([replica.step_seconds for replica in self.task.replicas]))
        return self.task.num_steps * mean / self.compute_utilization / 3600

    @property
    def terabytes(self) -> float:
        """That each replica sends in the whole run."""
        period = self.model.schedule.sync_every
        num_params = sum(
            size * max(0, 1 + (self.task.num_steps - self.model.schedule.send_step(fragment)) // period)
            for fragment, size in enumerate(self.model.fragment_params)
        )
        return self._bytes_per_param * num_params / 1e12

    @property
    def peak_gbit_s(self) -> float | None:
        """The least bandwidth at which training never waits, latency apart; None without overlap: it always does.

        Whatever is due from step s on must have arrived τ steps after step t, with all that was sent up to then in
        the order of the schedule: the worst stretch from s to t decides. Steps are those of the slowest replica,
        for which the others wait.
        """
        if not self.model.schedule.max_overlap:
            return None
        schedule, sizes = self.model.schedule, self.model.fragment_params
        steps = np.array([schedule.send_step(fragment) for fragment in range(len(sizes))] * 2)
        steps[len(sizes) :] += schedule.sync_every
        steps, params = steps[order := np.argsort(steps, kind="stable")], np.array(sizes * 2)[order]
        sent = params.cumsum()
        stretches = [
            (sent[i:] - sent[i] + params[i]) / (steps[i:] - steps[i] + schedule.max_overlap)
            for i in range(len(sizes))
        ]
        on_average = self.task.size.num_params / schedule.sync_every
        longest = max(replica.step_seconds for replica in self.task.replicas)
        return float(8e-9 * self._bytes_per_param * max(on_average, *map(np.max, stretches)) / longest)

    @property
    def _bytes_per_param(self) -> float:
        return self.model.bytes_sent_per_sync / self.task.size.num_params

    @property
    def flags(self) -> str:
        """Of `diloco train` for this setting."""
        settings = self.model.settings
        flags = {
            "method": "streaming",
            "num-replicas": len(self.task.replicas),
            "diloco.sync-every": settings.sync_every,
            "diloco.overlap-steps": settings.overlap_steps,
            "diloco.layers-per-fragment": settings.layers_per_fragment,
            "diloco.wire": self.wire,
            "diloco.combine": self.combine,
        }
        return " ".join(f"--{name} {value}" for name, value in flags.items())

    def device_memory_gib(self, *, offload: bool = False) -> float:
        """Of a replica: FP32 parameters, Adam's two moments, Θ and outer momentum; gradients, activations apart.

        With `offload`, the outer state of one fragment at a time is on the device.
        """
        outside = max(self.model.fragment_params) if offload else self.task.size.num_params
        return 4 * (3 * self.task.size.num_params + 2 * outside) / 2**30


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What would reach a target that the task's links don't allow."""

    best: Plan
    """The setting that comes closest."""
    link_gbit_s: float | None
    """A bandwidth, of every link, with which the largest H reaches it; None: bandwidth alone can't."""
    latency_seconds: float | None
    """The most latency, of every link, with which the best setting reaches it; None: it doesn't without any."""
    step_factor: float | None
    """How many times as long steps must compute, with batches as many times as large and fewer of them; None: it
    can't be reached so."""


def feasible(task: Task) -> list[Plan]:
    """The settings that reach the target, the least risky first.

    Left out is what another one beats, with less risk in one respect and no more in any; of several fragment sizes
    with the same risk, the one that is preferred stays.
    """
    plans = _plans(task)
    hopeful = {plan.cut for plan in _boldest(plans) if plan.reaches_target}
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.risk):
        beaten = any(all(a <= b for a, b in zip(other.risk, plan.risk, strict=True)) for other in found)
        if plan.cut in hopeful and not beaten and plan.reaches_target:
            found.append(plan)
    return found


def _boldest(plans: Sequence[Plan]) -> list[Plan]:
    """Of the plans that cut a run alike, the one with the largest τ and the coarsest codec: none is faster."""
    return list({plan.cut: plan for plan in sorted(plans, key=lambda plan: plan.risk)}.values())


def remedy(task: Task) -> Remedy:
    """What would make a target feasible that isn't."""
    plans = _boldest(_plans(task))
    best = max(plans, key=lambda plan: (round(plan.compute_utilization, 6), [-risk for risk in plan.risk]))
    longest = max(plan.risk[0] for plan in plans)
    enough = [_least_bandwidth(plan) for plan in plans if plan.risk[0] == longest]
    return Remedy(
        best=best,
        link_gbit_s=min((gbit_s for gbit_s in enough if gbit_s is not None), default=None),
        latency_seconds=_most_latency(best),
        step_factor=min(filter(None, map(_least_step_factor, plans)), default=None),
    )


@lru_cache(maxsize=4)
def _plans(task: Task) -> tuple[Plan, ...]:
    """All settings that are looked at; each is simulated once."""
    num_layers, num_replicas = task.size.num_layers, len(task.replicas)
    sizes = dict.fromkeys([size for size in LAYERS_PER_FRAGMENT if size < num_layers] + [num_layers])
    ways = ("gather",) if num_replicas <= 2 else ("gather", "reduce_scatter")
    plans: list[Plan] = []
    for sync_every, overlap, wire, combine, size in product(SYNC_EVERY, OVERLAP_STEPS, WIRES, ways, sizes):
        if overlap < sync_every and 2 * sync_every <= task.num_steps:  # or some replicas never meet
            settings = MethodSettings(
                method="streaming_overlapped",
                sync_every=sync_every,
                overlap_steps=overlap,
                layers_per_fragment=size,
            )
            model = PhysicalModel(
                settings=settings, size=task.size, replicas=task.replicas, wire=wire, combine=combine
            )
            plans.append(Plan(task=task, model=model))
    return tuple(plans)


def _least_bandwidth(plan: Plan) -> float | None:
    links = tuple(replace(replica, gbit_s=None) for replica in plan.task.replicas)
    utilization = replace(plan.model, replicas=links).compute_utilization(_GBIT_S)
    enough = np.flatnonzero(reaches(utilization, plan.task.target))
    return float(_GBIT_S[enough[0]]) if enough.size else None


_GBIT_S = np.logspace(-3, 5, 161)
"""20 points a decade."""


def _most_latency(plan: Plan) -> float | None:
    def is_little_enough(latency_seconds: float) -> bool:
        return _would_reach(plan, lambda replica: replace(replica, latency_seconds=latency_seconds))

    if not is_little_enough(0.0):
        return None
    least, most = 0.0, max(replica.latency_seconds for replica in plan.task.replicas)
    precise = 0.01 * most
    while most - least > precise:
        middle = (least + most) / 2
        least, most = (middle, most) if is_little_enough(middle) else (least, middle)
    return least


def _least_step_factor(plan: Plan) -> float | None:
    """By halves, as longer steps never make utilization less; the run must still have room for H twice."""
    allowed = _FACTORS[plan.task.num_steps / _FACTORS >= 2 * plan.model.settings.sync_every]

    def is_enough(factor: float) -> bool:
        return _would_reach(plan, lambda replica: replace(replica, step_seconds=factor * replica.step_seconds))

    if not allowed.size or not is_enough(allowed[-1]):
        return None
    return float(allowed[bisect_left(allowed, True, key=is_enough)])


_FACTORS = np.logspace(0, 3, 61)


def _would_reach(plan: Plan, change: Callable[[Replica], Replica]) -> bool:
    replicas = tuple(map(change, plan.task.replicas))
    return replace(plan, model=replace(plan.model, replicas=replicas)).reaches_target
