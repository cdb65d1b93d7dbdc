"""`diloco sweep`: runs over hyperparameters, whose table `diloco scaling fit` reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli.experiment import grid_progress, machines_of
from diloco.cli.recipe import parsed
from diloco.data.prepare import resolve as resolve_data
from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError
from diloco.experiments.runner.grid import LabelledRun, adopt
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.experiments.runner.sweep import EXTENDED, Sweep, run_sweep
from diloco.measure.step import flops_per_second
from diloco.scaling.table import read_table
from diloco.training.config import TrainConfig
from diloco.training.launcher import num_cores
from diloco.training.recipes import recipe


def sweep(arguments: Sequence[str]) -> None:
    """Parse a command line, and run or plan its sweep."""

    @dataclass(frozen=True, kw_only=True)
    class Command:
        config: Annotated[TrainConfig, tyro.conf.arg(name="")]
        axis: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
        """An axis and its values, such as learning_rate=0.004,0.008, once for each. Of learning_rate and
        batch_tokens the grid is extended, by √2 and by 2, while the best of a group lies on its edge; the others
        are width, num_replicas (0 is Data-Parallel), sync_every, outer_learning_rate, seed."""
        then: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
        """An axis that is varied alone, afterwards, at the best of each group."""
        tokens_per_param: float = 20.0
        """Budget of a run."""
        output: Path = Path("sweep")
        """Directory to write sweep.csv to, from which the same command goes on; runs stay in OUTPUT/runs."""
        plan: bool = False
        """Run nothing, and print the runs and what they cost."""
        cores: int | None = None
        """How many to use at once; left out, all."""
        ray: str | None = None
        """Run on the Ray cluster at this address."""

    asked = parsed(lambda config: Command(config=config), arguments, prog="diloco sweep")
    left_out = recipe(asked.config.recipe).num_tokens
    if asked.config.num_tokens != left_out and not left_out % asked.config.tokens_per_step:
        raise UserError(
            "leave out --num-tokens: the budget of a sweep's runs is --tokens-per-param times their size"
        )
    if asked.cores is not None and asked.cores < 1:
        raise UserError(f"--cores must be at least 1, not {asked.cores}; left out, all are used")
    if not asked.axis and not asked.then:
        raise UserError("name what to vary, such as --axis learning_rate=0.004,0.008")
    prepared = resolve_data(asked.config.data)
    planned = Sweep(
        base=asked.config,
        axes=_axes(asked.axis),
        then=_axes(asked.then),
        tokens_per_param=asked.tokens_per_param,
        vocab_size=load_tokenizer(prepared).vocab_size,
    )
    if asked.plan:
        _print_plan(planned, asked.cores or num_cores())
        return
    machines = machines_of(asked.cores, asked.ray)
    table = asked.output / "sweep.csv"
    earlier = _earlier_rows(table, planned.name_of_base)
    adopt(earlier, asked.output / "runs")
    rows: list[dict] = []
    others: list[dict] = []
    with grid_progress("sweep") as on_finished:
        for rows in run_sweep(planned, asked.output / "runs", machines, on_finished=on_finished):
            done = {row["run"] for row in rows}
            # What other calls left stays, those of this one too, to which it may not have come yet.
            others = [row for row in earlier if row["run"] not in done]
            if rows or others:
                write_rows([*rows, *others], table)
    _tell(rows, len(others), table)


def _tell(rows: Sequence[dict], num_others: int, table: Path) -> None:
    """How the runs ended, and what to do now."""
    failed = [row for row in rows if "failed" in row]
    others = f", beside {num_others} that this command does not ask for" if num_others else ""
    print(f"{table}: {len(rows)} runs, of which {len(failed)} failed{others}")
    for row in failed:
        print(f"run {row['run']} failed: {row['failed']}")
    print(_next(table))
    if failed:
        raise SystemExit(1)


def _next(table: Path) -> str:
    """What to do with a table."""
    try:
        read_table(table)
    except ValueError as error:
        return f"no laws yet: {error}"
    return f"now: diloco scaling fit --data {table}"


def _earlier_rows(table: Path, name_of_base: str) -> list[dict]:
    rows = read_rows(table) if table.exists() else []
    if any(row.get("base") not in (None, name_of_base) for row in rows):
        raise UserError(
            f"{table} has runs that differ from these in more than its columns tell: choose another --output"
        )
    if any("run" not in row for row in rows):
        raise UserError(f"{table} is not a sweep's, as it names no run: choose another --output")
    return rows


def _axes(told: Sequence[str]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for text in told:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name in found:
            raise UserError(f"the axis {name} is named twice")
        try:
            found[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise UserError(f"{text!r} is not of the form NAME=NUMBER,NUMBER,…") from None
    return found


def _print_plan(planned: Sweep, cores: int) -> None:
    settings = planned.settings()
    runs = [planned.run(setting) for setting in settings]
    # Afterwards, at the best of each group, which costs as much as at any other of it.
    groups = {tuple((name, value) for name, value in s if name not in EXTENDED): s for s in settings}
    planned_later = map(planned.run, planned.later(groups.values()))
    later = [run for run in planned_later if run.config not in {known.config for known in runs}]
    for run in runs:
        labels = ", ".join(f"{name}={value:g}" for name, value in run.labels.items() if name != "base")
        print(f"{_flops(run):9.2e} FLOPs  {labels}")
    total = sum(map(_flops, runs + later))
    speeds = {
        one.labels["params"]: flops_per_second(
            replace(one.config, model=replace(one.config.model, vocab_size=planned.vocab_size)), num_cores=cores
        )
        for one in _of_each_size(runs)
    }
    hours = sum(_flops(run) / speeds[run.labels["params"]] for run in runs + later) / 3600
    print(f"{len(runs)} runs, and then up to {len(later)}:")
    print(f"{total:.3g} FLOPs, about {hours:.2g} hours on {cores} cores like this machine's")
    print("not counted: runs by which the grid is extended, where the best lies on its edge")


def _flops(run: LabelledRun) -> float:
    return 6.0 * run.labels["params"] * run.labels["tokens"]


def _of_each_size(runs: Sequence[LabelledRun]) -> list[LabelledRun]:
    return list({run.labels["params"]: run for run in runs}.values())
