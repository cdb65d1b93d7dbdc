"""Configs field by field: the traits that a field declares beside itself, JSON in and out, and differences."""

import functools
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diloco.errors import UserError
from diloco.models.spec import DEFAULT_FAMILY, ModelConfig, load_family

_Config = TypeVar("_Config")


def trait(
    *,
    incidental: bool = False,
    own_to_a_replica: bool = False,
    may_change_on_resume: bool = False,
    planned: bool = False,
    column: str | None = None,
) -> dict[str, Any]:
    """The `metadata` of a config's field; a config of a room above writes the same dict itself.

    Args:
        incidental: no part of the run's identity, since no number depends on it.
        own_to_a_replica: replicas of one run may differ in it.
        may_change_on_resume: a resumed run is the same run with another value.
        planned: `diloco plan` chooses it.
        column: the column of a sweep's table from which it follows.
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
        if name in f.metadata:
            yield where + f.name, f.metadata[name]
        elif is_dataclass(hints[f.name]):
            yield from _fields_with(hints[f.name], name, f"{where}{f.name}.")


def get(config: Any, dotted: str) -> Any:
    """The value of a field, by its dotted name."""
    return functools.reduce(getattr, dotted.split("."), config)


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


def from_json(kind: type[_Config], values: Any, where: str = "") -> _Config:
    """The config that `to_json` wrote; a field that is absent takes its default.

    Raises:
        UserError: for a field that the config does not have, or lacks, and for a value of another type.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where.removesuffix('.') or 'config'} must be an object with fields, not {values!r}")
    if kind is ModelConfig:
        family = load_family(values.get("family", DEFAULT_FAMILY))
        return from_json(family, {k: v for k, v in values.items() if k != "family"}, where)  # pyright: ignore[reportReturnType]
    hints = get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise UserError(f"unknown field {where}{unknown[0]}: it was written by another version, or by hand")
    required = (f.name for f in fields(kind) if _is_required(f))  # pyright: ignore[reportArgumentType]
    if missing := [name for name in required if name not in values]:
        raise UserError(f"the field {where}{missing[0]} is missing")
    return kind(**{name: _value(hints[name], value, f"{where}{name}.") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value, where)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        if isinstance(value, list) and get_origin(option) is tuple:
            return tuple(_value(get_args(option)[0], each, where) for each in value)
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if option is Path and isinstance(value, str):
            return Path(value)
        if type(value) is option or (option is float and type(value) is int):
            return value
    expected = " or ".join(text for option in options for text in _names(option))
    raise UserError(f"{where.removesuffix('.')} must be {expected}, not {value!r}")


def _names(option: Any) -> list[str]:
    """The words that a user has for a type."""
    if get_origin(option) is Literal:
        return [repr(choice) for choice in get_args(option)]
    return ["null" if option is NoneType else "a list" if get_origin(option) is tuple else option.__name__]


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
