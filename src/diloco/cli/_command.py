"""Command lines: parsed by tyro into a call, refused in one sentence that names the flag, and made of a config."""

import io
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from diloco.cli import _foreign
from diloco.cli._streams import styled
from diloco.errors import DilocoError, UserError, nearest
from diloco.units import Reader, count

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig

Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
"""A run on a command line: its directory, or the URL of its store."""


def call(command: Callable[..., None], arguments: Sequence[str], *, prog: str) -> None:
    """Parse a command line into a function's arguments, and call it; its errors name its flags."""

    @wraps(command)
    def bound(*values: Any, **named: Any) -> Callable[[], None]:
        return partial(command, *values, **named)

    with flags_in_errors(command):
        parsed(bound, arguments, prog=prog)()


def choose(commands: Mapping[str, Callable[..., None]], arguments: Sequence[str], *, prog: str) -> None:
    """Call the command that the first argument names."""
    if arguments and arguments[0] in commands:
        call(commands[arguments[0]], arguments[1:], prog=f"{prog} {arguments[0]}")
    elif asks_for_help(arguments):
        with styled():
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
    meant = _foreign.CHOICES.get(word, "")
    near = f": did you mean {meant}?" if meant in choices else nearest(word, choices)
    hint = near or f": choose one of {', '.join(choices)}"
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
    arguments = _whole_names(kind, arguments)
    _check_lists(kind, arguments)
    plain = _with_plain_numbers(kind, arguments, prog)
    try:
        with redirect_stderr(io.StringIO()), styled():
            value, unknown = tyro.cli(kind, prog=prog, args=plain, return_unknown_args=True, **options)
    except SystemExit as end:
        if not end.code:
            raise
        raise _refusal(end) or _mistake(kind, arguments, prog, options.get("default")) from None
    if unknown:
        raise _unknown_word(unknown, arguments, kind, prog, getattr(value, "config", None))
    return value


def _whole_names(kind: Callable[..., Any], arguments: Sequence[str]) -> list[str]:
    """The command line with `--optimizer.name` where it has `--optimizer`: a section has no value of its own."""
    own, words = set(fields_of(kind)), []
    for word in arguments:
        name, equals, value = word.partition("=")
        is_section = name.startswith("--") and f"{field_of(name)}.name" in own - {field_of(name)}
        words.append(f"{name}.name{equals}{value}" if is_section else word)
    return words


def _check_lists(kind: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse a list in two parts, of which tyro would leave the first one out."""
    many = {argument.name for argument in arguments_of(kind) if argument.takes_many}
    given = dict[str, list[str]]()
    for word, values in _by_flag(arguments)[1]:
        if (name := field_of(word)) in given and name in many:
            whole = shlex.join([word, *given[name], *values])
            raise UserError(f"{word} stands twice: write its values after one: {whole}")
        given[name] = values


def _with_plain_numbers(kind: Callable[..., Any], arguments: Sequence[str], prog: str) -> list[str]:
    """The command line with each value that a `Reader` reads, such as 124M, written as a plain number."""
    own = {argument.name: argument for argument in arguments_of(kind)}
    words: list[str] = []
    argument = None
    for word in arguments:
        name, equals, value = word.partition("=") if word.startswith("--") or word == "-h" else ("", "", word)
        argument = own.get(field_of(name)) if name else argument
        if argument is not None and argument.reader is not None and (equals or not name):
            if not argument.fits(value):
                raise UserError(f"{argument.label} takes {argument.expected}, not {value!r} ({prog} --help)")
            value = repr(argument.reader.read(value))
        words.append(name + equals + value)
    return words


def _mistake(kind: Callable[..., Any], arguments: Sequence[str], prog: str, default: Any) -> UserError:
    """The reason why a command line can't be parsed: the first flag whose values do not fit, or what it lacks."""
    sentence = _misfit(kind, arguments) or next(_lacking(kind, arguments, prog, default), None)
    if isinstance(sentence, UserError):
        return sentence
    sentence = sentence or f"{prog} can't take {shlex.join(arguments)!r:.200}"
    return UserError(f"{sentence} ({prog} --help)")


def _misfit(kind: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """The first flag whose values do not fit."""
    own = {argument.name: argument for argument in arguments_of(kind)}
    for word, values in _by_flag(arguments)[1]:
        argument = own.get(field_of(word))
        if argument is None or argument.kind is bool:
            continue
        if not values:
            return f"{word} needs a value"
        for value in values if argument.takes_many else values[:1]:
            if not argument.fits(value):
                meant = _foreign.value(argument.name, value, argument.choices)
                hint = meant if _has_flags(meant, own) else ""
                return f"{word} takes {argument.expected}, not {value!r}{hint}"
    return None


def _lacking(
    kind: Callable[..., Any], arguments: Sequence[str], prog: str, default: Any
) -> Iterator[UserError | str]:
    """The flag that may be meant for one that is required, or the first that is."""
    own = {argument.name: argument for argument in arguments_of(kind)}
    before, given = _by_flag(arguments)
    for word, values in given:
        alone = next((one for one in own.values() if not one.is_flag and one.is_required and not before), None)
        if alone is not None and values and field_of(word) in _FLAGS_OF_WORDS:
            yield f"{alone.label} stands without a flag: {prog} {shlex.quote(values[0])}"
        if (name := field_of(word)) not in own and name.replace("no_", "", 1) not in own:
            yield _unknown_word([word, *values], arguments, kind, prog, getattr(default, "config", None))
    fields = {field_of(word) for word, _ in given}
    for argument in own.values() if default is None else ():
        if argument.is_required and not (argument.name in fields if argument.is_flag else before):
            hint = _EXPLAINED.get(argument.label, "")
            if argument.reader is not None and before and argument.fits(before[0]):
                hint = f": type {argument.label} {before[0]}"
            yield f"{prog} needs {argument.label}{hint}"


_FLAGS_OF_WORDS = ("checkpoint", "dir", "model", "path", "run", "run_dir", "store", "url")
"""Flags of other programs for a word without a flag."""
_EXPLAINED = {
    "RUN": ": a run's directory, such as runs/first, or the URL of its store",
    "URL": ": a directory, or a bucket such as s3://bucket/run",
}
"""The meaning of words without a flag."""


def _by_flag(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
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


def _unknown_word(
    words: Sequence[str], arguments: Sequence[str], kind: Callable[..., Any], prog: str, config: Any
) -> UserError:
    """The refusal of words that no flag takes, the first of which is at fault, with what to type in its place."""
    word, fields = words[0], set(fields_of(kind))
    if not word.startswith("-"):
        return UserError(_stray(word, arguments, kind, prog, config))
    name, equals, value = word.partition("=")
    field, values_of = field_of(name), dict(_by_flag(arguments)[1])
    if field in fields and name.startswith("--"):
        return UserError(f"leave out the -- before {name} ({prog} --help)")
    value = value if equals else next(iter(values_of.get(name, words[1:])), "")
    ours = (flag(one, fields) for one in (field, *_foreign.our_names(field)))
    if replacement := next((one for one in ours if one.startswith("--")), None):
        answer = f": did you mean {replacement}?"
    elif (text := _foreign.sentence(field, _computed(config, value))) and _has_flags(text, fields):
        answer = f": {text}"
    else:
        parts = {part: one for one in fields for part in (one.rpartition(".")[2], one)}
        near = nearest(field, parts)
        answer = near and f": did you mean {flag(parts[near.split()[-1].rstrip('?')], fields)}?"
    return UserError(f"unknown flag {name}{answer} ({prog} --help lists all)")


def _has_flags(text: str, fields: Collection[str]) -> bool:
    """True if a command has all flags that a sentence names."""
    return all(field_of(name) in fields for name in re.findall(r"--[a-z][a-z.-]*", text))


def _computed(config: Any, value: str) -> dict[str, str]:
    """The values of other settings that a number of another program's flag comes to, in a config of ours."""
    try:
        number, step_tokens = count(value), config.global_batch * config.sequence_length
        return {
            "micro_batch": str(max(1, math.ceil(config.process_batch / number))),
            "num_tokens": str(round(number * step_tokens)),
            "warmup_steps": str(round(number * config.num_tokens / step_tokens)),
        }
    except (ArithmeticError, AttributeError, ValueError):  # no number, or no config
        return {}


def _stray(word: str, arguments: Sequence[str], kind: Callable[..., Any], prog: str, config: Any) -> str:
    """The refusal of a word that stands where no value is expected."""
    own = {argument.name: argument for argument in arguments_of(kind)}
    fields = {name for name, argument in own.items() if argument.is_flag}
    if (name := word.lstrip(_DASHES)) != word.lstrip("-"):
        return f"{word}: a flag begins with two hyphens: --{name} ({prog} --help)"
    name, _, value = word.lstrip("+").partition("=")
    if value:
        ours = (flag(one, fields) for one in (field_of(name), *_foreign.our_names(name)))
        if replacement := next((one for one in ours if one.startswith("--")), None):
            return f"{word!r}: a setting is a flag: {replacement} {shlex.quote(value)} ({prog} --help)"
        return str(_unknown_word([f"--{name}", value], arguments, kind, prog, config))
    for before, after in pairwise(["", *(part for one in arguments for part in one.split("=", 1))]):
        argument = own.get(field_of(before)) if after == word and before.startswith("--") else None
        if argument is not None and argument.kind is bool:
            off = f"--{before[2:].replace('_', '-')}".replace(*_negation(argument.name))
            return f"{before} takes no value: leave {word!r} out, or type {off} ({prog} --help)"
    meant = ("data.train",) if word.endswith(TEXT_SUFFIXES) else ("prompt", "tasks")
    if one := next((one for name in meant if (one := flag(name, fields)) != name), None):
        return f"{word!r} is not expected here: type {one} {shlex.quote(word)} ({prog} --help)"
    return f"{word!r} is not expected here: a value stands after its flag ({prog} --help)"


_DASHES = "-\u2013\u2014"
"""The hyphen, and what a page may print in its place."""
TEXT_SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet", ".gz", ".zst")


def _negation(field: str) -> tuple[str, str]:
    """The end of a flag, and that of the flag that turns it off."""
    last = field.rpartition(".")[2].replace("_", "-")
    return last, f"no-{last}"


def _refusal(error: BaseException) -> UserError | None:
    """The error of one of our configs, around which tyro has put words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def flags_in_errors(command: Callable[..., Any]) -> Iterator[None]:
    """Write the settings in an error's message as the flags of a command."""
    try:
        yield
    except DilocoError as error:
        if error.fields:
            fields = set(fields_of(command))
            error.args = (error.spelled(lambda field: flag(field, fields)),)
        raise


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a command."""

    name: str
    """The dotted name of its field, such as `diloco.sync_every`."""
    kind: Any
    """The type of its value."""
    is_flag: bool
    """False for a word that stands without a flag."""
    is_required: bool
    """True if it has no default."""
    metavar: str | None = None
    """The name of its value in help, if that is another one."""
    reader: Reader | None = None
    """The reader of its numbers; None is Python."""

    @property
    def label(self) -> str:
        """The argument as help calls it."""
        return "--" + self.name.replace("_", "-") if self.is_flag else self.metavar or self.name.upper()

    @property
    def takes_many(self) -> bool:
        """True if several values may follow the flag."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return any(get_origin(kind) is tuple for kind in kinds)

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        if self.reader is not None:
            return self.reader.expected
        words = [f"one of {', '.join(map(repr, self.choices))}"] if self.choices else []
        kinds = dict.fromkeys(_IN_WORDS[kind] for kind in _scalars(self.kind) if kind in _IN_WORDS)
        return " or ".join([*words, *kinds])

    @property
    def choices(self) -> list[str]:
        """The words of which it takes one."""
        return [value for value in _scalars(self.kind) if isinstance(value, str)]

    def fits(self, word: str) -> bool:
        """True if a word is one of its values, or can be one of them."""
        if self.reader is None:
            return any(_fits(word, kind) for kind in _scalars(self.kind))
        with suppress(ValueError):
            self.reader.read(word)
            return True
        return False


_IN_WORDS = {int: "a whole number", float: "a number"}


def _scalars(kind: Any) -> list[Any]:
    """The types, and the choices of a Literal, that one word may be."""
    scalars = []
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(one) is tuple:
            scalars += _scalars(get_args(one)[0])
        else:
            scalars += get_args(one) if get_origin(one) is Literal else [one]
    return scalars


def _fits(word: str, kind: Any) -> bool:
    if isinstance(kind, str) or kind is NoneType:
        return word == str(kind if isinstance(kind, str) else None)
    try:
        return kind not in _IN_WORDS or kind(word) is not None
    except ValueError:
        return False


def arguments_of(command: Callable[..., Any]) -> Iterator[Argument]:
    """The arguments of a command, in order; those of a config within it by their dotted names."""
    parameters = signature(command).parameters
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        extras += [extra for one in get_args(kind) if get_origin(one) is Annotated for extra in get_args(one)[1:]]
        if name not in parameters or _SUPPRESSED in extras:  # a function's `return`, or a class's own value
            continue
        is_required = parameters[name].default is Parameter.empty
        named = next((extra.name for extra in extras if getattr(extra, "name", None) is not None), name)
        if isinstance(kind, type) and is_dataclass(kind):
            prefix = f"{named}." if named else ""
            inner = {}
            for family in (kind, *kind.__subclasses__()):  # a model's own fields stand in the class of its family
                inner |= {argument.name: argument for argument in arguments_of(family)}
            for argument in inner.values():
                required = is_required and argument.is_required
                yield replace(argument, name=prefix + argument.name, is_required=required)
        else:
            metavar = next((extra.metavar for extra in extras if getattr(extra, "metavar", None)), None)
            is_flag = _POSITIONAL not in extras
            reader = next((extra for extra in extras if isinstance(extra, Reader)), None)
            kind = get_args(kind)[0] if _APPENDED in extras else kind  # of each time that it stands
            yield Argument(
                name=named, kind=kind, is_flag=is_flag, is_required=is_required, metavar=metavar, reader=reader
            )


def fields_of(command: Callable[..., Any]) -> Iterator[str]:
    """The dotted names of what a command takes as flags, such as `diloco.sync_every`."""
    return (argument.name for argument in arguments_of(command) if argument.is_flag)


_POSITIONAL, _SUPPRESSED, _APPENDED = (
    get_args(marker[str])[1] for marker in (tyro.conf.Positional, tyro.conf.Suppress, tyro.conf.UseAppendAction)
)


def field_of(flag: str) -> str:
    """The dotted name of a flag's setting."""
    return flag.lstrip("-").replace("-", "_")


def flag(field: str, fields: Collection[str]) -> str:
    """The flag of a setting among a command's; the setting as it is where it has none.

    Args:
        field: the setting's dotted name in the library, such as `data.train`.
        fields: the command's own names, of which one may lack the first words, or have more of them.

    >>> flag("data.train", {"output", "train"})
    '--train'
    >>> flag("checkpoint.every_steps", {"limit"})
    'checkpoint.every_steps'
    """
    alike = [one for one in fields if f".{field}".endswith(f".{one}") or one.endswith(f".{field}")]
    name = field if field in fields else alike[0] if len(alike) == 1 else None
    return field if name is None else "--" + name.replace("_", "-")


def flag_words(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words of a command line that give settings their values, by dotted name.

    >>> flag_words({"diloco.sync_every": 30, "compile": False})
    {'diloco.sync_every': ['--diloco.sync-every', '30'], 'compile': ['--no-compile']}
    """
    words = {}
    for name, value in settings.items():
        path, dot, field = name.replace("_", "-").rpartition(".")
        negated = "no-" if value is False else ""
        values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
        words[name] = [f"--{path}{dot}{negated}{field}", *map(str, values)]
    return words


def changes(config: "TrainConfig") -> dict[str, list[str]]:
    """The words after `diloco train RECIPE` that make a config of its recipe, by dotted name."""
    from diloco.training.config.config import differences
    from diloco.training.config.recipes import recipe, recipe_of

    # The words for method and number of replicas come first: the other values of a recipe may follow from them.
    default = differences(recipe(config.recipe), config)
    changed = {name: default[name] for name in ("method", "num_replicas") if name in default}
    changed |= differences(recipe_of(config), config)
    return flag_words({name: value for name, (_, value) in changed.items()})


def train_command(directory: Path) -> str:
    """The command line that starts the run in a directory; empty if it can't be told from the run's config."""
    from diloco.training.config.recipes import RECIPES, recipe
    from diloco.training.records.runs import read_asked

    try:
        config = read_asked(directory)
    except UserError:
        return ""
    if config.recipe not in RECIPES or type(config.model) is not type(recipe(config.recipe).model):
        return ""
    if config.optimizer.start_step:  # the schedule has changed since
        return ""
    words = changes(config)
    words.pop("runs", None)
    if config.data.prepared is not None and config.data.prepared.parent == config.data.cache.absolute():
        words.pop("data.prepared", None)  # it follows from the text
    return shlex.join(["diloco", "train", config.recipe, *(word for each in words.values() for word in each)])
