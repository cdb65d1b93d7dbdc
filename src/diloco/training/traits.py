"""Configs field by field: as JSON, from it, and compared."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diloco.errors import UserError

_Config = TypeVar("_Config")


def to_json(config: Any) -> Any:
    """A config as what `json` writes."""
    if is_dataclass(config):
        return {f.name: to_json(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, tuple):
        return [to_json(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def from_json(kind: type[_Config], values: Any, where: str = "") -> _Config:
    """A config from what `to_json` made.

    Raises:
        UserError: for a field that the config does not have, or lacks.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, dict):
        raise UserError(f"{where.removesuffix('.') or 'config'} must be an object with fields, not {values!r}")
    if unknown := sorted(set(values) - set(hints)):
        raise UserError(f"unknown field {where}{unknown[0]}: it was written by another version, or by hand")
    known = {name: _value(hints[name], value, f"{where}{name}.") for name, value in values.items()}
    try:
        return kind(**known)
    except TypeError as error:
        raise UserError(f"{where or 'config'}: {error}") from None


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
    told = " or ".join(text for option in options for text in _names(option))
    raise UserError(f"{where.removesuffix('.')} must be {told}, not {value!r}")


def _names(option: Any) -> list[str]:
    """What a user would call a type."""
    if get_origin(option) is Literal:
        return [repr(choice) for choice in get_args(option)]
    return ["null" if option is NoneType else "a list" if get_origin(option) is tuple else option.__name__]


def differences(one: Any, other: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, by dotted name, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for f in fields(one):
        mine, theirs = getattr(one, f.name), getattr(other, f.name)
        if is_dataclass(mine):
            found |= differences(mine, theirs, f"{where}{f.name}.")
        elif mine != theirs:
            found[where + f.name] = (mine, theirs)
    return found
