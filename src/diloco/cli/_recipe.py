"""A recipe and changes to it, on a command line."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from diloco.cli._command import (
    TEXT_SUFFIXES,
    asks_for_help,
    field_of,
    fields_of,
    flag_words,
    parsed,
    unknown_choice,
)
from diloco.cli._foreign import our_names
from diloco.errors import UserError, nearest
from diloco.models.decoder_config import DecoderConfig
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.presets import METHODS
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import PAPER_RECIPES, RECIPES, recipe, recipe_of
from diloco.units import count

_Command = TypeVar("_Command")


def parsed_recipe(command: Callable[..., _Command], arguments: Sequence[str], *, prog: str) -> _Command:
    """The command that a command line asks for: its first argument names a recipe, the others change its fields.

    Args:
        command: a dataclass with a field `config`.
        arguments: the command line.
        prog: the words before them.

    Raises:
        UserError: for what can't be parsed, and for values that a config refuses.
        SystemExit: after help, and after the list of recipes where the command line is empty.
    """
    name, flags = named_recipe(arguments, prog=prog)
    config = recipe(name, **followed(flags))
    return changed(command(config=config), config, flags, prog=prog)


def followed(flags: Sequence[str]) -> dict[str, Any]:
    """The method and the number of replicas that flags ask for, from which the values of a paper's recipe follow.

    The parser refuses wrong values later. With a rendezvous the number of replicas is open.
    """
    words = [part for word in flags for part in (word.split("=", 1) if word.startswith("--") else [word])]
    values = {field_of(name): value for name, value in pairwise(words) if name.startswith("--")}
    method, replicas = values.get("method"), values.get("num_replicas", "")
    asked: dict[str, Any] = {"method": method} if method in METHODS else {}
    is_number = replicas.isdecimal() and int(replicas) > 0 and "rendezvous" not in values
    return asked | ({"num_replicas": int(replicas)} if is_number else {})


def law_lines(config: TrainConfig) -> list[str]:
    """A line about the values of a paper's recipe that a new run has from the laws; none for other recipes."""
    if config.recipe not in PAPER_RECIPES:
        return []
    base, is_baseline = recipe_of(config), config.method == "data_parallel"
    values = {
        f"learning rate {base.optimizer.learning_rate:.3g}": config.optimizer.learning_rate
        == base.optimizer.learning_rate,
        f"batches of {base.global_batch} sequences": config.tokens_per_step == base.tokens_per_step,
        f"η {base.diloco.outer_learning_rate}": not is_baseline
        and config.diloco.outer_rule == base.diloco.outer_rule,
    }
    taken = ", ".join(text for text, is_taken in values.items() if is_taken)
    whose = "Data-Parallel" if is_baseline else f"M = {base.num_replicas}"
    return [f"{config.recipe} takes the values of {whose}: {taken}"] if taken else []


def named_recipe(arguments: Sequence[str], *, prog: str) -> tuple[str, list[str]]:
    """The recipe that the first argument names, and the other arguments; errors as those of `parsed_recipe`."""
    if not arguments or (arguments[0] not in RECIPES and asks_for_help(arguments)):
        print(_recipes(prog))
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in RECIPES:
        raise _unknown_recipe(arguments, prog)
    return arguments[0], [*arguments[1:]]


def _unknown_recipe(arguments: Sequence[str], prog: str) -> UserError:
    """The refusal of a first word that is no recipe, with what may be meant."""
    word, *rest = arguments
    text = ""
    if word in ("--recipe", "-r", "--model", "--preset") and rest and rest[0] in RECIPES:
        text = f"{prog} {shlex.join(rest)}"
    elif (Path(word) / "config.json").is_file():
        text = f"diloco train --resume {word}, which goes on with the run"
    elif word.endswith((".toml", ".json", ".yaml", ".yml", ".py")):
        text = "diloco train --config FILE, a .toml file or a run's config.json"
    elif word.endswith(TEXT_SUFFIXES) or Path(word).is_dir():
        text = f"{prog} laptop --data.train {word}"
    elif "=" in word:
        name, _, value = word.lstrip("+").partition("=")
        ((words),) = flag_words({next(our_names(name), name): value}).values()
        text = f"{prog} laptop {shlex.join(words)}"
    if text:
        return UserError(f"{prog} begins with a recipe, not {word!r}: type {text}")
    near: list[str] = []
    with suppress(ValueError):
        near = nearest_sizes(count(word))
    if not word.startswith("-") and (near or word.casefold() not in RECIPES):
        typo = nearest(word, RECIPES)
        sizes = f"; the sizes about it are {' and '.join(near)}" if near else ""
        hint = (
            typo or f": choose one of {', '.join(RECIPES)}{sizes}; a model of transformers is named after it, by "
        )
        return UserError(f"{prog} has no {word!r}{hint}" + ("" if typo else "--model.hf"))
    return unknown_choice(arguments, RECIPES, prog=prog)


def nearest_sizes(size: float) -> list[str]:
    """The recipes of the sizes about a number of parameters; none for less than a million."""
    below = [name for name in PAPER_RECIPES if count(name) <= size]
    return [*below[-1:], *[name for name in PAPER_RECIPES if name not in below][:1]] if size > 1e6 else []


def changed(default: _Command, config: TrainConfig, flags: Sequence[str], *, prog: str) -> _Command:
    """A command around a config, with the changes of its flags."""
    _check_model_flags(config, flags)
    name = config.recipe
    description = RECIPES[name].__doc__ if name in RECIPES else None
    options: dict[str, Any] = {"default": default, "description": description or ""}
    prog = f"{prog} {name}".strip()
    return parsed(type(default), flags, prog=prog, config=(tyro.conf.AvoidSubcommands,), **options)


def _check_model_flags(config: TrainConfig, flags: Sequence[str]) -> None:
    """Refuse the flags of our own models' sizes beside a model of transformers."""
    if not isinstance(config.model, HuggingFaceConfig):
        return
    own = {f"model.{field}" for field in fields_of(DecoderConfig)}
    for word in flags:
        name = word.partition("=")[0]
        field = field_of(name)
        if name.startswith("--") and not own.isdisjoint((field, *our_names(field))):
            raise UserError(
                f"{name} with --model.hf: the size of {config.model.hf} is the one in its own config: leave "
                f"{name} out"
            )


def _recipes(prog: str) -> str:
    """The recipes, in a few lines."""
    rows = {name: function.__doc__ or "" for name, function in RECIPES.items() if name not in PAPER_RECIPES}
    first, *_, last = PAPER_RECIPES
    rows[f"{first} … {last}"] = "The models of arXiv 2503.09799; they need --data.train and --data.tokenizer."
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {text}" for name, text in rows.items()]
    usage = f"usage: {prog} [-h] {{{','.join(RECIPES)}}} [--field value …]"
    return "\n".join([usage, "", *lines, "", f"{prog} laptop --help lists all fields, with the recipe's values."])
