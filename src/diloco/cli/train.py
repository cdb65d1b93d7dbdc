"""`diloco train`: a run, from a recipe or from where one ended; torch is loaded once the command is understood."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from diloco.cli._command import asks_for_help, field_of, flag_words, flags_in_errors
from diloco.cli._recipe import changed, followed, law_lines, named_recipe
from diloco.cli._streams import hinted, safe_streams
from diloco.errors import UserError
from diloco.training.config.config import TrainConfig, differences, with_value
from diloco.training.config.recipes import RECIPES, recipe, with_hugging_face, with_model_at
from diloco.training.config.resolve import Budget, epochs, parse_tokens, read_config_file, resolved

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
    from diloco.training.processes import prepared

    # Before any thread: the library that reads a run's settings from its store starts some.
    with flags_in_errors(Command), prepared() if _reads_a_run(*_words(arguments)) else nullcontext():
        command, budget = _parsed(arguments)
        _start(command, budget)


def _parsed(arguments: Sequence[str]) -> tuple[Command, Budget | None]:
    """The command and its budget; the words that choose a config are read first, and the others change it."""
    words, flags = _words(arguments)
    budget = _budget(words)
    resume, file = (Path(words[name]) if name in words else None for name in ("resume", "config"))
    if resume is not None and file is not None:
        raise UserError("resume goes on with the run's own settings: leave config out", "resume", "config")
    if words.get("config") in RECIPES:
        raise UserError(f"config={file} is a recipe, which stands alone: type diloco train {file}", "config")
    named = flags.pop(0) if flags and flags[0] in RECIPES else None
    hf, lora = words.get("model.hf"), words.get("model.lora")
    if resume is not None:
        config = _of_run(resume, named)
        resume = config.directory
        config = with_model_at(config, hf, lora=lora) if hf or lora else config
    elif file is not None and not asks_for_help(flags):
        asked = followed(arguments)
        config, of_file = read_config_file(file, named, rendezvous=words.get("rendezvous"), followed=asked)
        budget = budget or of_file
    elif named is None and _reads_a_run(words, flags):
        from diloco.training.config.joined import joined_config

        config = joined_config(words["rendezvous"], names_model=hf is not None)
    else:
        if named is None:
            named, flags = named_recipe(flags or arguments, prog="diloco train")
        config = recipe(named, **followed(arguments))
        if "rendezvous" in words:  # each command starts one replica
            config = replace(config, num_replicas=1)
    if (hf or lora) and resume is None:
        # A text that is prepared has its tokenizer, wherever the model's lies here.
        is_prepared = any(field_of(flag.partition("=")[0]) == "data.prepared" for flag in flags)
        config = (with_model_at if is_prepared else with_hugging_face)(config, hf, lora=lora)
    if "rendezvous" in words:
        config = replace(config, rendezvous=words["rendezvous"])
    command = Command(config=config, resume=resume)
    command = changed(command, config, flags, prog="diloco train")
    if budget is None and resume is None:
        budget = Budget(command.config.num_tokens, "tokens")
    return command, budget


def _reads_a_run(words: Mapping[str, str], flags: Sequence[str]) -> bool:
    """True if the settings are those of the run in a store, which this replica joins."""
    names_none = not {"resume", "config"} & words.keys() and (not flags or flags[0].startswith("-"))
    return "rendezvous" in words and names_none and not asks_for_help(flags)


def _of_run(directory: Path, named: str | None) -> TrainConfig:
    from diloco.training.records.runs import resumable

    saved = resumable(directory)
    return replace(saved, recipe=named) if named and saved.recipe else saved


_FIRST_WORDS = ("resume", "config", "rendezvous", "model.hf", "model.lora", "num_tokens", "epochs")
"""The flags that choose the config which the others change, and its budget."""


def _words(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the first words, and the other arguments."""
    words: dict[str, str] = {}
    others: list[str] = []
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or field_of(name) not in _FIRST_WORDS:
            others.append(word)
            continue
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise UserError(f"{name} needs a value (diloco train --help)")
        words[field_of(name)] = value
    return words, others


def _budget(words: Mapping[str, str]) -> Budget | None:
    """The budget that the command line asks for; None for a number of tokens or steps."""
    num_tokens, num_epochs = words.get("num_tokens"), words.get("epochs")
    if num_tokens is not None and num_epochs is not None:
        raise UserError(
            f"num_tokens={num_tokens} and epochs={num_epochs} are two budgets: leave one of them out",
            *("num_tokens", "epochs"),
        )
    if num_epochs is None:
        return None if num_tokens is None else parse_tokens(num_tokens)
    try:
        return epochs(float(num_epochs))
    except ValueError as error:
        raise (
            error
            if isinstance(error, UserError)
            else UserError(f"epochs takes a number, not {num_epochs!r:.80}", "epochs")
        ) from None


def _start(command: Command, budget: Budget | None) -> None:
    """Prepare the run; then start it, or print what it would be."""
    from diloco.training.processes import is_first_on_machine, prepared, under_a_launcher, without_collections

    speaks = is_first_on_machine()
    if speaks and not command.dry_run and (line := meeting_line(command.config)):
        print(line, flush=True)  # now: to import torch takes seconds
    with without_collections():
        from diloco.report.terminal.screen import Screen
        from diloco.report.terminal.training import change_lines, forecast_lines, preparation_progress, start_lines
        from diloco.training.prepare import config_without_text, prepare_run
        from diloco.training.records.runs import (
            CONFIG_FILE,
            check_not_running,
            own_run,
            read_config,
            running,
            schedule_changes,
            unwritten_changes,
        )

    if command.resume is None and command.config.name and not under_a_launcher():
        check_not_running(command.config.directory)  # now, since preparing a text may take hours
    if command.dry_run and command.resume is None and (bare := config_without_text(command.config, budget)):
        from diloco.training.config.forecast import forecast

        needs = f"text   none is named: {bare.recipe} needs --data.train and a --data.tokenizer of its vocabulary"
        print("\n".join([needs, *law_lines(bare), *forecast_lines(bare, forecast(bare))]))
        return
    own = None if command.resume is not None else own_run(command.config)
    resume = command.resume or own
    with nullcontext() if command.dry_run else prepared():
        with preparation_progress(Screen(stderr=True)) if speaks else nullcontext() as progress:
            asked = prepare_run(command.config, resume=command.resume, own=own, budget=budget, progress=progress)
        config = resolved(asked)
        saved = config if resume is None else read_config(resume)
        if schedule_changes(saved, config):
            # A warm-up that is left out follows from the step that the run goes on from.
            config = with_value(config, "optimizer.warmup_steps", asked.optimizer.warmup_steps)
        lines = [*start_lines(config, budget), *(law_lines(asked) if resume is None else ())]
        lines += [*change_lines(differences(saved, config))]
        if command.dry_run:
            from diloco.training.config.forecast import forecast

            print("\n".join([*lines, *forecast_lines(config, forecast(config))]))
            return
        file = config.directory / CONFIG_FILE
        was_there = file.exists() and resume is None  # then the run in the directory is another one
        hint = f"go on with: {resume_command(config, unwritten_changes(asked) if resume else {})}"
        lock = running(config.directory, hint=hint) if os.environ.get("RANK", "0") == "0" else nullcontext()
        with lock, hinted(partial(_hint, config, asked, file), when=lambda: not was_there):
            if speaks:
                print("\n".join([*lines, *_addresses(config)]), flush=True)
            _train(asked, is_resume=resume is not None)


def _hint(config: TrainConfig, asked: TrainConfig, file: Path) -> str:
    """The way to go on with a run that has ended too early, or before its config file was there."""
    if not file.exists():
        return "nothing is saved yet: start again with the same command"
    from diloco.training.processes import under_a_launcher
    from diloco.training.records.checkpoints import finished_steps
    from diloco.training.records.runs import unwritten_changes

    held = [{*finished_steps(config.checkpoints, replica)} for replica in range(config.num_local_replicas)]
    if under_a_launcher():  # other machines hold what is not here
        held = [steps for steps in held if steps] or held
    step = max(set.intersection(*held), default=0)
    command = resume_command(config, unwritten_changes(asked))
    return f"{f'go on from step {step}' if step else 'no step is saved: go on'} with: {command}"


def resume_command(
    config: TrainConfig, changes: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> str:
    """The command line that resumes a run here; under torchrun that of this machine, with its number.

    Args:
        config: the run's.
        changes: settings that the run's file does not hold, by dotted name.
        environment: the variables in which torchrun describes this machine and the others.
    """
    resume = ["diloco", "train", *filter(None, [config.recipe]), "--resume", str(config.directory)]
    resume += [word for of_one in flag_words(changes).values() for word in of_one]
    if "TORCHELASTIC_RUN_ID" not in environment:
        return shlex.join(resume)
    values = {flag: environment.get(variable, "") for flag, variable in _TORCHRUN_FLAGS.items()}
    words = [word for both in values.items() for word in both]
    return shlex.join(["torchrun", *words, "-m", *resume])


_TORCHRUN_FLAGS = {
    "--nnodes": "GROUP_WORLD_SIZE",
    "--nproc-per-node": "LOCAL_WORLD_SIZE",
    "--node-rank": "GROUP_RANK",
    "--master-addr": "MASTER_ADDR",
    "--master-port": "MASTER_PORT",
}
"""Flags of torchrun, and the variables that have their values in its processes."""


def meeting_line(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> str:
    """A line about the place at which this machine meets others; empty where there are none.

    Args:
        config: as asked for.
        environment: the variables in which torchrun describes the place.
    """
    from diloco.training.processes import process_name

    if config.rendezvous is not None:
        return f"start a replica, in the store {config.rendezvous}"
    if not (rank := environment.get("RANK", "")).isdecimal():
        return ""
    name, first = (process_name(config.processes_per_replica, number) for number in (int(rank), 0))
    whom = "waits for the others" if rank == "0" else f"meets {first}"
    where = f"{environment.get('MASTER_ADDR')}, port {environment.get('MASTER_PORT')}"
    return (
        f"start {name} of {config.num_replicas}, which {whom} at {where}, for up to {config.timeout_seconds:g} s"
    )


def _addresses(config: TrainConfig) -> Iterator[str]:
    if config.prometheus_port is not None:
        ports = range(config.prometheus_port, config.prometheus_port + config.num_local_replicas)
        yield f"metrics at http://127.0.0.1:{ports[0]}/metrics, and so on to port {ports[-1]}"


def _train(asked: TrainConfig, *, is_resume: bool) -> None:
    """Train in this process, if a launcher started it, or else in one for each shard of each replica."""
    from diloco.training.processes import launch, slow_imports, under_a_launcher

    if under_a_launcher():
        _replica(asked, is_resume)
    else:
        sizes = asked.num_local_replicas, asked.processes_per_replica
        launch(_replica, *sizes, asked, is_resume, imports=slow_imports(asked))


_LONGER = "--num-tokens N"
"""The flag of a resume that extends its run."""


def _replica(asked: TrainConfig, is_resume: bool) -> None:
    """Train one replica, or one of its shards, in this process; a machine's first shows progress and outcome."""
    from diloco.report.terminal.screen import Screen
    from diloco.report.terminal.training import TrainingProgress, print_outcome
    from diloco.training.loop import train
    from diloco.training.processes import is_first_on_machine

    with safe_streams():
        config, console, rank = resolved(asked), Screen(), int(os.environ["RANK"])
        progress = TrainingProgress(config, console, rank=rank) if is_first_on_machine() else None
        on_start = None if progress is None else partial(progress.started, is_resume=is_resume, longer=_LONGER)
        try:
            outcome = train(asked, resume=is_resume, on_start=on_start, on_step=progress)
        finally:
            if progress is not None:
                progress.close()
        if progress is not None:
            print_outcome(config, outcome, console, rank=rank)
            if outcome is not None and not rank:  # the first process has the model
                run = shlex.quote(str(config.directory))
                print(f"next: diloco report {run}, diloco chat {run} --serve", flush=True)
