"""`diloco train`: a run, from a recipe or from where one ended; torch is loaded once the command is understood."""

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli._command import asks_for_help, unknown_choice
from diloco.cli._explain import hinted
from diloco.cli._flags import spelled
from diloco.cli._recipe import parsed_recipe
from diloco.cli._resume import resume_command
from diloco.errors import UserError
from diloco.training.config.config import TrainConfig
from diloco.training.config.hugging_face import at_another_place, with_hugging_face
from diloco.training.config.recipes import RECIPES, recipe
from diloco.training.config.resolve import Budget, epochs, parse_tokens, read_config_file

HELP = "train a language model: diloco train RECIPE [--field value …] [--config FILE] [--resume RUN] [--dry-run]"
ORDER = 1


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command line: a run's config, and where it begins."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """A .toml file with changes to the recipe, or another run's config.json; flags change it further."""
    model_hf: Annotated[str | None, tyro.conf.arg(name="model.hf")] = None
    """A causal language model of transformers in the place of the recipe's: a directory with config.json and
    model.safetensors, a config.json alone, whose weights --seed draws, or a name on the Hugging Face Hub. The
    tokenizer beside it is the default of --data.tokenizer."""
    model_lora: Annotated[str | None, tyro.conf.arg(name="model.lora")] = None
    """With --model.hf, train and exchange low-rank adapters of its weights alone, through peft: rank=8, or with
    all options rank=8,alpha=16,targets=q_proj+v_proj. Left out, alpha is twice the rank, and targets are all
    linear modules but the head."""
    epochs: float | None = None
    """Passes over the training text, in the place of --num-tokens; rounded to whole steps."""
    resume: Path | None = None
    """Directory of a run to continue, from the newest step that every replica holds. --num-tokens extends it, and
    --optimizer.learning-rate and the schedule's fields change its schedule from there on."""
    dry_run: bool = False
    """Prepare the text, and print what the run would be: memory, steps, bytes, its first syncs."""


def run(arguments: list[str]) -> None:
    """Train a run of a recipe, or resume one."""
    with spelled(Command):
        command, budget = _parsed(arguments)
        _start(command, budget)


def _parsed(arguments: Sequence[str]) -> tuple[Command, Budget | None]:
    """The command and its budget; a resume begins with the run's own config, and needs no recipe."""
    words, others = _words(arguments)
    if words.resume is not None and words.config is not None:
        raise UserError("resume goes on with the run's own settings: leave config out", "resume", "config")
    configs: dict[str, TrainConfig] = {}
    budget = _budget(words)
    if words.rendezvous is not None:  # each command starts one replica
        configs = {name: replace(recipe(name), num_replicas=1) for name in RECIPES}
    if arguments and not others and words.config is None and words.resume is None:
        raise unknown_choice(arguments, RECIPES, prog="diloco train")
    if words.config is not None and not asks_for_help(others):
        named = others[0] if others and others[0] in RECIPES else None
        base, budget_of_file = read_config_file(words.config, named, rendezvous=words.rendezvous)
        configs, budget = {base.recipe: base}, budget or budget_of_file
        others = others if named else [base.recipe, *others]
    changes_model = words.hf is not None or words.lora is not None
    if changes_model and words.resume is None and others and (name := others[0]) in RECIPES:
        configs[name] = with_hugging_face(configs.get(name) or recipe(name), words.hf, lora=words.lora)
    if words.resume is not None:
        from diloco.training.records.runs import resumable

        saved = resumable(words.resume)
        saved = at_another_place(saved, words.hf, lora=words.lora) if changes_model else saved
        configs = {name: saved for name in RECIPES if saved.recipe in ("", name)}
        if saved.recipe in RECIPES and (not others or others[0] not in RECIPES):
            others = [saved.recipe, *others]
    command = parsed_recipe(lambda config: Command(config=config), others, prog="diloco train", configs=configs)
    if budget is None and command.resume is None:
        budget = Budget(command.config.num_tokens, "tokens")
    return command, budget


def _words(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The words of a command line on which the defaults of the others depend, and all but those of the budget."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num-tokens", "--num_tokens")
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--model.hf", dest="hf")
    parser.add_argument("--model.lora", dest="lora")
    defaults = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, kind in (("--resume", Path), ("--config", Path), ("--rendezvous", str)):
        defaults.add_argument(name, type=kind)
    try:
        words, others = parser.parse_known_args(arguments)
        defaults.parse_known_args(others, words)
    except argparse.ArgumentError:  # tyro explains what is wrong with it
        names = ("num_tokens", "epochs", "hf", "lora", "resume", "config", "rendezvous")
        return argparse.Namespace(**dict.fromkeys(names)), [*arguments]
    return words, others


def _budget(words: argparse.Namespace) -> Budget | None:
    if words.num_tokens is not None and words.epochs is not None:
        raise UserError(
            f"num_tokens={words.num_tokens} and epochs={words.epochs:g} are two budgets: leave one of them out",
            *("num_tokens", "epochs"),
        )
    if words.epochs is not None:
        return epochs(words.epochs)
    return None if words.num_tokens is None else parse_tokens(words.num_tokens)


def _start(command: Command, budget: Budget | None) -> None:
    """Prepare the run; then start it, or print what it would be."""
    from rich.console import Console

    from diloco.report.terminal.training import preparation_progress
    from diloco.training.prepare import prepare_run
    from diloco.training.processes import prepared, under_a_launcher
    from diloco.training.records.runs import CONFIG_FILE, check_not_running, own_run, running

    if command.resume is None and command.config.name and not under_a_launcher():
        check_not_running(command.config.directory)  # now, since preparing a text may take hours
    resume = command.resume or own_run(command.config)
    with nullcontext() if command.dry_run else prepared():
        with preparation_progress(Console(stderr=True)) as progress:
            config = prepare_run(command.config, resume=command.resume, budget=budget, progress=progress)
        if command.dry_run:
            _print_forecast(config, budget)
            return
        file = config.directory / CONFIG_FILE
        was_there = file.exists() and resume is None  # then the run in the directory is another one
        _print_start(config, budget, resume=resume)
        is_first = os.environ.get("RANK", "0") == "0"
        hint = f"go on with: {resume_command(config)}"
        lock = running(config.directory) if is_first else nullcontext()
        with hinted(hint, when=lambda: file.exists() and not was_there), lock:
            _train(config, is_resume=resume is not None)


def _print_forecast(config: TrainConfig, budget: Budget | None) -> None:
    from diloco.report.terminal.training import forecast_lines, start_lines
    from diloco.training.config.forecast import forecast

    print("\n".join([*start_lines(config, budget), *forecast_lines(config, forecast(config))]))


def _print_start(config: TrainConfig, budget: Budget | None, *, resume: Path | None) -> None:
    """Print what the first process of a run knows before it starts."""
    from diloco.report.terminal.training import change_lines, start_lines
    from diloco.training.config.config import differences
    from diloco.training.records.runs import read_config

    if os.environ.get("RANK", "0") != "0":
        return
    lines = [*start_lines(config, budget)]
    if resume is not None:
        lines += change_lines(differences(read_config(resume), config))
    print("\n".join(lines), flush=True)
    if config.prometheus_port is not None:
        ports = range(config.prometheus_port, config.prometheus_port + config.num_local_replicas)
        print(f"metrics at http://127.0.0.1:{ports[0]}/metrics, and so on to port {ports[-1]}", flush=True)


def _train(config: TrainConfig, *, is_resume: bool) -> None:
    """Train in this process, if a launcher started it, or else in one for each shard of each replica."""
    from diloco.training.processes import launch, slow_imports, under_a_launcher

    if under_a_launcher():
        _replica(config, is_resume)
    else:
        sizes = config.num_local_replicas, config.processes_per_replica
        launch(_replica, *sizes, config, is_resume, imports=slow_imports(config))


def _replica(config: TrainConfig, is_resume: bool) -> None:
    """Train one replica, or one of its shards, in this process; the first shows progress and outcome."""
    from rich.console import Console

    from diloco.report.terminal.training import TrainingProgress, print_outcome
    from diloco.training.loop import train

    console = Console()
    progress = TrainingProgress(config, console) if int(os.environ["RANK"]) == 0 else None
    on_start = None if progress is None else partial(progress.started, is_resume=is_resume)
    try:
        outcome = train(config, resume=is_resume, on_start=on_start, on_step=progress)
    finally:
        if progress is not None:
            progress.close()
    if outcome is not None:
        print_outcome(config, outcome, console)
