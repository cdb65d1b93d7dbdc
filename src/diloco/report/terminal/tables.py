"""The output of `diloco plan`, `diloco simulate` and `diloco bench wire`: tables, and the same numbers as JSON."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from diloco.errors import UserError
from diloco.rendezvous.prices import PROVIDERS, R2
from diloco.report.terminal.screen import Screen
from diloco.simulator.description import GBIT_S
from diloco.simulator.fleet import Outcome
from diloco.simulator.link_planner import MOST_LOAD, LinkPlan, LinkTask, Remedy, feasible, presets, remedy
from diloco.simulator.published import (
    OVERTRAINING_COSTS,
    TARGETS,
    WALL_CLOCK_GBIT_S,
    WALL_CLOCK_HOURS,
    Cell,
    bandwidth_tables,
    overtraining_table,
    wall_clock_table,
)
from diloco.simulator.wall_clock import IdealizedRun
from diloco.units import rate

if TYPE_CHECKING:
    from diloco.training.measure import WireMeasurement

BEYOND = "1000+"
"""A bandwidth above the grid's largest."""


def show(parts: Iterable[Table | str]) -> None:
    """Print tables and sentences, wide enough for the tables even where the output is no terminal."""
    console = Screen()
    console = console if console.is_terminal else Screen(width=120)
    for part in parts:
        console.print(part, highlight=not isinstance(part, str), markup=False, soft_wrap=isinstance(part, str))


def new_table(*columns: str, names: int = 1, title: str | None = None) -> Table:
    """A table of numbers, beside `names` columns of text."""
    table = Table(*columns[:names], box=None, header_style="bold", title=title)
    for column in columns[names:]:
        table.add_column(column, justify="right")
    return table


def bandwidth_json(needed: Mapping[str, float | None]) -> str:
    """Gbit/s by target, as JSON; the targets as they were typed."""
    return json.dumps({"gbit_s": {t: BEYOND if gbit_s is None else gbit_s for t, gbit_s in needed.items()}})


def strict_json(values: Mapping[str, float]) -> str:
    """Numbers as JSON, which has none for infinity.

    Raises:
        UserError: if one is not finite.
    """
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        raise UserError("the result is no finite number: take settings of this world") from None


def utilization_json(compute_utilization: float) -> str:
    """A compute utilization as JSON."""
    return strict_json({"compute_utilization": compute_utilization})


def bandwidth_table(needed: Mapping[str, float | None]) -> Table:
    """A row for each target."""
    table = new_table("compute utilization", "Gbit/s")
    for target, gbit_s in needed.items():
        # Below the grid's smallest bandwidth nothing was tried.
        table.add_row(target, ("≤ " if gbit_s == GBIT_S[0] else "") + _gbit_s(gbit_s))
    return table


def published() -> Iterator[Table | str]:
    """The papers' tables, with our numbers beside their own."""
    for source, rows in bandwidth_tables().items():
        title = f"{source}: Gbit/s for a utilization"
        table = new_table("model", "method", *(f"{target:.0%}" for target in TARGETS), names=2, title=title)
        for (size, method), row in rows.items():
            table.add_row(size, method, *map(_cell, row))
        yield table
        distances = [abs(cell.distance) for row in rows.values() for cell in row]
        yield (
            f"Published · simulated, and points of the grid between them: {distances.count(0)} of "
            f"{len(distances)} are exact (=), {distances.count(1)} are one point off, "
            f"{sum(distance > 1 for distance in distances)} more.\n"
        )
    title = "arXiv 2501.18512, Table 1: hours of a run of 186,250 steps of the 1B model"
    hours = new_table("method", *(f"{gbit_s:g} Gbit/s" for gbit_s in WALL_CLOCK_GBIT_S), title=title)
    for method, row in wall_clock_table().items():
        hours.add_row(method, *_beside(WALL_CLOCK_HOURS[method], row))
    yield hours
    yield "Published · simulated. The volume that fits data_parallel's bandwidths does not give its hours.\n"
    title = "arXiv 2501.18512, Tables 2 and 8: the 1B model overtrained"
    costs = new_table("method", "M", "tokens", "hours", "hours, 1 Gbit/s", "Tibit", names=3, title=title)
    for (method, num_replicas, billions), cost in overtraining_table().items():
        published = OVERTRAINING_COSTS[method, num_replicas, billions]
        costs.add_row(method, str(num_replicas), f"{billions}·10⁹", *_beside(published, cost))
    yield costs
    yield "Published · simulated."


def _cell(cell: Cell) -> str:
    distance = f"{cell.distance:+d}" if cell.distance else "="
    return f"{_gbit_s(cell.published)} · {_gbit_s(cell.ours)} {distance}"


def _beside(published: Sequence[float | None], row: Sequence[float | None]) -> list[str]:
    """Each number beside ours; ours alone where the paper prints none."""
    return [
        f"{p:g} · {ours:.2f} ({ours / p - 1:+.0%})" if p else f"{ours:.2f}"
        for p, ours in zip(published, row, strict=True)
        if ours is not None
    ]


def _gbit_s(gbit_s: float | None) -> str:
    return BEYOND if gbit_s is None or math.isinf(gbit_s) else f"{gbit_s:.4g}"


def wall_clock_json(run: IdealizedRun) -> str:
    """The seconds of each part, as JSON."""
    parts = {name: getattr(run, f"{name}_seconds") for name in ("compute", "inside", "between")}
    return strict_json({f"{name}_seconds": value for name, value in parts.items()} | {"seconds": run.seconds})


def hours_table(run: IdealizedRun) -> Table:
    """A row for each part."""
    table = new_table("part", "hours")
    table.add_row("compute", f"{run.compute_seconds / 3600:,.2f}")
    table.add_row("gradients, at every step", f"{run.inside_seconds / 3600:,.2f}")
    table.add_row("outer gradients, as far as training waits", f"{run.between_seconds / 3600:,.2f}")
    table.add_row("together", f"{run.seconds / 3600:,.2f}")
    return table


def fleet_json(outcomes: Sequence[Outcome]) -> str:
    """One JSON object per method; numbers that a method does not have are null."""
    rows = [asdict(outcome) | {"dollars": outcome.dollars(R2)} for outcome in outcomes]
    return json.dumps([{name: _number(value) for name, value in row.items()} for row in rows], indent=1)


def _number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_number(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def fleet_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each method."""
    columns = ("goodput", "tokens per hour", "counted", "rounds late", "send to decided, s")
    table = new_table(
        "method",
        *columns,
        f"$ per 10⁹ tokens,\nstore: {R2.name}",
        title=f"{outcomes[0].seconds / 3600:,.1f} hours",
    )
    for outcome in outcomes:
        dollars, tokens = outcome.dollars(R2), outcome.tokens_per_hour * outcome.seconds / 3600
        table.add_row(
            outcome.method.replace("_", "-"),
            f"{outcome.goodput:.1%}",
            f"{outcome.tokens_per_hour:,.0f}",
            f"{outcome.contributors:,.1f}",
            f"{outcome.staleness:.2f}",
            "{:,.1f}, p99 {:,.1f}".format(*outcome.decided_seconds) if outcome.traffic else "",
            f"{dollars / tokens * 1e9:,.2f}" if tokens else "",
        )
    return table


def link_plan_json(task: LinkTask, facts: Sequence[str], *, command: str, flags: Callable[[LinkPlan], str]) -> str:
    """One JSON object: the task, the settings (the least risky first), and a remedy where there are none."""
    plans = feasible(task)
    help_ = None if plans else remedy(task)
    rows = presets(task, sync_every=_period(plans, help_))
    answer: dict[str, Any] = {
        "target": task.target,
        "num_steps": task.num_steps,
        "replicas": [asdict(replica) for replica in task.replicas],
        "most_utilization": task.most_utilization,
        "facts": [*facts],
        "methods": [
            {
                "method": row.model.settings.method,
                "needed_gbit_s": row.needed_gbit_s,
                "compute_utilization": row.compute_utilization,
                "hours": row.hours,
            }
            for row in rows
        ],
        "plans": [_values(plan, command, flags(plan)) for plan in plans],
    }
    if help_ is not None:
        answer["remedy"] = {
            "best": _values(help_.best, command, flags(help_.best)),
            "link_gbit_s": help_.link_gbit_s,
            "latency_seconds": help_.latency_seconds,
            "step_factor": help_.step_factor,
        }
    return json.dumps(answer, indent=1)


def _period(plans: Sequence[LinkPlan], help_: Remedy | None) -> int:
    """H of the best plan, at which the methods are compared."""
    best = plans[0] if help_ is None else help_.best
    return best.model.settings.sync_every


def _values(plan: LinkPlan, command: str, flags: str) -> dict[str, Any]:
    settings, traffic = plan.model.settings, plan.store_traffic_a_day
    return {
        "sync_every": settings.sync_every,
        "overlap_steps": settings.overlap_steps,
        "layers_per_fragment": settings.layers_per_fragment,
        "wire": plan.wire,
        "combine": plan.combine,
        "compute_utilization": plan.compute_utilization,
        "hours": plan.hours,
        "terabytes": plan.terabytes,
        "store_a_day": {
            "terabytes_down": traffic.bytes_down / 1e12,
            "requests": traffic.creates + traffic.gets,
            "dollars": {prices.name: traffic.dollars(prices) for prices in PROVIDERS},
        },
        "peak_gbit_s": plan.peak_gbit_s,
        "device_memory_gib": plan.device_memory_gib(),
        "device_memory_offload_gib": plan.device_memory_gib(offload=True),
        "flags": flags,
        "command": f"{command} {flags}",
    }


def link_plan_parts(
    task: LinkTask, facts: Sequence[str], *, command: str, flags: Callable[[LinkPlan], str]
) -> Iterator[Table | str]:
    """The answer, what it assumes, the methods beside each other, each setting, and the command of the first."""
    plans = feasible(task)
    help_ = None if plans else remedy(task)
    rows = presets(task, sync_every=_period(plans, help_))
    yield remedy_sentence(task, help_) if help_ is not None else _answer(task, plans[0], rows[0])
    yield "\n".join(["", *facts, f"steps   {task.num_steps:,}", ""])
    yield f"The methods as they are by default, at H = {_period(plans, help_)}:"
    yield _methods(task, rows)
    if plans:
        yield ""
        yield from _settings(task, plans)
        yield f"    {command} {flags(plans[0])}"


def _answer(task: LinkTask, plan: LinkPlan, data_parallel: LinkPlan) -> str:
    """The answer in two sentences: the first plan, beside one machine and Data-Parallel."""
    num_replicas = len(task.replicas)
    alone = task.num_steps * num_replicas * min(one.step_seconds for one in task.replicas) / 3600
    settings = plan.model.settings
    return (
        f"Yes: with H = {settings.sync_every}, τ = {settings.overlap_steps} and {plan.wire}, the {num_replicas} "
        f"replicas compute {plan.compute_utilization:.1%} of the time, and the run takes {_duration(plan.hours)}; "
        f"on one of them alone, {_duration(alone)}. Data-Parallel would compute "
        f"{data_parallel.compute_utilization:.1%} of the time, for {_duration(data_parallel.hours)}."
    )


def _methods(task: LinkTask, rows: Sequence[LinkPlan]) -> Table:
    """A row for each method as it is by default: the link that it needs, and what it does on this one."""
    columns = ("method", "τ", f"link for\n{task.target:.0%}", "compute\nutilization", "time")
    table = new_table(*columns, "sent per\nreplica")
    for row in rows:
        settings, needed = row.model.settings, row.needed_gbit_s
        table.add_row(
            settings.method,
            str(row.model.schedule.max_overlap),
            "none" if needed is None else rate(needed),
            f"{row.compute_utilization:.1%}",
            _duration(row.hours),
            _bytes(1e12 * row.terabytes),
        )
    return table


def _duration(hours: float) -> str:
    for limit, unit_hours, unit in ((1, 1 / 60, "minutes"), (72, 1, "hours"), (24 * 730, 24, "days")):
        if hours < limit:
            return f"{hours / unit_hours:.3g} {unit}"
    return f"{hours / 8766:,.3g} years"


def _bytes(number: float) -> str:
    unit, name = next((one for one in ((1e12, "TB"), (1e9, "GB")) if number >= one[0]), (1e6, "MB"))
    return f"{number / unit:.3g} {name}"


def _settings(task: LinkTask, plans: Sequence[LinkPlan]) -> Iterator[Table | str]:
    """A row for each setting that reaches the target."""
    table = new_table(
        *("H", "τ", "layers per\nfragment", "wire", "combine", "compute\nutilization", "hours"),
        *("sent per\nreplica", "peak", "device memory,\nGiB", "with\noffload"),
        names=0,
    )
    for plan in plans:
        settings = plan.model.settings
        table.add_row(
            str(settings.sync_every),
            str(settings.overlap_steps),
            str(settings.layers_per_fragment),
            plan.wire,
            plan.combine,
            f"{plan.compute_utilization:.1%}",
            f"{plan.hours:,.1f}",
            _bytes(1e12 * plan.terabytes),
            "–" if plan.peak_gbit_s is None else rate(plan.peak_gbit_s),
            f"{plan.device_memory_gib():.3g}",
            f"{plan.device_memory_gib(offload=True):.3g}",
        )
    yield table
    yield (
        f"All reach a compute utilization of {task.target:g}; hours and bytes are of {task.num_steps:,} steps. "
        "H: inner steps between two syncs of a fragment; τ: steps in which its exchange is hidden. Device memory "
        "holds parameters, Adam's moments, outer parameters and momentum, in FP32. The first "
        "setting is the least risk to the model's quality:"
    )


def store_sentence(plan: LinkPlan) -> str:
    """The cost of a day of a setting in a bucket, and how soon an outer step is there."""
    num_steps = math.ceil(plan.store_seconds / min(one.step_seconds for one in plan.task.replicas))
    traffic = plan.store_traffic_a_day
    settings, load = plan.model.settings, plan.store_load
    longer = ""
    if load > MOST_LOAD:  # its bytes are in proportion to 1/H
        longer = (
            f" Payloads and snapshots would keep a link busy {load:.0%} of the time, so that outer steps fall "
            f"behind: choose an H of at least {math.ceil(settings.sync_every * load / MOST_LOAD)}, too."
        )
    dollars = " or ".join(f"{traffic.dollars(prices):,.2f} $ on {prices.name}" for prices in PROVIDERS)
    return (
        f"If the replicas meet in a bucket, H = {settings.sync_every}, {plan.wire} and {plan.combine} "
        f"move {traffic.bytes_down / 1e12:.3g} TB a day out of it, in {traffic.creates + traffic.gets:,.0f} "
        f"requests: by list prices {dollars} a day. Egress within a provider's region is free. An outer step is "
        f"decided there about {plan.store_seconds:.2g} s after the send, so choose a τ of at least {num_steps} "
        f"(overlap_steps): those above are for direct links.{longer}"
    )


def remedy_sentence(task: LinkTask, change: Remedy) -> str:
    """The setting that comes closest, and the changes of which each would be enough."""
    best, settings = change.best, change.best.model.settings
    ways = [f"a target of {_rounded(best.compute_utilization, up=False)}"]
    if change.step_factor is not None:
        longer = _rounded(change.step_factor)
        ways.insert(0, f"steps that compute {longer} times as long, with batches as many times as large")
    if change.latency_seconds:
        ways.insert(0, f"a latency of {_rounded(change.latency_seconds, up=False)} s on every link")
    if change.link_gbit_s is not None:
        ways.insert(0, f"links of {rate(float(_rounded(change.link_gbit_s)))}")
    sentence = (
        f"No setting reaches a compute utilization of {task.target:g} here. The closest is "
        f"{best.compute_utilization:.3g}, with H = {settings.sync_every}, τ = {settings.overlap_steps}, "
        f"{settings.layers_per_fragment} layers per fragment, {best.wire}, {best.combine}. "
        + ("This would do: " if len(ways) == 1 else "Any of these would do: ")
        + "; ".join(ways)
        + "."
    )
    if task.most_utilization < 1:
        sentence += (
            f" More than {task.most_utilization:.3g} can't be reached by replicas with these step times: the "
            "faster ones wait for the slowest."
        )
    return sentence


def _rounded(value: float, *, up: bool = True) -> str:
    """Three digits, rounded to the side on which the value is still enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{(math.ceil if up else math.floor)(value / unit) * unit:.3g}"


def wire_json(measurements: "Sequence[WireMeasurement]") -> str:
    """The measurements as a JSON list."""
    return json.dumps([asdict(measurement) for measurement in measurements], indent=1)


def wire_parts(measurements: "Sequence[WireMeasurement]") -> Iterator[Table | str]:
    """A row for each codec; each speed stands beside its ratio to a copy's."""
    speeds = [
        f"{name}, GB/s\n{speed.num_threads} thread{'s' * (speed.num_threads > 1)}"
        for speed in measurements[0].speeds
        for name in ("encode", "decode and add")
    ]
    table = new_table("codec", "bits per value", "relative error", *speeds)
    for measurement in measurements:
        cells = [measurement.wire, f"{measurement.bits_per_value:.3f}", f"{measurement.relative_error:.4f}"]
        for speed in measurement.speeds:
            for gbyte_s in (speed.encode_gbyte_s, speed.decode_add_gbyte_s):
                cells.append(f"{gbyte_s:.2f} ({gbyte_s / speed.copy_gbyte_s:.2f}×)")
        table.add_row(*cells)
    yield table
    yield "GB/s of FP32 input; in brackets, the ratio to a copy measured just before."
