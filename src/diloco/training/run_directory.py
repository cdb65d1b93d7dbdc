"""A run's own directory: claimed by a new run, taken up again by a resume."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.data.index import INDEX_FILE
from diloco.training.config import TrainConfig, differences, from_json, to_json

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"

_MAY_CHANGE_ON_RESUME = ("runs", "name", "timeout_seconds", "checkpoint.", "data.", "device")


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def claim(config: TrainConfig) -> None:
    """Make the directory of a new run, with its resolved config and the index of its data.

    Raises:
        ValueError: if it already holds a run.
    """
    directory = config.directory
    if (directory / CONFIG_FILE).exists():
        raise ValueError(
            f"{directory} already holds a run: choose another --name, or go on with --resume {directory}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    assert config.data.prepared is not None, "the config is resolved"
    shutil.copyfile(config.data.prepared / INDEX_FILE, directory / DATA_FILE)
    write_atomically(directory / CONFIG_FILE, json.dumps(to_json(config), indent=2) + "\n")


def read_config(directory: Path) -> TrainConfig:
    """The resolved config of a run.

    Raises:
        ValueError: if the directory holds no run, or one of another version.
    """
    path = directory / CONFIG_FILE
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise ValueError(f"{directory} holds no run: {path} is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    return replace(from_json(TrainConfig, values), name=directory.name, runs=directory.parent)


def data_digest(directory: Path) -> str:
    """The digest of the data that a run was started on."""
    return json.loads((directory / DATA_FILE).read_text())["digest"]


def resume_config(directory: Path, asked: TrainConfig, recipe: TrainConfig) -> TrainConfig:
    """The config to resume with: the run's own, where the command line doesn't ask for what may change.

    Args:
        directory: of the run.
        asked: the recipe with the command line's changes.
        recipe: the recipe alone, to tell what the command line changed.

    Raises:
        ValueError: if the command line asks for what would make it another run, with both values.
    """
    saved = read_config(directory)
    changed = differences(recipe, asked)
    for name, (_, value) in changed.items():
        found = _get(saved, name)
        if value != found and not name.startswith(_MAY_CHANGE_ON_RESUME):
            raise ValueError(
                f"{directory} was started with {name}={found}, and now {value} is asked for: "
                "a resume continues the same run; leave it out, or start a new run"
            )
    runtime = {name: getattr(asked, name) for name in ("timeout_seconds", "device") if name in changed}
    checkpoint = replace(
        saved.checkpoint,
        **{n: getattr(asked.checkpoint, n) for n in ("every_steps", "keep") if f"checkpoint.{n}" in changed},
    )
    data = replace(saved.data, prepared=asked.data.prepared) if "data.prepared" in changed else saved.data
    return replace(saved, checkpoint=checkpoint, data=data, **runtime)


def _get(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = getattr(config, name)
    return config
