"""The machines and settings of a run: the best within a budget, a deadline, or both, and all that nothing beats.

1. Every set of machines (each subset of the kinds, from the cheapest per token to the dearest, with 1, 2, 3, 4,
   6, 8, … machines) is combined with each H, fragment size, codec, way to combine and meeting point. τ follows
   from the links, the batch from the laws of arXiv 2503.09799, the outer rule from `auto`.
2. Closed forms (`estimates`) give hours and dollars of each plan, the scaling laws its loss.
3. With a budget the plan of least loss is the best; with a deadline alone the one of least dollars at equal loss,

       dollars · (loss / Data-Parallel's loss)^(2/−α),        loss ∝ N^α, compute ∝ N²:

   a higher loss counts as the compute that would make up for it.
4. The event simulation checks the best plans in turn, ten at the most, until one keeps the limits.

A constraint binds if twice as much of it makes the best plan better.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import combinations, product

from diloco.auto import chosen
from diloco.errors import UserError
from diloco.fleets.estimates import (
    Forecast,
    egress_dollars_per_hour,
    group_overlap,
    in_a_group,
    in_a_store,
    simulated,
    store_overlap,
)
from diloco.presets import PRESETS, Method
from diloco.rendezvous.prices import Prices, PriceTable
from diloco.scaling.hyperparameters import hyperparameters
from diloco.scaling.laws import TOKENS_PER_PARAM
from diloco.scaling.power_laws import LAWS, SEQUENCE_LENGTH, Estimate
from diloco.scaling.prediction import expected_loss
from diloco.simulator.description import ModelSize
from diloco.simulator.fleet import FleetRun, Machines
from diloco.simulator.link_planner import WIRES, device_memory_gib
from diloco.units import amount
from diloco.wire.formats import parse

SYNC_EVERY = (30, 50, 100, 200, 500)
"""H: the papers' 30 to 100, and beyond them."""
LAYERS_PER_FRAGMENT = (3, 6, 12)
LEAST_OUTER_STEPS = 10
"""Fewest outer steps of a fragment: below it nothing was fitted (`auto`)."""
MONTH_HOURS = 720.0
"""The deadline where a budget alone is given: one machine alone, for years, has the least loss."""
_MOST_KINDS = 8
_MOST_OBJECT_BYTES = 5e9
"""Size of the largest object that S3 and R2 take, such as a snapshot of Θ and momentum of a fragment."""
_MOST_CHECKS = 10
_METHOD: Method = "streaming_overlapped_fp4"
_QUORUM = "majority"


@dataclass(frozen=True, kw_only=True)
class FleetTask:
    """A model to train, the machines that could, and the limits.

    Raises:
        UserError: if a limit is out of range, or there are too many kinds.
    """

    fleet: FleetRun
    """The machines and the model; of its settings the rules of late replicas and the times of polls are kept."""
    prices: PriceTable
    budget_dollars: float = math.inf
    """The most that the run may cost."""
    deadline_hours: float = math.inf
    """The longest that it may take."""
    least_outer_steps: int = LEAST_OUTER_STEPS
    """Fewest outer steps of a fragment."""

    def __post_init__(self) -> None:
        for name in ("budget_dollars", "deadline_hours"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}", name)
        if len(self.fleet.machines) > _MOST_KINDS:
            raise UserError(
                f"the fleet has {len(self.fleet.machines)} kinds of machines: plan with {_MOST_KINDS} at the most",
                "machines",
            )

    @property
    def num_tokens(self) -> float:
        """Tokens of the run."""
        return self.fleet.num_tokens or TOKENS_PER_PARAM * self.fleet.num_params

    @property
    def hours(self) -> float:
        """The deadline; a month where a budget alone is given."""
        is_open = math.isinf(self.deadline_hours) and not math.isinf(self.budget_dollars)
        return MONTH_HOURS if is_open else self.deadline_hours


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """Machines and settings, and what to expect of them."""

    run: FleetRun
    """The machines that are taken, and their settings; `step_tokens` is a replica's share of the batch."""
    num_tokens: float
    store: Prices | None
    """The store in which replicas meet; None is a fixed group over gloo."""
    layers_per_fragment: int
    wire: str
    offload: bool
    """Θ and outer momentum stay in host memory."""
    forecast: Forecast
    loss: Estimate
    """Expected loss, in nats per token, with the laws' 95 % interval."""

    @property
    def num_replicas(self) -> int:
        """M."""
        return self.run.num_replicas

    @property
    def combine(self) -> str:
        """The reduction: gather or reduce_scatter."""
        return "gather" if self.run.shares == 1 else "reduce_scatter"

    @property
    def num_steps(self) -> int:
        """Inner steps of a replica."""
        return round(self.num_tokens / (self.num_replicas * self.run.step_tokens))

    @property
    def num_outer_steps(self) -> int:
        """Outer steps of a fragment."""
        return self.num_steps // self.run.sync_every

    @property
    def outer(self) -> tuple[float, float]:
        """η and μ of Nesterov's rule, by `auto.chosen`."""
        return chosen(self.num_outer_steps, self.num_replicas, self.run.sync_every, PRESETS[_METHOD].mixing)

    @property
    def hours(self) -> float:
        """Duration of the run."""
        return self.num_tokens / self.forecast.tokens_per_hour

    @property
    def machine_dollars(self) -> float:
        """The price of the machines."""
        return self.hours * self.forecast.machine_dollars_per_hour

    @property
    def request_dollars(self) -> float:
        """The price of the store's requests."""
        if self.store is None or self.forecast.traffic_per_hour is None:
            return 0.0
        return self.hours * replace(self.forecast.traffic_per_hour, bytes_down=0.0).dollars(self.store)

    @property
    def egress_dollars(self) -> float:
        """The price of the bytes that leave a cloud."""
        return self.hours * egress_dollars_per_hour(self.run, self.store, self.forecast)

    @cached_property
    def dollars(self) -> float:
        """The price of the run."""
        return self.machine_dollars + self.request_dollars + self.egress_dollars

    @property
    def equal_loss_dollars(self) -> float:
        """The price at equal loss: that of the run, and of the compute that would make up for its higher loss."""
        baseline = expected_loss(self.run.num_params, 1, SYNC_EVERY[0]).value
        return self.dollars * (self.loss.value / baseline) ** (2 / -LAWS["loss"][0].exponent)

    @property
    def risk(self) -> tuple[float, ...]:
        """The settings that may cost quality and that the laws do not know, each the smaller the better."""
        bits = parse(self.wire).bits_per_value
        return self.run.overlap_steps, -bits, self.run.shares, self.layers_per_fragment

    @property
    def train_settings(self) -> dict[str, str | int | float | bool]:
        """The settings of a training run that follows this plan, by dotted field name of `TrainConfig`."""
        run = self.run
        rate, momentum = self.outer
        settings: dict[str, str | int | float | bool] = {
            "method": _METHOD,
            "num_replicas": self.num_replicas,
            "global_batch": self.num_replicas * run.step_tokens // SEQUENCE_LENGTH,
            "sequence_length": SEQUENCE_LENGTH,
            "num_tokens": round(self.num_tokens),
            "diloco.sync_every": run.sync_every,
            "diloco.overlap_steps": run.overlap_steps,
            "diloco.layers_per_fragment": self.layers_per_fragment,
            "diloco.wire": self.wire,
            "diloco.combine": self.combine,
            "diloco.outer_learning_rate": rate,
            "diloco.outer_momentum": momentum,
        }
        if self.offload:
            settings["diloco.offload"] = True
        if self.store is not None:
            settings["elastic.quorum"] = run.quorum
            settings["elastic.patience"] = run.sync_every if run.patience is None else run.patience
            if run.shares > 1:
                settings["elastic.num_shares"] = run.shares
            if self.num_replicas > _NUM_SLOTS:
                settings["elastic.num_slots"] = 2 * self.num_replicas
        return settings


_NUM_SLOTS = 64
"""Replicas that a run allows where nothing is set."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A constraint, and the best plan with twice as much of it."""

    name: str
    """memory, uplink, downlink, machines, outer steps, budget or deadline."""
    change: str
    """The change in words."""
    plan: FleetPlan
    """The best plan then."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plan of a task."""

    task: FleetTask
    plan: FleetPlan | None
    """None if no plan keeps the limits."""
    checked: FleetPlan | None = None
    """The same with the forecast of the event simulation."""
    pareto: Sequence[FleetPlan] = field(default=())
    """The plans within the limits of which no other is better in loss, dollars and hours, the fastest first."""
    least_dollars: float = math.inf
    """The smallest budget that would do with this deadline."""
    least_hours: float = math.inf
    """The smallest deadline that would do with this budget."""
    either: tuple[float, float] = (math.inf, math.inf)
    """The smallest budget without a deadline, and the smallest deadline without a budget."""


def answer(task: FleetTask) -> Answer:
    """The best plan, checked by simulation, and the Pareto set.

    Raises:
        UserError: if no plan could exist on these machines, whatever the limits; it names the reason.
    """
    plans = all_plans(task)
    within = _within(plans, task)
    for plan, checked in _simulated(sorted(within, key=lambda plan: _rank(plan, task))):
        if _within([checked], task):
            return Answer(task=task, plan=plan, checked=checked, pareto=pareto(within))
    return Answer(
        task=task,
        plan=None,
        least_dollars=_least("dollars", plans, lambda plan: plan.hours <= task.hours),
        least_hours=_least("hours", plans, lambda plan: plan.dollars <= task.budget_dollars),
        either=(_least("dollars", plans), _least("hours", plans)),
    )


def _simulated(plans: Sequence[FleetPlan]) -> Iterator[tuple[FleetPlan, FleetPlan]]:
    """The first plans, of those that are alike one, ten at the most, each with what the simulation forecasts."""
    tried = set[tuple[float, ...]]()
    for plan in plans:
        if (goals := _goals(plan)) in tried:
            continue
        if len(tried) == _MOST_CHECKS:
            return
        tried.add(goals)
        if (checked := _checked(plan)) is not None:
            yield plan, checked


def _least(name: str, plans: Sequence[FleetPlan], keeps: Callable[[FleetPlan], bool] = lambda plan: True) -> float:
    """The least dollars or hours of plans that keep a limit, by closed forms and simulation; infinity for none."""
    for plan, checked in _simulated(sorted(filter(keeps, plans), key=lambda plan: getattr(plan, name))):
        if keeps(checked):
            return max(getattr(plan, name), getattr(checked, name))
    return math.inf


def explain(task: FleetTask, best: FleetPlan | None) -> list[Relaxation]:
    """The constraints that bind: with twice as much of each the best plan is better, the most useful first.

    Args:
        task: the task.
        best: its plan; None if no plan keeps the limits, and those constraints bind with which one does.
    """
    fleet, relaxations = task.fleet, list[Relaxation]()
    for name, change, relaxed in _relaxed(task, fleet):
        plans = _within(_plans_or_none(relaxed), relaxed)
        if plans:
            plan = min(plans, key=lambda plan: _rank(plan, relaxed))
            if best is None or _goal(plan, task) < (1 - _LEAST_GAIN) * _goal(best, task):
                relaxations.append(Relaxation(name=name, change=change, plan=plan))
    return sorted(relaxations, key=lambda one: _rank(one.plan, task))


def _relaxed(task: FleetTask, fleet: FleetRun) -> Iterator[tuple[str, str, FleetTask]]:
    """Each constraint's name, the change, and the task with twice as much of it."""

    def of_machines(*names: str) -> FleetTask:
        kinds = (replace(k, **{name: 2 * getattr(k, name) for name in names}) for k in fleet.machines)
        return replace(task, fleet=replace(fleet, machines=tuple(kinds)))

    yield "memory", "twice the memory", of_machines("memory_gib")
    yield "uplink", "twice the bandwidth up", of_machines("up_mbit_s")
    yield "downlink", "twice the bandwidth down", of_machines("down_mbit_s")
    yield "machines", "twice as many machines", of_machines("count")
    half = max(1, task.least_outer_steps // 2)
    yield (
        "outer steps",
        f"{half} outer steps instead of {task.least_outer_steps}",
        replace(task, least_outer_steps=half),
    )
    if not math.isinf(task.budget_dollars):
        yield "budget", "twice the budget", replace(task, budget_dollars=2 * task.budget_dollars)
    if not math.isinf(task.hours):
        yield "deadline", "twice the time", replace(task, deadline_hours=2 * task.hours)


def _plans_or_none(task: FleetTask) -> Sequence[FleetPlan]:
    try:
        return all_plans(task)
    except UserError:
        return ()


def _goals(plan: FleetPlan) -> tuple[float, ...]:
    return _digits(plan.hours, 3), _digits(plan.dollars, 3), _digits(plan.loss.value, 4)


def _rank(plan: FleetPlan, task: FleetTask) -> tuple[float, ...]:
    """The order of plans, the best first; numbers that differ by less than they are known count as equal."""
    dollars = _digits(plan.equal_loss_dollars, 3)
    goals = (dollars, _digits(plan.loss.value, 5))
    if not math.isinf(task.budget_dollars):
        goals = goals[::-1]
    return *goals, _digits(plan.hours, 3), *plan.risk


_LEAST_GAIN = 0.01
"""Part of the dollars at equal loss that a relaxed constraint must save in order to bind."""


def _goal(plan: FleetPlan, task: FleetTask) -> float:
    """The number that is least for the best plan: dollars at equal loss, or the part of them that is the loss."""
    is_free = not math.isinf(task.budget_dollars)
    return plan.equal_loss_dollars / plan.dollars if is_free else plan.equal_loss_dollars


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _within(plans: Sequence[FleetPlan], task: FleetTask) -> list[FleetPlan]:
    return [p for p in plans if p.dollars <= task.budget_dollars and p.hours <= task.hours]


def _checked(plan: FleetPlan) -> FleetPlan | None:
    """The plan with the forecast of the simulation; None if its replicas never come to an outer step."""
    try:
        return replace(plan, forecast=simulated(plan.run, is_in_store=plan.store is not None))
    except UserError:
        return None


def pareto(plans: Sequence[FleetPlan]) -> list[FleetPlan]:
    """The plans of which no other is better in loss, dollars and hours, to three digits; the fastest first."""
    best: dict[tuple[float, ...], FleetPlan] = {}
    for plan in plans:
        goals = _goals(plan)
        if goals not in best or plan.risk < best[goals].risk:
            best[goals] = plan
    kept: list[tuple[float, ...]] = []
    for goals in sorted(best):  # one that is beaten is beaten by one before it
        if not any(all(a <= b for a, b in zip(other, goals, strict=True)) for other in kept):
            kept.append(goals)
    return [best[goals] for goals in kept]


def all_plans(task: FleetTask) -> Sequence[FleetPlan]:
    """Every plan of the search, whatever it costs.

    Raises:
        UserError: if there is none, naming the reason.
    """
    return _all_plans(task.fleet, task.prices, task.num_tokens, task.least_outer_steps)


@lru_cache(maxsize=16)
def _all_plans(
    fleet: FleetRun, prices: PriceTable, num_tokens: float, least_outer_steps: int
) -> Sequence[FleetPlan]:
    """The search: each set of machines with each H, fragment size, codec, way to combine and meeting point."""
    num_layers = ModelSize(num_params=fleet.num_params).num_layers
    # Not a fragment larger than the model, which the smallest size is.
    sizes = dict.fromkeys(min(size, num_layers) for size in LAYERS_PER_FRAGMENT)
    plans, is_long_enough = list[FleetPlan](), False
    for machines in machine_choices(fleet):
        num_replicas = sum(kind.count for kind in machines)
        step_tokens = _step_tokens(fleet.num_params, num_replicas)
        num_steps = num_tokens / (num_replicas * step_tokens)
        for sync_every, size in product(SYNC_EVERY, sizes):
            if num_steps < least_outer_steps * sync_every:
                continue
            is_long_enough = True
            if (offload := _needs_offload(fleet.num_params, machines, size)) is None:
                continue
            base = _run(fleet, machines, step_tokens, sync_every, -(-num_layers // size) + 1)
            loss = expected_loss(fleet.num_params, num_replicas, sync_every)
            snapshot_bytes = 8 * _largest_fragment(fleet.num_params, size)
            stores = prices.stores if snapshot_bytes <= _MOST_OBJECT_BYTES else ()
            for run, store, wire, forecast in _ways(base, stores):
                plan = FleetPlan(
                    run=run,
                    num_tokens=num_tokens,
                    store=store,
                    layers_per_fragment=size,
                    wire=wire,
                    offload=offload,
                    forecast=forecast,
                    loss=loss,
                )
                plans.append(plan)
    if not plans:
        raise _impossible(fleet, num_tokens, least_outer_steps, is_long_enough=is_long_enough)
    return plans


def machine_choices(fleet: FleetRun) -> list[tuple[Machines, ...]]:
    """Sets of machines, each kind with the number that is taken of it.

    >>> home = Machines(name="4090", count=5, step_seconds=1, up_mbit_s=20, down_mbit_s=100)
    >>> fleet = FleetRun(machines=(home,), num_params=1e9, step_tokens=4096)
    >>> [kinds[0].count for kinds in machine_choices(fleet)]
    [1, 2, 3, 4, 5]
    """
    kinds = sorted(fleet.machines, key=lambda kind: (kind.dollars_per_hour * kind.step_seconds, kind.step_seconds))
    choices: dict[tuple[int, ...], tuple[Machines, ...]] = {}
    for size in range(1, len(kinds) + 1):
        for some in combinations(kinds, size):
            most = sum(kind.count for kind in some)
            for total in sorted({number for number in _LEVELS if number < most} | {most}):
                left, taken = total, list[Machines]()
                for kind in some:
                    number = min(left, kind.count)
                    left -= number
                    taken += [replace(kind, count=number)] if number else []
                counts = tuple(next((t.count for t in taken if t.name == kind.name), 0) for kind in kinds)
                choices.setdefault(counts, tuple(taken))
    return [*choices.values()]


_LEVELS = sorted({number << octave for octave in range(16) for number in (2, 3)} | {1})
"""1, 2, 3, 4, 6, 8, 12, 16, …"""


@cache
def _step_tokens(num_params: float, num_replicas: int) -> int:
    """A replica's share of the batch that the laws give: a power of two of sequences."""
    laws = hyperparameters("streaming_overlapped", num_params, num_replicas)
    return laws.sequences(num_replicas, SEQUENCE_LENGTH) // num_replicas * SEQUENCE_LENGTH


def _needs_offload(num_params: float, machines: Sequence[Machines], layers_per_fragment: int) -> bool | None:
    """True if Θ and momentum must be in host memory; None if the model fits in neither way."""
    most = min(kind.memory_gib for kind in machines)
    ways = (False, True)
    return next((way for way in ways if _memory_gib(num_params, layers_per_fragment, offload=way) <= most), None)


def _memory_gib(num_params: float, layers_per_fragment: int, *, offload: bool) -> float:
    """Parameters, gradients, Adam's moments, Θ and momentum, and the 2.5 vectors of a sync (speed.md, Memory)."""
    fragment = _largest_fragment(num_params, layers_per_fragment)
    state_gib = device_memory_gib(num_params, fragment if offload else num_params)
    return state_gib + 4 * (num_params + 2.5 * fragment) / 2**30


def _largest_fragment(num_params: float, layers_per_fragment: int) -> float:
    """The parameters of the largest fragment."""
    size = ModelSize(num_params=num_params)
    return max(size.outside_params, min(layers_per_fragment, size.num_layers) * size.block_params)


def _run(
    fleet: FleetRun, machines: Sequence[Machines], step_tokens: int, sync_every: int, num_fragments: int
) -> FleetRun:
    """The fleet's run with these machines, whose steps take as much longer as they read more tokens."""
    times = step_tokens / fleet.step_tokens
    return replace(
        fleet,
        machines=tuple(replace(kind, step_seconds=times * kind.step_seconds) for kind in machines),
        step_tokens=step_tokens,
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=1,
        quorum=_QUORUM,
        patience=None,
    )


def _ways(base: FleetRun, stores: Sequence[Prices]) -> Iterator[tuple[FleetRun, Prices | None, str, Forecast]]:
    """The run with each codec and way to combine, as a fixed group and in each store."""
    num_replicas = base.num_replicas
    can_connect = num_replicas == 1 or all(kind.has_open_port for kind in base.machines)
    for wire in WIRES if num_replicas > 1 else WIRES[:1]:
        bits = parse(wire).bits_per_value
        for shares in dict.fromkeys((1, *(min(num_replicas, most) for most in _SHARES))):
            run = replace(base, bits_per_value=bits, shares=shares)
            if can_connect:
                run = replace(run, overlap_steps=group_overlap(run))
                yield run, None, wire, in_a_group(run)
            if num_replicas > 1 and (overlap_steps := store_overlap(run)) is not None:
                run = replace(run, overlap_steps=overlap_steps)
                forecast = in_a_store(run)
                yield from ((run, store, wire, forecast) for store in stores)


_SHARES = (16, 64)


def _impossible(fleet: FleetRun, num_tokens: float, least: int, *, is_long_enough: bool) -> UserError:
    """The reason why no plan exists on these machines."""
    largest = max(kind.memory_gib for kind in fleet.machines)
    needed = _memory_gib(fleet.num_params, LAYERS_PER_FRAGMENT[0], offload=True)
    if needed > largest:
        return UserError(
            f"a replica of {amount(fleet.num_params)} parameters needs at least {needed:.3g} GiB, with the outer "
            f"parameters in host memory, and the largest machine has {largest:g}: give machines with more "
            "memory_gib, or several GPUs as one machine",
            *("memory_gib", "num_params"),
        )
    if not is_long_enough:
        return UserError(
            f"num_tokens={amount(num_tokens)} are too few for {least} outer steps of {SYNC_EVERY[0]} inner steps "
            "with the batch of the laws: train on more",
            "num_tokens",
        )
    return UserError(
        "no link carries the outer gradients in time, not even with sync_every="
        f"{SYNC_EVERY[-1]}: give faster links, up_mbit_s and down_mbit_s",
        *("up_mbit_s", "down_mbit_s"),
    )
