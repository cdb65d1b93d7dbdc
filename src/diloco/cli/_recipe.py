"""A recipe and changes to it, on a command line."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from diloco.cli._command import asks_for_help, field_of, fields_of, our_name, parsed, unknown_choice
from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import PAPER_RECIPES, RECIPES, recipe

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
    config = recipe(name)
    return changed(command(config=config), config, flags, prog=prog)


def named_recipe(arguments: Sequence[str], *, prog: str) -> tuple[str, list[str]]:
    """The recipe that the first argument names, and the other arguments; errors as those of `parsed_recipe`."""
    if not arguments or (arguments[0] not in RECIPES and asks_for_help(arguments)):
        print(_recipes(prog))
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in RECIPES:
        raise unknown_choice(arguments, RECIPES, prog=prog)
    return arguments[0], [*arguments[1:]]


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
        if name.startswith("--") and our_name(field_of(name)) in own:
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
