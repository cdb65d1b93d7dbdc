"""Flags: which a command has, how errors name them, and which make a config of its recipe."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from diloco.errors import DilocoError

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig


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
        return any(get_origin(kind) is tuple for kind in _alternatives(self.kind))

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


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _scalars(kind: Any) -> list[Any]:
    """The types, and the choices of a Literal, that one word may be."""
    scalars = []
    for one in _alternatives(kind):
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
