"""A run's settings from a file: changes to a recipe as TOML or JSON, or the `config.json` of another run."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.data.shards import INDEX_FILE, read_index
from diloco.errors import FileError, UserError, nearest
from diloco.schema import read_bytes
from diloco.training.budget import Budget, epochs, parse_tokens
from diloco.training.config import TrainConfig
from diloco.training.hugging_face import with_hugging_face
from diloco.training.recipes import RECIPES, recipe
from diloco.training.resolve import asked_again
from diloco.training.traits import from_json, to_json

_MOST_BYTES = 1 << 20
"""Size of the largest file that is read: no config takes as much."""


def read_config_file(
    path: Path, name: str | None, *, rendezvous: str | None = None
) -> tuple[TrainConfig, Budget | None]:
    """A recipe's config with the fields that a file changes, and the budget where the file has one.

    Sections are those of the config, and `recipe` names the recipe. `num_tokens` may be a text such as "20x", and
    `epochs` may stand in its place. The values that a run's `config.json` has because they follow from others are
    left out, and so is the run's name.

    Args:
        path: of the file, `.toml` or `.json`.
        name: of the recipe; None takes the file's.
        rendezvous: in the place of the file's; with either, num_replicas is 1 unless the file says otherwise.

    Raises:
        FileError: if the file can't be read.
        UserError: for an unknown field or recipe, and for a value that the config refuses.
    """
    values = _read(path)
    own = values.pop("recipe", "") or None
    if own is not None and (not isinstance(own, str) or own not in RECIPES):
        raise UserError(f"{path}: there is no recipe {str(own)!r:.80}{nearest(str(own), RECIPES)}")
    if name and own and name != own:
        raise UserError(f"{path} changes the recipe {own}, not {name}: name that recipe, or none")
    if (chosen := name or own) is None:
        raise UserError(f"{path} names no recipe: name one of {', '.join(RECIPES)}, there or before the flags")
    budget = _budget(path, values)
    base = recipe(chosen)
    if rendezvous is not None:
        values = values | {"rendezvous": rendezvous}
    if values.get("rendezvous") is not None:  # each command starts one replica
        values = {"num_replicas": 1} | values
    model = values.get("model")
    if isinstance(model, dict) and isinstance(model.get("hf"), str) and "family" not in model:
        base = with_hugging_face(base, model["hf"])
        values = values | {"model": {name: value for name, value in model.items() if name != "hf"}}
    config = from_json(TrainConfig, _merged(to_json(base), values, path), source=str(path))
    return (_anew(config) if path.suffix == ".json" else config), budget


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise UserError(f"config={path}: name a .toml file, or a .json such as a run's config.json", "config")
    content = read_bytes(path, most_bytes=_MOST_BYTES)
    try:
        text = content.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise FileError(f"{path} can't be read: it is no object")
    return values


def _budget(path: Path, values: dict[str, Any]) -> Budget | None:
    """The budget of a file, which is taken out of its values where the config has no field for it."""
    num_tokens, num_epochs = values.get("num_tokens"), values.pop("epochs", None)
    if num_epochs is not None and num_tokens is not None:
        raise UserError(f"{path} has num_tokens and epochs: leave one of them out")
    if num_epochs is not None:
        if not isinstance(num_epochs, int | float) or isinstance(num_epochs, bool):
            raise UserError(f"{path}: epochs={num_epochs!r:.80} is no number")
        return epochs(num_epochs)
    if isinstance(num_tokens, str | float):
        del values["num_tokens"]
        return parse_tokens(str(num_tokens))
    return Budget(num_tokens, "tokens") if isinstance(num_tokens, int) else None


def _merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], path: Path, where: str = "", names: Sequence[str] = ()
) -> dict[str, Any]:
    """A config's values with changes, section by section."""
    if where == "model." and "family" in changes:
        return dict(changes)  # a model of another family has other fields
    names = names or [*_dotted(base)]
    for name, value in changes.items():
        if name not in base:
            elsewhere = " or ".join(one for one in names if one.rpartition(".")[2] == name)
            near = f": did you mean {elsewhere}?" if elsewhere else nearest(name, base)
            raise UserError(f"{path}: there is no field {where}{name:.80}{near}")
        if isinstance(base[name], Mapping) != isinstance(value, Mapping):
            raise UserError(f"{path}: {where}{name} is {'no' if isinstance(value, Mapping) else 'a'} section")
    return {
        name: _merged(value, changes[name], path, f"{where}{name}.", names)
        if isinstance(value, Mapping) and name in changes
        else changes.get(name, value)
        for name, value in base.items()
    }


def _dotted(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The dotted names of all fields of a config's values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{where}{name}.")
        else:
            yield where + name


def _anew(config: TrainConfig) -> TrainConfig:
    """The config of a run as another run begins with it."""
    optimizer = config.optimizer
    if optimizer.start_step:
        optimizer = replace(optimizer, start_step=0, start_rate=0.0, warmup_steps=None)
    config, prepared = replace(config, name="", optimizer=optimizer), config.data.prepared
    if prepared is None:
        return config
    is_there = (prepared / INDEX_FILE).is_file()
    vocab_size = read_index(prepared).vocab_size if is_there else config.model.vocab_size
    config = asked_again(config, vocab_size=vocab_size)
    return config if is_there else replace(config, data=replace(config.data, prepared=None))
