"""A recipe and changes to it, on a command line."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tyro

from diloco.cli._command import parsed
from diloco.training.config import TrainConfig
from diloco.training.recipes import RECIPES, recipe

_Command = TypeVar("_Command")


def parsed_recipe(
    command: Callable[[TrainConfig], _Command],
    arguments: Sequence[str],
    *,
    prog: str,
    configs: Mapping[str, TrainConfig] | None = None,
) -> _Command:
    """The command that a command line asks for: its first argument names a recipe, the others change its fields.

    Args:
        command: makes the command, a dataclass, of a recipe's config.
        arguments: the command line.
        prog: the words before them.
        configs: configs in the place of the recipes' own.

    Raises:
        UserError: for values that a config refuses.
        SystemExit: for what can't be parsed, which has been explained, and after help.
    """
    commands = {name: command((configs or {}).get(name) or recipe(name)) for name in RECIPES}
    texts = {name: function.__doc__ or "" for name, function in RECIPES.items()}
    if not arguments or arguments[0] not in commands:  # which prints help, or explains what there is to choose
        choices = {name: (texts[name], commands[name]) for name in commands}
        return tyro.extras.overridable_config_cli(choices, prog=prog, args=arguments)
    name, *flags = arguments
    return parsed(
        type(commands[name]),
        flags,
        prog=f"{prog} {name}",
        default=commands[name],
        description=texts[name],
        config=(tyro.conf.AvoidSubcommands,),
    )
