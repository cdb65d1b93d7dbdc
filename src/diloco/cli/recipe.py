"""A recipe and changes to it, on a command line."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from typing import TypeVar

import tyro

from diloco.errors import UserError
from diloco.training.config import TrainConfig
from diloco.training.recipes import RECIPES, recipe

_Command = TypeVar("_Command")


def parsed(
    command: Callable[[TrainConfig], _Command],
    arguments: Sequence[str],
    *,
    prog: str,
    configs: Mapping[str, TrainConfig] | None = None,
) -> _Command:
    """What a command line asks for: the first argument names a recipe, the others change what it says.

    Args:
        command: makes the command, a dataclass, of a recipe's config.
        arguments: of the command line.
        prog: the words before them.
        configs: in the place of the recipes' own.

    Raises:
        UserError: for values that a config refuses.
        SystemExit: for what can't be parsed, which has been explained, and after help.
    """
    commands = {name: command((configs or {}).get(name) or recipe(name)) for name in RECIPES}
    texts = {name: function.__doc__ or "" for name, function in RECIPES.items()}
    if not arguments or arguments[0] not in commands:  # which explains what there is
        choices = {name: (texts[name], commands[name]) for name in commands}
        return tyro.extras.overridable_config_cli(choices, prog=prog, args=arguments)
    name, *flags = arguments
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(
                type(commands[name]),
                default=commands[name],
                prog=f"{prog} {name}",
                description=texts[name],
                args=flags,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as end:
        if (mistake := _our_own(end)) is not None:
            raise mistake from None
        sys.stderr.write(told.getvalue())
        raise


def _our_own(error: BaseException) -> UserError | None:
    """The refusal of one of our configs, around which tyro has put words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
