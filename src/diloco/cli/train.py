"""`diloco train`: a run, from a recipe or from where an earlier one ended."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from diloco.cli._explain import hinted
from diloco.cli._flags import spelled
from diloco.cli._recipe import parsed_recipe
from diloco.data.index import read_index
from diloco.report.terminal.training import TrainingProgress, preparation_progress, print_outcome
from diloco.training.config import TrainConfig
from diloco.training.launcher import launch, prepared, under_a_launcher
from diloco.training.loop import train
from diloco.training.prepare import prepare_run
from diloco.training.recipes import RECIPES, recipe
from diloco.training.runs import CONFIG_FILE, resumable

HELP = "train a language model: diloco train RECIPE [--field value …] [--resume RUN]"
ORDER = 1


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command line: a run's config, and where it begins."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    resume: Path | None = None
    """Directory of a run to continue, from the newest step that every replica holds."""


def run(arguments: list[str]) -> None:
    """Train a run of a recipe, or resume one."""
    with spelled(Command):
        command = _parsed(arguments)
        with prepared():
            with preparation_progress(Console(stderr=True)) as progress:
                config = prepare_run(command.config, resume=command.resume, progress=progress)
            hint = f"go on with: diloco train {config.recipe} --resume {config.directory}"
            with hinted(hint, where=config.directory / CONFIG_FILE):
                _train(config, is_resume=command.resume is not None)


def _parsed(arguments: Sequence[str]) -> Command:
    """The command; a resume begins with the run's own config, and needs no recipe."""
    configs: dict[str, TrainConfig] = {}
    words = _words(arguments)
    if words.rendezvous is not None:  # each command starts one replica
        configs = {name: replace(recipe(name), num_replicas=1) for name in RECIPES}
    if (directory := words.resume) is not None:
        saved = resumable(directory)
        configs = {name: saved for name in RECIPES if saved.recipe in ("", name)}
        if saved.recipe in RECIPES and arguments[0] not in RECIPES:
            arguments = [saved.recipe, *arguments]
    return parsed_recipe(lambda config: Command(config=config), arguments, prog="diloco train", configs=configs)


def _words(arguments: Sequence[str]) -> argparse.Namespace:
    """The directory of the run that a command line resumes, and the rendezvous, on which the defaults depend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--rendezvous")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError:
        return argparse.Namespace(resume=None, rendezvous=None)  # tyro explains what is wrong with it


def _train(config: TrainConfig, *, is_resume: bool) -> None:
    """Train in this process, if a launcher started it, or else in one for each shard of each replica."""
    if under_a_launcher():
        _replica(config, is_resume)
        return
    if config.data.prepared is not None:
        print(f"data  {config.data.prepared}, digest {read_index(config.data.prepared).digest[:16]}")
    print(f"run   {config.directory}", flush=True)
    if config.prometheus_port is not None:
        ports = range(config.prometheus_port, config.prometheus_port + config.num_local_replicas)
        print(f"metrics at http://127.0.0.1:{ports[0]}/metrics, and so on to port {ports[-1]}", flush=True)
    launch(_replica, config.num_local_replicas, config.processes_per_replica, config, is_resume)


def _replica(config: TrainConfig, is_resume: bool) -> None:
    """Train one replica, or one of its shards, in this process; the first shows progress and outcome."""
    console = Console()
    progress = TrainingProgress(config, console) if int(os.environ["RANK"]) == 0 else None
    on_start = progress.resumed if progress is not None and is_resume else None
    try:
        outcome = train(config, resume=is_resume, on_start=on_start, on_step=progress)
    finally:
        if progress is not None:
            progress.close()
    if outcome is not None:
        print_outcome(config, outcome, console)
