"""Command lines: parsed by tyro into a call of a function, or an object, whose refusals are one sentence each."""

import io
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Annotated, Any

import tyro

from diloco.cli._flags import arguments_of, field_of, fields_of, flag, our_name, spelled
from diloco.errors import UserError, nearest

Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
"""A run on a command line: its directory, or the URL of its store."""


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
    try:
        with redirect_stderr(io.StringIO()):
            value, unknown = tyro.cli(kind, prog=prog, args=arguments, return_unknown_args=True, **options)
    except SystemExit as end:
        if not end.code:
            raise
        sentence = _mistake(kind, arguments, prog, has_default="default" in options)
        raise _refusal(end) or UserError(f"{sentence} ({prog} --help)") from None
    if unknown:
        raise _unknown_word(unknown[0], kind, prog)
    return value


def _mistake(kind: Callable[..., Any], arguments: Sequence[str], prog: str, *, has_default: bool) -> str:
    """The reason why a command line can't be parsed: the first flag whose values do not fit, or what it lacks."""
    own = {argument.name: argument for argument in arguments_of(kind)}
    before, given = by_flag(arguments)
    for word, values in given:
        argument = own.get(field_of(word))
        if argument is None or argument.kind is bool:
            continue
        if not values:
            return f"{word} needs a value"
        for value in values if argument.takes_many else values[:1]:
            if not argument.fits(value):
                return f"{word} takes {argument.expected}, not {value!r}"
    fields = {field_of(word) for word, _ in given}
    for argument in () if has_default else own.values():
        if argument.is_required and not (argument.name in fields if argument.is_flag else before):
            return f"{prog} needs {argument.label}"
    return f"{prog} can't take {shlex.join(arguments)!r:.200}"


def by_flag(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The words before the first flag, and each flag, as it is typed, with the words that follow it."""
    before: list[str] = []
    given: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given.append((name, [value] if equals else []))
        else:
            (given[-1][1] if given else before).append(word)
    return before, given


def _unknown_word(word: str, kind: Callable[..., Any], prog: str) -> UserError:
    """The refusal of a word that no flag takes, with the flag that is nearest to it."""
    if not word.startswith("-"):
        return UserError(f"{word!r} is not expected here: a value stands after its flag ({prog} --help)")
    fields = set(fields_of(kind))
    name = word.partition("=")[0]
    field = field_of(name)
    whole = flag(field, fields)  # such as learning_rate, whose flag has a section's name before it
    if whole == field and (ours := our_name(field)) in fields:
        whole = flag(ours, fields)
    near = nearest(name, (flag(one, fields) for one in fields)) if whole == field else f": did you mean {whole}?"
    return UserError(f"unknown flag {name}{near} ({prog} --help lists all)")


def _refusal(error: BaseException) -> UserError | None:
    """The error of one of our configs, around which tyro has put words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
