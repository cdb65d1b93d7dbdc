"""Command lines: parsed by tyro into a call, refused in one sentence that names the flag, and made of a config."""

import io
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from diloco.cli._streams import styled
from diloco.errors import DilocoError, UserError, nearest

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig

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
        with redirect_stderr(io.StringIO()), styled():
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
    before, given = _by_flag(arguments)
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


@contextmanager
def spelled(command: Callable[..., Any]) -> Iterator[None]:
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
        scalars = _scalars(self.kind)
        choices = [repr(value) for value in scalars if isinstance(value, str)]
        words = [f"one of {', '.join(choices)}"] if choices else []
        return " or ".join([*words, *dict.fromkeys(_IN_WORDS[kind] for kind in scalars if kind in _IN_WORDS)])

    def fits(self, word: str) -> bool:
        """True if a word is one of its values, or can be one of them."""
        return any(_fits(word, kind) for kind in _scalars(self.kind))


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
            yield Argument(name=named, kind=kind, is_flag=is_flag, is_required=is_required, metavar=metavar)


def fields_of(command: Callable[..., Any]) -> Iterator[str]:
    """The dotted names of what a command takes as flags, such as `diloco.sync_every`."""
    return (argument.name for argument in arguments_of(command) if argument.is_flag)


_POSITIONAL, _SUPPRESSED = (get_args(marker[str])[1] for marker in (tyro.conf.Positional, tyro.conf.Suppress))


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


def our_name(field: str) -> str:
    """The setting that nanochat, torchtitan or transformers calls so, in any section; or the same name.

    >>> our_name("training.seq_len")
    'sequence_length'
    """
    last = field.rpartition(".")[2]
    return next((ours for ours, theirs in _THEIR_NAMES.items() if last in theirs), field)


_THEIR_NAMES = {
    "checkpoint.every_steps": ("interval", "save_every", "save_steps"),
    "compile": ("torch_compile",),
    "config": ("config_file",),
    "data.held_out": ("validation_file",),
    "data.tokenizer": ("hf_assets_path", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "data.train": ("dataset", "dataset_name", "dataset_path", "train_file"),
    "device": ("device_type",),
    "epochs": ("num_epochs", "num_train_epochs"),
    "evaluation.every_steps": ("eval_every", "eval_steps"),
    "global_batch": ("batch_size", "global_batch_size", "total_batch_size"),
    "max_tokens": ("max_new_tokens",),
    "micro_batch": ("device_batch_size", "local_batch_size", "per_device_train_batch_size"),
    "model.num_heads": ("n_head", "n_heads", "num_attention_heads"),
    "model.num_layers": ("depth", "n_layer", "n_layers", "num_hidden_layers"),
    "model.width": ("dim", "hidden_size", "n_embd"),
    "name": ("experiment_name", "run", "run_name"),
    "num_replicas": ("nproc_per_node", "world_size"),
    "num_tokens": ("max_steps", "num_iterations", "steps", "target_param_data_ratio"),
    "optimizer.clip_norm": ("max_grad_norm", "max_norm"),
    "optimizer.learning_rate": ("lr", "matrix_lr", "max_lr"),
    "precision": ("bf16", "dtype", "fp16", "mixed_precision"),
    "resume": ("resume_from_checkpoint",),
    "runs": ("dump_folder", "out_dir", "output_dir"),
    "sequence_length": ("block_size", "max_seq_len", "max_seq_length", "seq_len"),
    "trackers": ("report_to",),
}
"""Names of other programs for a setting."""


def flags(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words of a command line that give settings their values, by dotted name.

    >>> flags({"diloco.sync_every": 30, "compile": False})
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
    from diloco.training.config.recipes import recipe

    return flags({name: value for name, (_, value) in differences(recipe(config.recipe), config).items()})


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
    words = changes(config)
    words.pop("runs", None)
    if config.data.prepared is not None and config.data.prepared.parent == config.data.cache.absolute():
        words.pop("data.prepared", None)  # it follows from the text
    return shlex.join(["diloco", "train", config.recipe, *(word for each in words.values() for word in each)])
