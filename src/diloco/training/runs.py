"""A run's own directory: claimed by a new run, taken up again by a resume."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.data.index import INDEX_FILE
from diloco.errors import UserError
from diloco.exchange.control import share
from diloco.files import write_atomically
from diloco.training.config import TrainConfig
from diloco.training.resolve import shared_facts
from diloco.training.traits import differences, fields_with, from_json, get, to_json
from diloco.training.world import World

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"


def check_unclaimed(directory: Path) -> None:
    """Refuse a directory that already holds a run.

    Raises:
        UserError: if it does.
    """
    if (directory / CONFIG_FILE).exists():
        raise UserError(
            f"{directory} already holds a run: choose another --name, or go on with --resume {directory}"
        )


def claim(config: TrainConfig) -> None:
    """Make the directory of a new run, with its resolved config and the index of its data.

    Raises:
        UserError: if it already holds a run.
    """
    directory = config.directory
    check_unclaimed(directory)
    directory.mkdir(parents=True, exist_ok=True)
    assert config.data.prepared is not None, "the config is resolved"
    write_atomically(directory / DATA_FILE, [(config.data.prepared / INDEX_FILE).read_bytes()])
    write_atomically(directory / CONFIG_FILE, [json.dumps(to_json(config), indent=2).encode() + b"\n"])


def claim_together(config: TrainConfig, world: World) -> None:
    """Claim the directory of a new run on every machine, whether the machines share a disk or not.

    Raises:
        UserError: if it already holds another run.
    """
    if world.everyone.replica == 0:
        claim(config)
    share(world.everyone, "replica 0 has claimed its directory")
    if world.is_first_on_machine and not (config.directory / CONFIG_FILE).exists():
        claim(config)
    share(world.everyone, "every machine has")
    if shared_facts(replace(read_config(config.directory), name=config.name)) != shared_facts(config):
        check_unclaimed(config.directory)  # this machine's disk has an older run of that name


def read_config(directory: Path) -> TrainConfig:
    """The resolved config of a run.

    Raises:
        UserError: if the directory holds no run, or one of another version.
    """
    path = directory / CONFIG_FILE
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise UserError(f"{directory} holds no run: {path} is missing") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} can't be read: {error}") from None
    try:
        config = from_json(TrainConfig, values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return replace(config, name=directory.name, runs=directory.parent)


def check_data(config: TrainConfig, *, flag: str) -> None:
    """Refuse a run whose data is gone.

    Raises:
        UserError: with the flag that names another place.
    """
    assert config.data.prepared is not None, "a run's config is resolved"
    if not (config.data.prepared / INDEX_FILE).exists():
        raise UserError(
            f"the data of run {config.name} is no longer in {config.data.prepared}: name its directory by {flag}"
        )


def data_started_with(directory: Path) -> tuple[str, int]:
    """The digest of the data that a run was started on, and how many tokens of it are training text."""
    index = json.loads((directory / DATA_FILE).read_text())
    return index["digest"], sum(shard["num_tokens"] for shard in index["splits"]["train"])


def resumable(directory: Path) -> TrainConfig:
    """The config of a run, to be changed for a resume: what followed from other fields is left to do so again.

    Raises:
        UserError: as `read_config` does.
    """
    saved = read_config(directory)
    keep = None if saved.checkpoint.keep == saved.default_keep else saved.checkpoint.keep
    return replace(saved, micro_batch=None, checkpoint=replace(saved.checkpoint, keep=keep))


def resume_config(directory: Path, asked: TrainConfig) -> TrainConfig:
    """The config to resume with.

    Args:
        directory: of the run.
        asked: what `resumable` gives, with changes.

    Raises:
        UserError: if a change would make it another run, with both values.
    """
    saved = read_config(directory)
    if not asked.model.vocab_size:  # left to the tokenizer
        asked = replace(asked, model=replace(asked.model, vocab_size=saved.model.vocab_size))
    may_change = fields_with(TrainConfig, "may_change_on_resume")
    for name, (_, value) in differences(resumable(directory), asked).items():
        if name not in may_change and value != (found := get(saved, name)):
            raise UserError(
                f"{directory} was started with {name}={found}, and now {value} is asked for: "
                "a resume continues the same run; leave it out, or start a new run"
            )
    check_data(asked, flag="--data.prepared")
    assert saved.micro_batch is not None, "the config is resolved"
    keep = asked.default_keep if asked.checkpoint.keep is None else asked.checkpoint.keep
    return replace(
        asked,
        micro_batch=asked.micro_batch or math.gcd(saved.micro_batch, asked.process_batch),
        checkpoint=replace(asked.checkpoint, keep=keep),
    )
