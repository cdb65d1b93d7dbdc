"""Command lines: parsed by tyro into a call of a function, or an object, whose refusals are one sentence each."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Any

import tyro

from diloco.cli._flags import spelled
from diloco.errors import UserError


def call(command: Callable[..., None], arguments: Sequence[str], *, prog: str) -> None:
    """Parse a command line into a function's arguments, and call it; its errors name its flags."""

    @wraps(command)
    def bound(*values: Any, **named: Any) -> Callable[[], None]:
        return partial(command, *values, **named)

    with spelled(command):
        parsed(bound, arguments, prog=prog)()


def choose(commands: Mapping[str, Callable[..., None]], arguments: Sequence[str], *, prog: str) -> None:
    """Call the command that the first argument names."""
    if arguments and arguments[0] in commands:
        call(commands[arguments[0]], arguments[1:], prog=f"{prog} {arguments[0]}")
    else:  # which prints help, or explains what there is to choose
        tyro.extras.subcommand_cli_from_dict(dict(commands), prog=prog, args=arguments)


def parsed(kind: Callable[..., Any], arguments: Sequence[str], *, prog: str, **options: Any) -> Any:
    """The value that tyro makes of a command line.

    Args:
        kind: a dataclass, or a function.
        arguments: the command line.
        prog: the words before them.
        options: as `tyro.cli` takes them.

    Raises:
        UserError: for values that one of our configs refuses.
        SystemExit: for what can't be parsed, which has been explained, and after help.
    """
    explanation = io.StringIO()
    try:
        with redirect_stderr(explanation):
            return tyro.cli(kind, prog=prog, args=arguments, **options)
    except SystemExit as end:
        if (refusal := _refusal(end)) is not None:
            raise refusal from None
        sys.stderr.write(explanation.getvalue())
        raise


def _refusal(error: BaseException) -> UserError | None:
    """The error of one of our configs, around which tyro has put words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
