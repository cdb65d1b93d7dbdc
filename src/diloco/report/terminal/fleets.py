"""The output of `diloco plan` for a fleet: the best plan, why it is not better, and all that nothing beats."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from diloco.auto import MOST_FITTED_REPLICAS
from diloco.fleets.planner import MONTH_HOURS, Answer, FleetPlan, FleetTask, Relaxation
from diloco.report.terminal.tables import new_table
from diloco.scaling.prediction import loss_notes
from diloco.units import amount

_MOST_ROWS = 12
Flags = Callable[[Mapping[str, Any]], str]
"""The words of a command line for a training run's settings."""


def fleet_plan_json(answer: Answer, relaxations: Sequence[Relaxation] | None, *, flags: Flags) -> str:
    """One JSON object: the plan as the closed forms have it and as simulated, and the Pareto set."""
    task, plan = answer.task, answer.plan
    values: dict[str, Any] = {
        "num_params": task.fleet.num_params,
        "num_tokens": task.num_tokens,
        "budget_dollars": _finite(task.budget_dollars),
        "deadline_hours": _finite(task.hours),
        "prices": {"date": task.prices.date, "stores": [asdict(store) for store in task.prices.stores]},
        "plan": None if plan is None else _values(plan, flags),
        "simulated": None if answer.checked is None else _goals(answer.checked),
        "notes": [] if plan is None else _notes(plan),
        "pareto": [_values(one, flags) for one in answer.pareto],
        "least_budget_dollars": _finite(answer.least_dollars),
        "least_deadline_hours": _finite(answer.least_hours),
    }
    if relaxations is not None:
        values["binding"] = [
            {"constraint": one.name, "change": one.change, "plan": _values(one.plan, flags)} for one in relaxations
        ]
    return json.dumps(values, indent=1)


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _goals(plan: FleetPlan) -> dict[str, Any]:
    return {
        "hours": plan.hours,
        "dollars": plan.dollars,
        "machine_dollars": plan.machine_dollars,
        "request_dollars": plan.request_dollars,
        "egress_dollars": plan.egress_dollars,
        "goodput": plan.forecast.goodput,
    }


def _values(plan: FleetPlan, flags: Flags) -> dict[str, Any]:
    run = plan.run
    return {
        "machines": {kind.name: kind.count for kind in run.machines},
        "num_replicas": plan.num_replicas,
        "meeting": _meeting(plan),
        "sync_every": run.sync_every,
        "overlap_steps": run.overlap_steps,
        "num_fragments": run.num_fragments,
        "wire": plan.wire,
        "combine": plan.combine,
        "num_shares": run.shares,
        "outer_learning_rate": plan.outer[0],
        "outer_momentum": plan.outer[1],
        "batch_tokens": plan.num_replicas * run.step_tokens,
        "step_seconds": {kind.name: kind.step_seconds for kind in run.machines},
        "num_steps": plan.num_steps,
        **_goals(plan),
        "loss": plan.loss.value,
        "loss_interval": [plan.loss.low, plan.loss.high],
        "equal_loss_dollars": plan.equal_loss_dollars,
        "settings": plan.train_settings,
        "flags": flags(plan.train_settings),
    }


def fleet_plan_parts(
    answer: Answer,
    relaxations: Sequence[Relaxation] | None,
    *,
    command: Callable[[FleetPlan], str],
    flags: Flags,
) -> Iterator[Table | str]:
    """The answer, its assumptions, the constraints that bind, the Pareto set, and the command of the plan.

    Args:
        answer: to print.
        relaxations: the constraints that bind; None if nobody asked for them.
        command: makes the words before a plan's flags.
        flags: of a plan's settings.
    """
    task, plan, checked = answer.task, answer.plan, answer.checked
    has_limits = not (math.isinf(task.budget_dollars) and math.isinf(task.deadline_hours))
    if plan is None or checked is None:
        yield _sentence_of_none(answer)
        yield from map(_binding, relaxations or ())
        return
    if has_limits:
        yield _sentence(plan, checked)
        yield "\n".join(["", *_facts(task, plan), ""])
    if relaxations is not None:
        yield from map(_binding, relaxations)
        if not relaxations:
            yield "Nothing binds: twice as much of any machine, link, memory, time or budget changes little."
        yield ""
    yield _pareto(answer.pareto)
    yield (
        "No other plan has less loss, hours and dollars than one of these. Dollars are machines, requests and "
        f"egress, by prices of {task.prices.date}; hours and dollars in the table are by closed forms."
    )
    yield from (f"Note: {note}." for note in _notes(plan))
    if has_limits:
        place, name = ("on each", ", without its name,") if plan.store else ("with the same settings on all", "")
        yield (
            f"\nStart it {place} of these machines, or by diloco launch: it is{name} the command of [launch] in a "
            "file with these counts:"
        )
        yield f"    {command(plan)} {flags(plan.train_settings)}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours"


def _upward(value: float, digits: int) -> str:
    """A number that is enough."""
    return f"{math.ceil(value * 10**digits) / 10**digits:,.{digits}f}"


def _meeting(plan: FleetPlan) -> str:
    if plan.num_replicas == 1:
        return "alone"
    return "gloo" if plan.store is None else plan.store.name


def _machines(plan: FleetPlan) -> str:
    return " + ".join(f"{kind.count} × {kind.name}" for kind in plan.run.machines)


def _sentence(plan: FleetPlan, checked: FleetPlan) -> str:
    meeting = {"alone": "", "gloo": " in a fixed group over gloo"}.get(
        _meeting(plan), f" that meet in {_meeting(plan)}"
    )
    return (
        f"Take {_machines(plan)}{meeting}: {_hours(checked.hours)}, {checked.dollars:,.2f} $ "
        f"({checked.machine_dollars:,.2f} for machines, {checked.request_dollars:,.2f} for requests, "
        f"{checked.egress_dollars:,.2f} for egress), goodput {checked.forecast.goodput:.1%}, by simulation "
        f"(closed forms: {_hours(plan.hours)}, {plan.dollars:,.2f} $); expected loss {_loss(plan)}."
    )


def _loss(plan: FleetPlan) -> str:
    return f"{plan.loss.value:.3f} ({plan.loss.low:.3f} to {plan.loss.high:.3f})"


def _facts(task: FleetTask, plan: FleetPlan) -> list[str]:
    run = plan.run
    steps = " and ".join(dict.fromkeys(f"{kind.step_seconds:.4g} s" for kind in run.machines))
    facts = [
        f"model   {amount(run.num_params)} parameters, {amount(plan.num_tokens)} tokens",
        f"batch   {plan.num_replicas * run.step_tokens:,} tokens (the laws of arXiv 2503.09799), "
        f"{run.step_tokens:,} per replica, in {steps}",
        f"steps   {plan.num_steps:,}, with {plan.num_outer_steps:,} outer steps of each of {run.num_fragments} "
        "fragments",
    ]
    if plan.num_replicas > 1:
        facts.append(
            f"sync    H = {run.sync_every}, τ = {run.overlap_steps}, {plan.wire}, {plan.combine}"
            + (f" in {run.shares} shares" if plan.store is not None and run.shares > 1 else "")
            + (f", quorum {run.quorum}, patience H" if plan.store is not None else "")
        )
        facts.append("outer   η = {:g}, μ = {:g} (the rule of outer=auto)".format(*plan.outer))
    if plan.store is not None and (traffic := plan.forecast.traffic_per_hour) is not None:
        facts.append(
            f"store   per hour {traffic.creates:,.0f} creates, {traffic.gets:,.0f} reads, "
            f"{traffic.bytes_up / 1e9:.3g} GB up, {traffic.bytes_down / 1e9:.3g} GB down"
        )
    if math.isinf(task.deadline_hours) and not math.isinf(task.budget_dollars):
        facts.append(f"time    {MONTH_HOURS:.0f} hours at the most, where no deadline is given")
    return facts


def _binding(one: Relaxation) -> str:
    plan = one.plan
    gain = f"loss {_loss(plan)}, {_hours(plan.hours)}, {plan.dollars:,.2f} $ ({_machines(plan)})"
    return f"Bound by {one.name}: {one.change} would give {gain}."


def _pareto(plans: Sequence[FleetPlan]) -> Table:
    """A row for each plan; of many, some, evenly."""
    columns = ("hours", "$", "loss", "goodput", "M", "H", "τ", "P")
    rows = new_table("machines", "meet in", *columns, "wire", "combine", names=2)
    step = max(1, math.ceil(len(plans) / _MOST_ROWS))
    for plan in [*plans[::step], *([plans[-1]] if (len(plans) - 1) % step else [])]:
        run, has_exchange = plan.run, plan.num_replicas > 1
        rows.add_row(
            _machines(plan),
            _meeting(plan),
            f"{plan.hours:,.1f}",
            f"{plan.dollars:,.2f}",
            _loss(plan),
            f"{plan.forecast.goodput:.1%}",
            str(plan.num_replicas),
            str(run.sync_every),
            str(run.overlap_steps) if has_exchange else "",
            str(run.num_fragments),
            plan.wire if has_exchange else "",
            plan.combine if has_exchange else "",
        )
    return rows


def _notes(plan: FleetPlan) -> list[str]:
    notes = loss_notes(plan.run.num_params, plan.num_replicas, plan.run.sync_every, plan.num_tokens)
    if plan.num_replicas > MOST_FITTED_REPLICAS:
        notes.append(f"η and μ are by a rule that was fitted to M up to {MOST_FITTED_REPLICAS}")
    return notes


def _sentence_of_none(answer: Answer) -> str:
    """The limits that no plan keeps, and the smallest of each that would do."""
    task, has_budget = answer.task, not math.isinf(answer.task.budget_dollars)
    limits = [f"ends within {_hours(task.hours)}"] if not math.isinf(task.hours) else []
    limits += [f"costs no more than {task.budget_dollars:,.2f} $"] if has_budget else []
    ways = []
    if has_budget and not math.isinf(answer.least_dollars):
        ways.append(f"a budget of {_upward(answer.least_dollars, 2)} $")
    if not math.isinf(task.hours) and not math.isinf(answer.least_hours):
        ways.append(f"a deadline of {_upward(answer.least_hours, 1)} hours")
    if not ways:
        ways.append(
            f"a budget of {_upward(answer.either[0], 2)} $ without a deadline, or a deadline of "
            f"{_upward(answer.either[1], 1)} hours without a budget"
        )
    return f"No plan {' and '.join(limits)}. This would do: {'; or '.join(ways)}."
