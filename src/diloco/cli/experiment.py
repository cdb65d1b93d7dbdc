"""`diloco experiment`: a grid of runs, its table, its figure, and the finding."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diloco.cli._cluster import cluster_lines
from diloco.cli._command import call
from diloco.cli._explain import hinted
from diloco.cli._grid import grid_progress, machines_of
from diloco.errors import UserError
from diloco.evaluation.questions import read_questions
from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.comparison import finished
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.grid import LabelledRun, adopt, make_job, read_result, run_grid
from diloco.experiments.runner.machines import Machines
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.files import require

HELP = "the papers' experiments: diloco experiment NAME|all [--tier small|paper] [--corpus FILES]"
ORDER = 6


def run(arguments: list[str]) -> None:
    """Run the experiments that a command line names."""
    with hinted("call it again to go on"):
        call(_experiment, arguments, prog="diloco experiment")


def _experiment(
    names: tyro.conf.Positional[tuple[str, ...]],
    tier: Literal["small", "paper"] = "small",
    corpus: tuple[str, ...] = (),
    held_out: tuple[str, ...] = (),
    output: Path = Path("experiments"),
    eval_data: tuple[Path, ...] = (),
    cores: int | None = None,
    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None,
    commands: bool = False,
    sites: int = 1,
    tabulate: bool = False,
) -> None:
    """Run a paper's experiments; after an interruption the same command continues, and no run is repeated.

    Writes OUTPUT/NAME.csv, a row per run, as runs finish, then OUTPUT/NAME.svg and .png. Runs stay in OUTPUT/runs;
    without them, too, a run whose row is in such a table counts as done, if the row has all that is asked for.

    Args:
        names: Names of experiments, or `all`.
        tier: small, for two cores and minutes a run; or paper, the paper's sizes and tokens.
        corpus: Sources of training text, as --data.train of the trainer takes them; left out, the tier's own.
        held_out: Sources of held-out text; left out, a part of the corpus.
        output: Directory to write to.
        eval_data: Files of questions for zero-shot accuracy, in experiments for which the paper reports it.
        cores: Number of cores to use at once; left out, all.
        ray: Address of a Ray cluster to run on; `auto` is the cluster that this machine belongs to.
        commands: Run nothing, and print each run's command, to be started with torchrun on a cluster, after those
            that prepare the text once for all, and before their cost. Those of the tier paper have as few shards,
            and as large micro-batches, as fit into 80 GB a GPU by an estimate, and 8 GPUs a machine.
        sites: With commands, the sites among which the replicas of a run are divided, where they can be.
        tabulate: Train nothing: evaluate the finished runs, and write their table and figure.
    """
    sizes = TIERS[tier](corpus, held_out)
    experiments = [experiment(name, sizes) for name in (EXPERIMENTS if names == ("all",) else names)]
    if not experiments:
        raise UserError(f"name an experiment, or all: {', '.join(EXPERIMENTS)}")
    if commands and tabulate:
        raise UserError(
            "commands prints what to run, and tabulate what was run: leave one out", "commands", "tabulate"
        )
    if sites < 1 or (sites > 1 and not commands):
        raise UserError(f"sites={sites} must be at least 1, and is for commands alone", "sites", "commands")
    if commands:
        print("\n".join(cluster_lines(experiments, output, gpu_bytes=sizes.gpu_bytes, sites=sites)))
        return
    _check_eval_data(eval_data)
    machines = machines_of(cores, ray)
    for table in (output / f"{name}.csv" for name in EXPERIMENTS):
        if table.exists():
            adopt(read_rows(table), output / "runs")
    tasks = [eval_data if one.with_accuracy else () for one in experiments]
    if tabulate:
        experiments = [_finished(one, output, files) for one, files in zip(experiments, tasks, strict=True)]
    num_failed = sum(
        _run_one(one, tier, output, machines, files) for one, files in zip(experiments, tasks, strict=True)
    )
    if num_failed:
        raise SystemExit(1)


def _check_eval_data(eval_data: tuple[Path, ...]) -> None:
    """Refuse at once what would stop an experiment at its end."""
    require("matplotlib", extra="pictures")
    if eval_data:
        require("lm_eval", extra="eval")
    for file in eval_data:
        read_questions(file)
    if len({file.stem for file in eval_data}) < len(eval_data):
        raise UserError(
            f"eval_data={', '.join(map(str, eval_data))}: a file's name is its task's, and two are equal",
            "eval_data",
        )


def _run_one(one: Experiment, tier: str, output: Path, machines: Machines, tasks: tuple[Path, ...]) -> int:
    """Run an experiment, and show its finding.

    Returns:
        The number of its runs that failed.
    """
    from diloco.report.figures.drawing import draw_experiment, save

    if table := _table_of_others(one, output):
        raise UserError(f"{table} is of {_ANOTHER}: choose another output", "output", *_OF_THE_RUNS)
    rows: list[dict] = []
    with grid_progress(one.name) as on_progress:
        for results in run_grid(
            one.runs, output / "runs", machines, **_asked(one, tasks), on_progress=on_progress
        ):
            rows = [{"tier": tier, **row} for row in results]
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


_OF_THE_RUNS = ("corpus", "held_out", "tier")
_ANOTHER = "another corpus, held_out or tier"


def _table_of_others(one: Experiment, output: Path) -> Path | None:
    """The experiment's table, if it has finished runs, and none of them is one of this experiment's."""
    table = output / f"{one.name}.csv"
    earlier = {row.get("run") for row in finished(read_rows(table))} if table.exists() else set()
    own = {make_job(run.config, output / "runs").config.name for run in one.runs} if earlier else set()
    return table if earlier and earlier.isdisjoint(own) else None


def _asked(one: Experiment, tasks: tuple[Path, ...]) -> dict[str, Any]:
    """The measurements of each run that the experiment asks for."""
    return {"tasks": tasks, "parameters": one.parameters, "with_curves": one.with_curves}


def _finished(one: Experiment, output: Path, tasks: tuple[Path, ...]) -> Experiment:
    """The experiment without its unfinished runs."""

    def is_finished(run: LabelledRun) -> bool:
        job = make_job(run.config, output / "runs", at_step=run.at_step, **_asked(one, tasks))
        # A run that took place on another machine left its result alone here, which must lack nothing.
        return (job.directory / "summary.json").exists() or "failed" not in (read_result(job) or {"failed": ""})

    runs = list(filter(is_finished, one.runs))
    if not runs:
        reason = f"no run of {one.name} is over in {output / 'runs'}"
        if (table := _table_of_others(one, output)) is None:
            raise UserError(f"{reason}: leave out tabulate to run them", "tabulate")
        raise UserError(
            f"{reason}, and the rows of {table} are of {_ANOTHER}: set those, or leave out tabulate and choose "
            "another output to run them",
            *("tabulate", *_OF_THE_RUNS, "output"),
        )
    return replace(one, runs=runs)
