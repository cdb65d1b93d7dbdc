"""Configs field by field: the traits that a field declares beside itself, JSON in and out, and differences."""

import functools
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from diloco.errors import FileError, UserError
from diloco.models.families import DEFAULT_FAMILY, load_family
from diloco.models.spec import ModelConfig
from diloco.schema import converted

_Config = TypeVar("_Config")


def trait(
    *,
    incidental: bool = False,
    own_to_a_replica: bool = False,
    own_with_rendezvous: bool = False,
    may_change_on_resume: bool = False,
    begins_a_phase: bool = False,
    planned: bool = False,
    filled_in: bool = False,
    column: bool = False,
) -> dict[str, Any]:
    """The `metadata` of a config's field; a config of a room above writes the same dict itself.

    Args:
        incidental: no part of the run's identity, since no number depends on it.
        own_to_a_replica: replicas of one run may differ in it.
        own_with_rendezvous: those that come and go may.
        may_change_on_resume: a resumed run is the same run with another value.
        begins_a_phase: a resumed run may have another value, and begins a new phase of its learning-rate schedule.
        planned: `diloco plan` chooses it.
        filled_in: `resolve` sets it where it is left out, as None.
        column: it follows from a column of a sweep's table.
    """
    return {name: value for name, value in locals().items() if value}


def fields_with(kind: type, name: str) -> dict[str, Any]:
    """The fields that have a trait: its value by the field's dotted name, in the order of the fields.

    A config within a config that has the trait as a whole is one field.
    """
    values = dict(_fields_with(kind, name, ""))
    assert values, f"no field of {kind.__name__} has the trait {name!r}"
    return values


def _fields_with(kind: type, name: str, where: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for f in fields(kind):
        hint = hints[f.name]
        if name in f.metadata:
            yield where + f.name, f.metadata[name]
        elif is_dataclass(hint):
            assert isinstance(hint, type), "a config's field has one type"
            for family in (hint, *hint.__subclasses__()):  # a model's own fields stand in the class of its family
                yield from _fields_with(family, name, f"{where}{f.name}.")


def get(config: Any, dotted: str) -> Any:
    """The value of a field, by its dotted name."""
    return functools.reduce(getattr, dotted.split("."), config)


def with_value(config: _Config, dotted: str, value: Any) -> _Config:
    """The config with another value in a field, by its dotted name."""
    name, _, rest = dotted.partition(".")
    inner = with_value(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: inner})  # pyright: ignore[reportArgumentType]


def to_json(config: Any) -> Any:
    """The config as a value that `json` writes; a model of another family than the decoder's names its family."""
    if is_dataclass(config):
        values = {f.name: to_json(getattr(config, f.name)) for f in fields(config)}
        return values | _family(config)
    if isinstance(config, tuple):
        return [to_json(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def _family(config: Any) -> dict[str, str]:
    is_other = isinstance(config, ModelConfig) and config.family != DEFAULT_FAMILY
    return {"family": config.family} if is_other else {}


def from_json(kind: type[_Config], values: Any, *, source: str = "config") -> _Config:
    """The config that `to_json` wrote; a field that is absent takes its default.

    Args:
        kind: a config, with a model of any family in its field `model`.
        values: as `json` reads them.
        source: the file that they are from.

    Raises:
        FileError: for a field that the config does not have, or lacks, and for a value of another type or range.
    """
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        raise FileError(f"{source} can't be read: it has no object as model")
    try:
        family = load_family(str(model.get("family", DEFAULT_FAMILY)))
    except UserError as error:
        raise FileError(f"{source} can't be read: {error}", *error.fields) from error
    # The field's own type is the base of all families, which has no fields of theirs.
    of_family = make_dataclass(kind.__name__, [("model", family)], bases=(kind,), frozen=True, kw_only=True)
    sizes = {name: value for name, value in model.items() if name != "family"}
    config: Any = converted(values | {"model": sizes}, of_family, source=source)
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})  # pyright: ignore[reportArgumentType]


def flat_json(config: Any, where: str = "") -> dict[str, str | int | float | bool]:
    """The values of all fields by dotted name, as trackers keep hyperparameters: what is no number is text."""
    flat: dict[str, str | int | float | bool] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            flat |= flat_json(value, f"{where}{f.name}.")
        else:
            flat[where + f.name] = value if isinstance(value, str | int | float) else str(value)
    return flat


def differences(one: Any, other: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, by dotted name, with both values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for f in fields(one):
        mine, theirs = getattr(one, f.name), getattr(other, f.name)
        if is_dataclass(mine) and type(mine) is type(theirs):
            differing |= differences(mine, theirs, f"{where}{f.name}.")
        elif mine != theirs:
            differing[where + f.name] = (mine, theirs)
    return differing


def differences_from_defaults(config: Any, where: str = "") -> dict[str, Any]:
    """The fields that differ from their defaults, by dotted name, as JSON values; a field without a default does.

    A digest of them stays the same when a config gains a field. A changed default must be a new field.
    """
    differing: dict[str, Any] = {where + name: value for name, value in _family(config).items()}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            differing |= differences_from_defaults(value, f"{where}{f.name}.")
        elif _is_required(f) or value != f.default:
            differing[where + f.name] = to_json(value)
    return differing


def _is_required(f: "Field[Any]") -> bool:
    return f.default is MISSING and f.default_factory is MISSING
