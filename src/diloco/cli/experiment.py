"""`diloco experiment`: a grid of runs, its table, its figure, and the finding."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diloco.cli._command import call, changes, flag_words
from diloco.cli._grid import grid_progress, machines_of
from diloco.cli._streams import hinted
from diloco.data.config import DataConfig
from diloco.data.prepare import BPE_TRAINING_BYTES
from diloco.errors import UserError
from diloco.evaluation.questions import read_questions
from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.comparison import finished
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import C4, DOLMA, TIERS, num_params, with_vocabulary
from diloco.experiments.runner.grid import LabelledRun, adopt, make_job, read_result, run_grid, text_name
from diloco.experiments.runner.machines import Machines
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.files import require
from diloco.training.config.config import TrainConfig, differences
from diloco.training.config.forecast import fitted

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


_GPUS_PER_NODE = 8
_H100_FLOPS, _MFU = 989e12, 0.4
"""Dense bfloat16 operations per second of an H100 SXM, and the part of them that training reaches."""


def cluster_lines(
    experiments: Sequence[Experiment], output: Path, *, gpu_bytes: float | None, sites: int = 1
) -> Iterator[str]:
    """The command of each different run once, under all its labels; before them the text's, after them the cost.

    Args:
        experiments: whose runs are made.
        output: directory of the runs, and of the text.
        gpu_bytes: memory of each GPU; None leaves shards and micro-batches as they are.
        sites: among which the replicas of a run are divided, if they can be.
    """
    different: dict[str, tuple[TrainConfig, list[str]]] = {}
    costs: dict[str, dict[str, float]] = {}
    for one in experiments:
        for run in one.runs:
            config = make_job(run.config, output / "runs").config
            different.setdefault(config.name, (config, []))[1].append(f"{one.name}: {run.labels}")
            costs.setdefault(one.name, {})[config.name] = 6.0 * num_params(config) * config.num_tokens
    texts = {
        config.data: (output / "text" / text_name(config.data)).absolute() for config, _ in different.values()
    }
    yield "# NODE: number of this machine in a run of several, from 0, site by site; HOST: address of machine 0"
    for data, directory in texts.items():
        yield from _text_lines(data, directory)
    for config, labels in different.values():
        yield from (f"# {label}" for label in labels)
        directory = texts[config.data]
        config = config if gpu_bytes is None else _on_gpus(config, gpu_bytes)
        yield _command(replace(config, data=DataConfig(prepared=directory)), sites)
    for name, flops in costs.items():
        yield _cost_line(name, flops)
    if len(costs) > 1:
        yield _cost_line("together", {run: flops for each in costs.values() for run, flops in each.items()})


def _text_lines(data: DataConfig, directory: Path) -> Iterator[str]:
    """The command that prepares a text; Dolma is loaded by a script, so that its files come first."""
    yield f"# text: {' '.join(data.train)}"
    if data.train == DOLMA:
        files = directory.parent / "dolma"
        # One eighth of the list's files holds more tokens than the longest run reads.
        one = f'curl -sfL --retry 5 {{}} -o {shlex.quote(str(files))}/"$(basename {{}} .json.gz)".jsonl.gz'
        yield (
            f"mkdir -p {shlex.quote(str(files))} && curl -sfL {_DOLMA_FILES} | awk 'NR % 8 == 1' | "
            f"xargs -P 16 -I{{}} sh -c {shlex.quote(one)} &&"  # a text without all files would be another one
        )
        # The tokenizer is that of C4, on which the runs are evaluated: the first of these files hold no prose.
        tokenizer = directory.parent / "tokenizer"
        yield _preparation(replace(data, train=C4, max_train_bytes=BPE_TRAINING_BYTES), tokenizer) + " &&"
        data = replace(data, train=(f"{files}/*.jsonl.gz",), tokenizer=str(tokenizer))
    yield _preparation(data, directory)


def _preparation(data: DataConfig, directory: Path) -> str:
    data = replace(data, cache=DataConfig.cache)
    words = flag_words({name: value for name, (_, value) in differences(DataConfig(), data).items()})
    flat = [word for each in words.values() for word in each]
    return shlex.join(["diloco", "data", "prepare", "--output", str(directory), *flat])


_DOLMA_FILES = "https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_7.txt"


def _on_gpus(config: TrainConfig, gpu_bytes: float) -> TrainConfig:
    """The same run, under the same name, in shards and passes that fit into the memory of each GPU."""
    chosen = fitted(with_vocabulary(config), gpu_bytes)
    return replace(config, micro_batch=chosen.micro_batch, shards_per_replica=chosen.shards_per_replica)


def _command(config: TrainConfig, sites: int) -> str:
    """The command of a run, the same for each of its machines."""
    is_divided = config.method != "data_parallel" and config.num_replicas % sites == 0
    per_site = config.num_processes // (sites if is_divided else 1)
    per_node = max(number for number in range(1, _GPUS_PER_NODE + 1) if per_site % number == 0)
    nodes = config.num_processes // per_node
    launch = ["torchrun", "--nproc-per-node", str(per_node)]
    several = f" --nnodes {nodes} --node-rank $NODE --master-addr $HOST --master-port 29500" if nodes > 1 else ""
    words = (word for each in changes(config).values() for word in each)
    train = shlex.join(["-m", "diloco", "train", config.recipe, *words])
    return f"{shlex.join(launch)}{several} {train}"


def _cost_line(name: str, flops: dict[str, float]) -> str:
    days = sum(flops.values()) / (_MFU * _H100_FLOPS * 86_400)
    return f"# {name}: {len(flops)} runs, {days:,.0f} H100-days at {_MFU:.0%} MFU"
