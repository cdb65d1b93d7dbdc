"""The output of `diloco simulate`: bandwidth, compute utilization, wall-clock time, and the published tables."""

import json
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from diloco.errors import UserError
from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.published import (
    OVERTRAINING_COSTS,
    TARGETS,
    WALL_CLOCK_GBIT_S,
    WALL_CLOCK_HOURS,
    Cell,
    Cost,
    bandwidth_tables,
    overtraining_table,
    wall_clock_table,
)
from diloco.simulator.wall_clock import IdealizedRun

BEYOND = "1000+"
"""A bandwidth above the grid's largest."""


def wide_console() -> Console:
    """A console wide enough for the tables, even where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


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


def print_bandwidth(needed: Mapping[str, float | None], console: Console) -> None:
    """Print a row for each target."""
    table = Table("compute utilization", box=None, header_style="bold")
    table.add_column("Gbit/s", justify="right")
    for target, gbit_s in needed.items():
        # Below the grid's smallest bandwidth nothing was tried.
        table.add_row(target, ("≤ " if gbit_s == GBIT_S[0] else "") + _gbit_s(gbit_s))
    console.print(table)


def print_published(console: Console) -> None:
    """Print the papers' tables, with our numbers beside their own."""
    for source, rows in bandwidth_tables().items():
        table = Table(
            "model", "method", box=None, header_style="bold", title=f"{source}: Gbit/s for a utilization"
        )
        for target in TARGETS:
            table.add_column(f"{target:.0%}", justify="right")
        for (size, method), row in rows.items():
            table.add_row(size, method, *map(_cell, row))
        console.print(table)
        distances = [abs(cell.distance) for row in rows.values() for cell in row]
        console.print(
            f"Published · simulated, and points of the grid between them: {distances.count(0)} of "
            f"{len(distances)} are exact (=), {distances.count(1)} are one point off, "
            f"{sum(distance > 1 for distance in distances)} more.\n",
            highlight=False,
            soft_wrap=True,
        )

    _print_hours(console)
    _print_overtraining(console)


def _print_hours(console: Console) -> None:
    title = "arXiv 2501.18512, Table 1: hours of a run of 186,250 steps of the 1B model"
    hours = Table("method", box=None, header_style="bold", title=title)
    for gbit_s in WALL_CLOCK_GBIT_S:
        hours.add_column(f"{gbit_s:g} Gbit/s", justify="right")
    for method, row in wall_clock_table().items():
        hours.add_row(method, *_beside(WALL_CLOCK_HOURS[method], row))
    console.print(hours)
    console.print(
        "Published · simulated. The volume that fits data_parallel's bandwidths does not give its hours.\n",
        highlight=False,
        soft_wrap=True,
    )


def _print_overtraining(console: Console) -> None:
    title = "arXiv 2501.18512, Table 2: the 1B model overtrained"
    table = Table("method", "tokens", box=None, header_style="bold", title=title)
    for column in ("hours", "hours, 1 Gbit/s", "Tibit"):
        table.add_column(column, justify="right")
    for (method, billions), cost in overtraining_table().items():
        published: Cost = OVERTRAINING_COSTS[method, billions]
        table.add_row(method, f"{billions}·10⁹", *_beside(published, cost))
    console.print(table)
    console.print("Published · simulated.", highlight=False)


def _cell(cell: Cell) -> str:
    distance = f"{cell.distance:+d}" if cell.distance else "="
    return f"{_gbit_s(cell.published)} · {_gbit_s(cell.ours)} {distance}"


def _beside(published: Sequence[float], row: Sequence[float]) -> list[str]:
    return [f"{p:g} · {ours:.2f} ({ours / p - 1:+.0%})" for p, ours in zip(published, row, strict=True)]


def _gbit_s(gbit_s: float | None) -> str:
    return BEYOND if gbit_s is None or math.isinf(gbit_s) else f"{gbit_s:.4g}"


def wall_clock_json(run: IdealizedRun) -> str:
    """The seconds of each part, as JSON."""
    parts = {name: getattr(run, f"{name}_seconds") for name in ("compute", "inside", "between")}
    return strict_json({f"{name}_seconds": value for name, value in parts.items()} | {"seconds": run.seconds})


def print_wall_clock(run: IdealizedRun, console: Console) -> None:
    """Print a row for each part."""
    table = Table("part", box=None, header_style="bold")
    table.add_column("hours", justify="right")
    table.add_row("compute", f"{run.compute_seconds / 3600:,.2f}")
    table.add_row("gradients, at every step", f"{run.inside_seconds / 3600:,.2f}")
    table.add_row("outer gradients, as far as training waits", f"{run.between_seconds / 3600:,.2f}")
    table.add_row("together", f"{run.seconds / 3600:,.2f}")
    console.print(table)
