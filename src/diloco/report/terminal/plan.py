"""The output of `diloco plan`: settings that reach a compute utilization, or what would have to change."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco.rendezvous.prices import PROVIDERS
from diloco.simulator.planner import Plan, Remedy, Task


def plan_json(
    task: Task, plans: Sequence[Plan], remedy: Remedy | None, *, command: str, flags: Callable[[Plan], str]
) -> str:
    """One JSON object: the task, the settings (the least risky first), and a remedy where there are none."""
    answer: dict[str, Any] = {
        "target": task.target,
        "num_steps": task.num_steps,
        "replicas": [asdict(replica) for replica in task.replicas],
        "most_utilization": task.most_utilization,
        "plans": [_values(plan, command, flags(plan)) for plan in plans],
    }
    if remedy is not None:
        answer["remedy"] = {
            "best": _values(remedy.best, command, flags(remedy.best)),
            "link_gbit_s": remedy.link_gbit_s,
            "latency_seconds": remedy.latency_seconds,
            "step_factor": remedy.step_factor,
        }
    return json.dumps(answer, indent=1)


def _values(plan: Plan, command: str, flags: str) -> dict[str, Any]:
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


def print_plans(
    task: Task, plans: Sequence[Plan], console: Console, *, command: str, flags: Callable[[Plan], str]
) -> None:
    """Print a row for each setting, and the command of the first."""
    table = Table(box=None, header_style="bold")
    for name in ("H", "τ", "layers a\nfragment", "wire", "combine"):
        table.add_column(name, justify="right")
    for name in ("compute\nutilization", "hours", "TB sent a\nreplica", "peak\nGbit/s", "device memory,\nGiB"):
        table.add_column(name, justify="right")
    table.add_column("with\noffload", justify="right")
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
            f"{plan.terabytes:.3g}",
            "–" if plan.peak_gbit_s is None else f"{plan.peak_gbit_s:.3g}",
            f"{plan.device_memory_gib():.3g}",
            f"{plan.device_memory_gib(offload=True):.3g}",
        )
    console.print(table)
    console.print(
        f"All reach a compute utilization of {task.target:g}; hours and TB are those of {task.num_steps:,} steps. "
        "Device memory holds parameters, Adam's moments, outer parameters and momentum, in FP32. The first "
        "setting is the least risk to the model's quality:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"    {command} {flags(plans[0])}", highlight=False, soft_wrap=True)


def print_store(plans: Sequence[Plan], console: Console) -> None:
    """Print what a day of the least risky setting costs in a bucket, and how soon an outer step is there."""
    plan = plans[0]
    num_steps = math.ceil(plan.store_seconds / min(one.step_seconds for one in plan.task.replicas))
    traffic = plan.store_traffic_a_day
    dollars = " or ".join(f"{traffic.dollars(prices):,.2f} $ on {prices.name}" for prices in PROVIDERS)
    console.print(
        f"If the replicas meet in a bucket, H = {plan.model.settings.sync_every}, {plan.wire} and {plan.combine} "
        f"move {traffic.bytes_down / 1e12:.3g} TB a day out of it, in {traffic.creates + traffic.gets:,.0f} "
        f"requests: by list prices {dollars} a day. Egress within a provider's region is free. An outer step is "
        f"decided there about {plan.store_seconds:.2g} s after the send, so choose a τ of at least {num_steps} "
        "(overlap_steps): those above are for direct links.",
        highlight=False,
        soft_wrap=True,
    )


def print_remedy(task: Task, remedy: Remedy, console: Console) -> None:
    """Print the setting that comes closest, and the changes of which each would be enough."""
    best, settings = remedy.best, remedy.best.model.settings
    ways = [f"a target of {_rounded(best.compute_utilization, up=False)}"]
    if remedy.step_factor is not None:
        longer = _rounded(remedy.step_factor)
        ways.insert(0, f"steps that compute {longer} times as long, with batches as many times as large")
    if remedy.latency_seconds:
        ways.insert(0, f"a latency of {_rounded(remedy.latency_seconds, up=False)} s on every link")
    if remedy.link_gbit_s is not None:
        ways.insert(0, f"links of {_rounded(remedy.link_gbit_s)} Gbit/s")
    sentence = (
        f"No setting reaches a compute utilization of {task.target:g} here. The closest is "
        f"{best.compute_utilization:.3g}, with H = {settings.sync_every}, τ = {settings.overlap_steps}, "
        f"{settings.layers_per_fragment} layers a fragment, {best.wire}, {best.combine}. "
        + ("This would do: " if len(ways) == 1 else "Any of these would do: ")
        + "; ".join(ways)
        + "."
    )
    if task.most_utilization < 1:
        sentence += (
            f" More than {task.most_utilization:.3g} can't be reached by replicas with these step times: the "
            "faster ones wait for the slowest."
        )
    console.print(sentence, highlight=False, soft_wrap=True)


def _rounded(value: float, *, up: bool = True) -> str:
    """Three digits, rounded to the side on which the value is still enough."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{(math.ceil if up else math.floor)(value / unit) * unit:.3g}"
