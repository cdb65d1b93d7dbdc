"""`diloco experiment`: a grid of runs, its rows, its figure, and what was found."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import tyro

from diloco.errors import UserError
from diloco.evaluation.questions import read_questions
from diloco.experiments.papers.experiment import Experiment, finished
from diloco.experiments.papers.recipes import EXPERIMENTS, experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.grid import LabelledRun, LocalMachine, Machines, make_job, read_result, run_grid
from diloco.experiments.runner.rows import write_rows
from diloco.files import require
from diloco.training.config import TrainConfig
from diloco.training.recipes import flags


def run(
    names: tyro.conf.Positional[tuple[str, ...]],
    tier: Literal["small", "paper"] = "small",
    corpus: tuple[str, ...] = (),
    held_out: tuple[str, ...] = (),
    output: Path = Path("experiments"),
    eval_data: tuple[Path, ...] = (),
    cores: int | None = None,
    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None,
    commands: bool = False,
    tabulate: bool = False,
) -> None:
    """Run a paper's experiments; call it again after an interruption, and nothing is run twice.

    Writes OUTPUT/NAME.csv, a row a run, as runs finish, then OUTPUT/NAME.svg and .png. Runs stay in OUTPUT/runs.

    Args:
        names: Of experiments, or `all`.
        tier: small, for two cores and minutes a run, or the paper's sizes and tokens.
        corpus: Sources of training text, as --data.train of the trainer takes them; left out, the tier's own.
        held_out: Sources of held-out text; left out, a part of the corpus.
        output: Directory to write to.
        eval_data: Files of questions for zero-shot accuracy, in experiments for which the paper reports it.
        cores: How many to use at once; left out, all.
        ray: Run on the Ray cluster at this address, `auto` for the one that this machine belongs to.
        commands: Run nothing, and print each run's command, to be started with torchrun on a cluster.
        tabulate: Run nothing but the evaluation of what was trained: table and figure of the runs that are over.
    """
    experiments = [
        experiment(name, TIERS[tier](corpus, held_out)) for name in (EXPERIMENTS if names == ("all",) else names)
    ]
    if not experiments:
        raise UserError(f"name an experiment, or all: {', '.join(EXPERIMENTS)}")
    if commands and tabulate:
        raise UserError("--commands prints what to run, --tabulate what was run: leave one out")
    if commands:
        _print_commands(experiments, output)
        return
    require("matplotlib", extra="pictures")
    if eval_data:
        require("lm_eval", extra="eval")
    for file in eval_data:
        read_questions(file)
    if len({file.stem for file in eval_data}) < len(eval_data):
        raise UserError(
            f"{', '.join(map(str, eval_data))}: tasks are known by their files' names, and two are equal"
        )
    machines = machines_of(cores, ray)
    asked = [eval_data if one.with_accuracy else () for one in experiments]
    if tabulate:
        experiments = [_over(one, output, tasks) for one, tasks in zip(experiments, asked, strict=True)]
    num_failed = sum(
        _run_one(one, tier, output, machines, tasks) for one, tasks in zip(experiments, asked, strict=True)
    )
    if num_failed:
        raise SystemExit(1)


def machines_of(cores: int | None, ray: str | None) -> Machines:
    """This machine, or a Ray cluster.

    Raises:
        UserError: if both are meant.
    """
    if ray is None:
        return LocalMachine(cores)
    if cores is not None:
        raise UserError(f"--cores {cores} is of this machine, and --ray {ray} knows its own: leave one out")
    from diloco.experiments.runner.cluster import RayCluster

    return RayCluster(ray)


@contextmanager
def grid_progress(name: str) -> Iterator[Callable[[float], None]]:
    """A bar with the time that is left, to be told what part is done; lines where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    started: list[tuple[float, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("ETA {task.fields[eta]}"), console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=1.0, eta="?")

        def on_finished(part: float) -> None:
            started.append((time.monotonic(), part))
            (first, done), now = started[0], time.monotonic()
            eta = str(timedelta(seconds=round((now - first) * (1 - part) / (part - done)))) if part > done else "?"
            progress.update(bar, completed=part, eta=eta)
            if not progress.console.is_terminal:
                progress.console.print(f"{name}: {part:.1%} done, ETA {eta}", highlight=False)

        yield on_finished


def _run_one(one: Experiment, tier: str, output: Path, machines: Machines, tasks: tuple[Path, ...]) -> int:
    """How many of its runs failed."""
    from diloco.report.figures.experiments import draw_experiment
    from diloco.report.figures.pictures import save

    rows: list[dict] = []
    with grid_progress(one.name) as on_finished:
        wanted = {"tasks": tasks, "parameters": one.parameters, "on_finished": on_finished}
        for found in run_grid(one.runs, output / "runs", machines, **wanted):
            rows = [{"tier": tier, **row} for row in found]
            if rows:
                write_rows(rows, output / f"{one.name}.csv")
    for path in save(draw_experiment(one, rows), output, one.name):
        print(path)
    for row in rows:
        if row.get("failed"):
            print(f"run {row['run']} failed: {row['failed']}")
    if finished(rows):
        measured, verdict = one.finding(rows)
        print(f"{one.name} ({one.source}): {one.claim}\n  measured: {measured}\n  {verdict}")
    return sum("failed" in row for row in rows)


def _over(one: Experiment, output: Path, tasks: tuple[Path, ...]) -> Experiment:
    """The experiment without the runs that are not over."""

    def is_over(run: LabelledRun) -> bool:
        job = make_job(run.config, output / "runs", tasks, one.parameters)
        # Of a run that took place on another machine there is the result alone, which must lack nothing.
        return (job.directory / "summary.json").exists() or "failed" not in (read_result(job) or {"failed": ""})

    over = list(filter(is_over, one.runs))
    if not over:
        raise UserError(f"no run of {one.name} is over in {output / 'runs'}: leave out --tabulate to run them")
    return replace(one, runs=over)


def _print_commands(experiments: Sequence[Experiment], output: Path) -> None:
    """Each different run once, under all its labels."""
    labels: dict[TrainConfig, list[str]] = {}
    for one in experiments:
        for run in one.runs:
            labels.setdefault(make_job(run.config, output / "runs").config, []).append(f"{one.name}: {run.labels}")
    for config, names in labels.items():
        for name in names:
            print(f"# {name}")
        told = shlex.join(word for words in flags(config).values() for word in words)
        print(f"torchrun --nproc-per-node {config.num_processes} -m diloco train {config.recipe} {told}")
