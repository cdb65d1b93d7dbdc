"""`diloco sweep`: runs over hyperparameters, whose table `diloco scaling fit` reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli._command import flags_in_errors
from diloco.cli._grid import grid_progress, machines_of
from diloco.cli._recipe import parsed_recipe
from diloco.cli._streams import hinted
from diloco.data.prepare import resolve as resolve_data
from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError
from diloco.experiments.runner.grid import LabelledRun, adopt
from diloco.experiments.runner.machines import Machines
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.experiments.runner.sweep import EXTENDED, Sweep, run_sweep
from diloco.files import num_cores
from diloco.report.terminal.screen import Screen
from diloco.report.terminal.training import preparation_progress
from diloco.scaling.table import read_table
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe, recipe_of
from diloco.training.measure import flops_per_second
from diloco.training.records.runs import running

HELP = "runs over learning rate, batch, replicas: diloco sweep RECIPE --axis NAME=VALUES … [--plan]"
ORDER = 7


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command line: a base config, and what is varied around it."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    axis: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An axis and its values, such as learning_rate=0.004,0.008; may be repeated. Along learning_rate and
    batch_tokens the grid is extended, by √2 and by 2, while the best run of a group lies on its edge; the other
    axes are width, num_replicas (0 is Data-Parallel), sync_every, outer_learning_rate, outer_momentum, seed."""
    then: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An axis that is varied alone, afterwards, at the best run of each group; may be repeated."""
    tokens_per_param: float = 20.0
    """Token budget of a run, as a multiple of its number of parameters."""
    output: Path = Path("sweep")
    """Directory of sweep.csv, from which the same command continues; runs stay in OUTPUT/runs."""
    plan: bool = False
    """Run nothing, and print the runs and their cost."""
    cores: int | None = None
    """Number of cores to use at once; left out, all."""
    ray: str | None = None
    """Address of a Ray cluster to run on."""


def run(arguments: list[str]) -> None:
    """Run, or plan, the sweep of a command line."""
    with flags_in_errors(Command), hinted("call it again to go on"):
        command = parsed_recipe(Command, arguments, prog="diloco sweep")
        sweep = _sweep_of(command)
        if command.plan:
            _print_plan(sweep, command.cores or num_cores())
        else:
            _run_sweep(sweep, machines_of(command.cores, command.ray), command.output)


def _sweep_of(command: Command) -> Sweep:
    """The sweep that a command line describes."""
    config = command.config
    recipe_tokens = recipe_of(config).num_tokens
    if config.num_tokens != recipe_tokens:
        raise UserError(
            "leave out num_tokens: the budget of a sweep's runs is tokens_per_param times their size",
            *("num_tokens", "tokens_per_param"),
        )
    for name, reason in _NOT_VARIED.items():
        if (value := getattr(config, name)) != getattr(recipe(config.recipe), name):
            raise UserError(f"{name}={value}: {reason}", name, "output")
    if not command.axis and not command.then:
        raise UserError("axis names nothing to vary: give one such as learning_rate=0.004,0.008", "axis")
    if command.cores is not None and command.cores < 1:
        raise UserError(f"cores={command.cores} must be at least 1; left out, all are used", "cores")
    axes, then = _axes("axis", command.axis), _axes("then", command.then)
    with preparation_progress(Screen(stderr=True)) as progress:
        prepared = resolve_data(config.data, progress=progress)
    return Sweep(
        base=config,
        axes=axes,
        then=then,
        tokens_per_param=command.tokens_per_param,
        vocab_size=load_tokenizer(prepared).vocab_size,
    )


_NOT_VARIED = {
    "name": "a sweep names each run by its settings: leave it out",
    "runs": "a sweep keeps them below output: set that, and leave this out",
    "rendezvous": "all of a sweep would meet in one store: leave it out",
    "publish": "all of a sweep would write to one place: leave it out, or publish a run by `diloco train`",
    "prometheus_port": "all of a sweep would take the same port: leave it out, and see `diloco watch`",
}
"""Settings that a sweep can't give its runs, and why."""


def _axes(field: str, texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The values of each axis, from the texts of one field."""
    axes: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name in axes:
            raise UserError(f"{field} {name} is given twice", field)
        try:
            axes[name] = tuple(map(int if name == "seed" else float, values.split(",")))
        except ValueError:
            raise UserError(f"{field} {text!r} is not of the form NAME=NUMBER,NUMBER,…", field) from None
    return axes


def _run_sweep(sweep: Sweep, machines: Machines, output: Path) -> None:
    """Run a sweep; its table grows as runs finish, and keeps the rows of other sweeps around the same base."""
    table = output / "sweep.csv"
    rows: list[dict] = []
    others: list[dict] = []
    with running(output, setting="output"):
        earlier = _earlier_rows(table, sweep.name_of_base)
        adopt(earlier, output / "runs")
        with grid_progress("sweep") as on_progress:
            for rows in run_sweep(sweep, output / "runs", machines, on_progress=on_progress):
                done = {row["run"] for row in rows}
                # Also rows of this sweep itself that the grid has not reached again after an interruption.
                others = [row for row in earlier if row["run"] not in done]
                if rows or others:
                    write_rows([*rows, *others], table)
    _print_outcome(rows, len(others), table)


def _earlier_rows(table: Path, name_of_base: str) -> list[dict]:
    rows = read_rows(table) if table.exists() else []
    if any(row.get("base") not in (None, name_of_base) for row in rows):
        raise UserError(
            f"{table} has runs that differ from these in more than its columns: choose another output",
            "output",
        )
    if any("run" not in row for row in rows):
        raise UserError(f"{table} is not a sweep's, as it names no run: choose another output", "output")
    return rows


def _print_outcome(rows: Sequence[Mapping], num_others: int, table: Path) -> None:
    """Print how the runs ended, and what to do with the table."""
    failed = [row for row in rows if "failed" in row]
    others = f", beside {num_others} that this command does not ask for" if num_others else ""
    print(f"{table}: {len(rows)} runs, of which {len(failed)} failed{others}")
    for row in failed:
        print(f"run {row['run']} failed: {row['failed']}")
    try:
        read_table(table)
        print(f"now: diloco scaling fit --data {table}")
    except UserError as error:
        print(f"no laws yet: {error}")
    if failed:
        raise SystemExit(1)


def _print_plan(sweep: Sweep, cores: int) -> None:
    """Print the runs of a sweep, and about how long they take on this machine."""
    settings = sweep.settings()
    runs = [sweep.run(setting) for setting in settings]
    # `then` is varied at the best run of each group, which costs as much as at any other run of the group.
    groups = {tuple((name, value) for name, value in s if name not in EXTENDED): s for s in settings}
    planned = map(sweep.run, sweep.later(groups.values()))
    later = [run for run in planned if run.config not in {known.config for known in runs}]
    for run in runs:
        labels = ", ".join(f"{name}={value:g}" for name, value in run.labels.items() if name != "base")
        print(f"{_flops(run):9.2e} FLOPs  {labels}")
    total = sum(map(_flops, runs + later))
    speeds = {
        one.labels["params"]: flops_per_second(
            replace(one.config, model=replace(one.config.model, vocab_size=sweep.vocab_size)), num_cores=cores
        )
        for one in {run.labels["params"]: run for run in runs + later}.values()
    }
    hours = sum(_flops(run) / speeds[run.labels["params"]] for run in runs + later) / 3600
    print(f"{len(runs)} runs, and then up to {len(later)}:")
    print(f"{total:.3g} FLOPs, about {hours:.2g} hours on {cores} cores like this machine's")
    print("not counted: runs by which the grid is extended, where the best run lies on its edge")


def _flops(run: LabelledRun) -> float:
    return 6.0 * run.labels["params"] * run.labels["tokens"]
