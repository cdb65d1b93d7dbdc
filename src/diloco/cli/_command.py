"""Command lines: parsed by tyro into a call of a function, or an object, whose refusals are one sentence each."""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial, wraps
from itertools import dropwhile, takewhile
from typing import Any

import tyro

from diloco.cli._flags import fields_of, flag, our_name, spelled
from diloco.errors import UserError, nearest


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
    elif asks_for_help(arguments):
        tyro.extras.subcommand_cli_from_dict(dict(commands), prog=prog, args=arguments)
    else:
        raise unknown_choice(arguments, commands, prog=prog)


def unknown_choice(arguments: Sequence[str], choices: Iterable[str], *, prog: str) -> UserError:
    """The refusal of a command line whose first word is none of the choices."""
    if not arguments:
        return UserError(f"{prog} needs one of {', '.join(choices)}")
    word = arguments[0]
    if word.startswith("-"):
        return UserError(f"{prog} {word}: name one of {', '.join(choices)} before the flags")
    hint = nearest(word, choices) or f": choose one of {', '.join(choices)}"
    return UserError(f"{prog} has no {word!r}{hint}")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """True for a command line with a flag that prints help."""
    return bool({"-h", "--help"} & set(arguments))


def parsed(kind: Callable[..., Any], arguments: Sequence[str], *, prog: str, **options: Any) -> Any:
    """The value that tyro makes of a command line.

    Args:
        kind: a dataclass, or a function.
        arguments: the command line.
        prog: the words before them.
        options: as `tyro.cli` takes them.

    Raises:
        UserError: for what can't be parsed, and for values that one of our configs refuses.
        SystemExit: after help.
    """
    explanation = io.StringIO()
    try:
        with redirect_stderr(explanation), _wide(arguments):
            value, unknown = tyro.cli(kind, prog=prog, args=arguments, return_unknown_args=True, **options)
    except SystemExit as end:
        if not end.code:
            raise
        reason = _refusal(end) or UserError(f"{_sentence(explanation.getvalue())} ({prog} --help)")
        raise reason from None
    if unknown:
        raise _unknown_word(unknown[0], kind, prog)
    return value


def _unknown_word(word: str, kind: Callable[..., Any], prog: str) -> UserError:
    """The refusal of a word that no flag takes, with the flag that is nearest to it."""
    if not word.startswith("-"):
        return UserError(f"{word!r} is not expected here: a value stands after its flag ({prog} --help)")
    fields = set(fields_of(kind))
    name = word.partition("=")[0]
    field = name.lstrip("-").replace("-", "_")
    whole = flag(field, fields)  # such as learning_rate, whose flag has a section's name before it
    if whole == field and (ours := our_name(field)) in fields:
        whole = flag(ours, fields)
    near = nearest(name, (flag(one, fields) for one in fields)) if whole == field else f": did you mean {whole}?"
    return UserError(f"unknown flag {name}{near} ({prog} --help lists all)")


@contextmanager
def _wide(arguments: Sequence[str]) -> Iterator[None]:
    """Have tyro write what it explains without line breaks; help keeps the terminal's width."""
    before = os.environ.get("COLUMNS")
    if not asks_for_help(arguments):
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        elif not asks_for_help(arguments):
            del os.environ["COLUMNS"]


def _sentence(explanation: str) -> str:
    """The first sentence in the frame, below its title, that tyro draws around several; in our words if known."""
    lines = [line.strip("│ ") for line in explanation.splitlines()[1:]]
    text = " ".join(takewhile(lambda line: line and not _is_rule(line), dropwhile(_is_rule, lines)))
    for pattern, replacement in _REWORDED:
        text = re.sub(pattern, replacement, text)
    return (text or explanation.strip()).rstrip(".")


def _is_rule(line: str) -> bool:
    return set(line) <= set("─-╭╮╰╯")


_REWORDED = (
    (
        r"^Error parsing (\S+): invalid literal for int\(\) with base 10: '(.*)'",
        r"\1 takes a whole number, not '\2'",
    ),
    (r"^Error parsing (\S+): could not convert string to float: '(.*)'", r"\1 takes a number, not '\2'"),
    (
        r"^Error parsing (\S+): no type matching (.+) could be instantiated from \['(.*)'\].*",
        r"\1 takes \2, not '\3'",
    ),
    (r"^Error parsing (\S+): ", r"\1: "),
    (
        r"^invalid choice ('.*') for argument '(\S+)'\. Expected one of \((.*?),?\)\.",
        r"\2 takes one of \3, not \1",
    ),
    (r"^Missing value for argument '(\S+)'.*", r"\1 needs a value"),
    (r"^Missing from (.*): (\S+).*", r"\1 needs \2"),
    (r"\{None\}\|", ""),
)
"""Parts of tyro's explanations, and how we say them."""


def _refusal(error: BaseException) -> UserError | None:
    """The error of one of our configs, around which tyro has put words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
