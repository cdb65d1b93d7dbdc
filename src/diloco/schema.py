"""The one reader of diloco's own JSON: text to a dataclass, with the types and ranges that its fields declare.

A field declares a range beside its type, `Annotated[int, msgspec.Meta(ge=0)]`, or takes `Count` below; a dataclass
checks in `__post_init__` how its fields depend on each other.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from diloco.errors import FileError, UserError
from diloco.files import reading

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things; it fits 64 bits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A duration."""
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}\Z")]
"""The name of a run or a replica, which is a directory's name, too."""

_T = TypeVar("_T")


def read_json(path: Path, kind: type[_T], *, most_bytes: int = 64 << 20) -> _T:
    """The content of a JSON file, as `decoded` gives it.

    Args:
        path: of the file.
        kind: as in `decoded`.
        most_bytes: size of the largest file that is read.

    Raises:
        FileError: if the file can't be read, is larger, or is not of this kind.
    """
    return decoded(read_bytes(path, most_bytes=most_bytes), kind, source=str(path))


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """The content of a file, as long as it is no larger than a file of its kind can be.

    Raises:
        FileError: if the file can't be read, or is larger.
    """
    with reading(path), path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FileError(f"{path} can't be read: it has more than {most_bytes:,} bytes")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file of at most 1 MiB.

    Raises:
        FileError: if it is none.
    """
    content = read_bytes(path, most_bytes=1 << 20)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} can't be read: {error}") from error


def shown(value: object, most: int = 200) -> str:
    """A JSON value for a sentence, cut short."""
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}…"


def decoded(text: bytes | str, kind: type[_T], *, source: str) -> _T:
    """A value from JSON.

    Args:
        text: of JSON; keys may not repeat, and numbers are finite.
        kind: a dataclass whose fields, and theirs, are dataclasses, numbers, texts, paths, lists, tuples or
            dictionaries of such; or one of these. Fields without a default must be there, and no others.
        source: the file or the sender, for errors.

    Raises:
        FileError: if the text is not JSON, or not of this kind; it names the source and the field.

    >>> decoded('{"a": 1}', dict[str, Count], source="counts.json")
    {'a': 1}
    >>> decoded('{"a": -1}', dict[str, Count], source="counts.json")
    Traceback (most recent call last):
    diloco.errors.FileError: counts.json can't be read: *: expected int >= 0
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = msgspec.json.decode(text, type=kind, dec_hook=_from_text)
        raw = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise FileError(f"{source} can't be read: its lists and objects are nested too deep") from None
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise _refusal(source, error) from error
    _check_names(value, raw, source)
    return value


def converted(value: Any, kind: type[_T], *, source: str) -> _T:
    """A value that JSON's parser gave, as `decoded` gives it.

    Raises:
        FileError: as `decoded`.
    """
    try:
        made = msgspec.convert(value, kind, dec_hook=_from_text)
    except (ValueError, OverflowError) as error:
        raise _refusal(source, error) from error
    _check_names(made, value, source)
    return made


def without_format(values: Mapping[str, Any], expected: int, *, source: str) -> dict[str, Any]:
    """The values that stand beside the number of their format.

    Args:
        values: by name, the format's number as `format`.
        expected: the number of the format that this diloco reads and writes.
        source: the file in words, for errors.

    Raises:
        FileError: if they are of another format.
    """
    own = {name: value for name, value in values.items() if name != "format"}
    if (number := values.get("format")) != expected or number is True:
        written = f"is of format {values['format']!r:.20}" if "format" in values else "names no format"
        raise FileError(
            f"{source} {written}, and this diloco reads format {expected}: use the release of diloco that wrote it"
        )
    return own


def checked_name(name: str) -> str:
    """A name of a run or a replica, as a user gives it.

    Raises:
        UserError: if it is no `Name`.
    """
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise UserError(
            f"name={name!r:.100} must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a "
            "letter or a digit",
            "name",
        ) from None


def json_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that a user gives, as JSON holds them.

    Raises:
        UserError: if it can't.
    """
    try:
        return json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"facts={facts!r} must hold finite numbers and strings: {error}", "facts") from None


def from_spelling(kind: type[_T], spec: str, *, words: str = "NAME") -> _T:
    """An instance of a dataclass from a spelling with options, such as `e3m0:block=64`, which are its fields.

    Args:
        kind: has fields that are numbers, truth values, words (any, or of a choice), or tuples of words, which +
            joins.
        spec: the spelling; the name before the colon says which class it is.
        words: the kind of words that fields take, for errors.

    Raises:
        UserError: for an option that the class does not have, naming those that it has, and for a wrong value.

    >>> from dataclasses import make_dataclass
    >>> from_spelling(make_dataclass("Blocks", [("block", int)]), "e3m0:block=64")
    Blocks(block=64)
    """
    name, _, options = spec.partition(":")
    readers = {field.name: _reader(field.type) for field in fields(cast(Any, kind))}
    chosen: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        if key not in readers or key in chosen:
            expected = ", ".join(f"{known}={wanted or words}" for known, (wanted, _) in readers.items()) or "none"
            raise UserError(f"{option!r} is not an option of {name}, or given twice (it has: {expected})")
        wanted, read = readers[key]
        try:
            chosen[key] = read(text)
        except (KeyError, ValueError):
            raise UserError(f"{spec!r}: {key} must be {wanted or words}, not {text!r}") from None
    return kind(**chosen)


def _reader(kind: Any) -> tuple[str, Callable[[str], Any]]:
    """The words for a field's values, and the function that reads one."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind)), {choice: choice for choice in get_args(kind)}.__getitem__
    return _READERS[kind]


_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("INTEGER", int),
    float: ("NUMBER", float),
    str: ("", str),
    bool: ("true|false", {"true": True, "false": False}.__getitem__),
    tuple[str, ...]: ("NAME+NAME", lambda text: tuple(filter(None, text.split("+")))),
}


def flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values that are nested by name, by their dotted names.

    >>> flat({"seed": 3, "model": {"width": 32}})
    {'seed': 3, 'model.width': 32}
    """
    named: dict[str, Any] = {}
    for name, value in values.items():
        part = flat(value, f"{where}{name}.") if isinstance(value, Mapping) else {where + name: value}
        assert not named.keys() & part.keys(), f"two values have the name {where}{name}"
        named |= part
    return named


def _from_text(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    raise ValueError(f"expected {'a path' if kind is Path else kind.__name__}, got {value!r:.50}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are unique."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.50} stands twice in one object")
    return values


def _check_names(value: Any, raw: Any, source: str, where: str = "") -> None:
    """Refuse keys that are no field of the dataclass that they stand in."""
    if is_dataclass(value) and isinstance(raw, Mapping):
        names = {field.name for field in fields(value)}
        for name, part in raw.items():
            if name not in names:
                raise FileError(
                    f"{source} can't be read: unknown field {where}{name:.80}: it was written by another version, "
                    "or by hand"
                )
            _check_names(getattr(value, name), part, source, f"{where}{name}.")
    elif isinstance(value, Mapping) and isinstance(raw, Mapping):
        for (name, part), raw_part in zip(value.items(), raw.values(), strict=True):
            _check_names(part, raw_part, source, f"{where}{name}.")
    elif isinstance(value, list | tuple) and isinstance(raw, list | tuple):
        for index, (part, raw_part) in enumerate(zip(value, raw, strict=True)):
            _check_names(part, raw_part, source, f"{where}{index}.")


def _refusal(source: str, error: Exception) -> FileError:
    """The error of a source, with the place in it, in the words of its cause."""
    reason, _, place = str(error).partition(" - at `$")
    cause = error.__cause__
    names = cause.fields if isinstance(cause, UserError) else ()
    place = place.removesuffix("`").replace("[...]", ".*").removeprefix(".")
    if names:  # the dataclass's own refusal names its field
        place = ""
    elif isinstance(error, msgspec.ValidationError) and cause is None:
        reason = reason.replace("`", "")
        reason = reason[:1].lower() + reason[1:]
    return FileError(f"{source} can't be read: {place + ': ' if place else ''}{reason:.400}", *names)
