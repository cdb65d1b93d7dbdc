"""The records of a prepared directory, and the names of its files.

DIR/settings.json          the settings that it is made with; the first file written
DIR/tokenizer.json, .model the tokenizer, unless it is `bytes`
DIR/train-00000.bin        tokens of whole documents, each preceded by BOS; little-endian, of the index's dtype
DIR/train-00000.idx        the token at which each document starts: int64, little-endian
DIR/train-00000.json       the shard's counts; written last of the three, so that they are whole where it exists
DIR/held_out-00000.…       the same for the held-out split
DIR/index.json             all settings and counts; written last, so that a directory with it is complete
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_origin

from diloco.errors import UserError
from diloco.files import write_atomically

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparationSettings:
    """Everything that the bytes of a prepared directory depend on."""

    train: tuple[str, ...]
    """Sources of the training split."""
    held_out: tuple[str, ...]
    """Sources of the held-out split; empty for a fraction of the training documents."""
    held_out_fraction: float
    """Share of the training documents that is held out where no source is."""
    tokenizer: str
    """The tokenizer as the config names it."""
    tokenizer_file_digest: str
    """SHA-256 of the tokenizer's file; empty for `bytes` and `bpe:SIZE`."""
    source_digest: str
    """SHA-256 of names, sizes and modification times of the sources' files, and of Python's version."""
    shard_tokens: int
    """Tokens after which a shard ends, with the document that reaches them."""
    max_train_bytes: int | None = None
    """Bytes of text after which the training split ends, with the document that reaches them; None is all text."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Counts of one shard, or of several together."""

    num_tokens: int
    """Tokens, BOS included."""
    num_documents: int
    """Documents, all whole."""
    num_bytes: int
    """UTF-8 bytes of the documents' text."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """A prepared directory."""

    settings: PreparationSettings
    """The settings that it was made with."""
    tokenizer_digest: str
    """`Tokenizer.digest` of the tokenizer that made its tokens."""
    vocab_size: int
    """All tokens are below it."""
    bos_id: int
    """The token before each document."""
    dtype: str
    """NumPy's name for the type of the tokens: `<u2` or `<u4`."""
    splits: dict[Split, tuple[Shard, ...]]
    """The shards of each split, in order."""
    digest: str
    """SHA-256 of all token bytes in order, those of the training split first."""


_Record = TypeVar("_Record", PreparationSettings, Shard, Index)


def shard_path(directory: Path, split: Split, number: int, suffix: str) -> Path:
    """The path of one file of a shard; `suffix` is `.bin`, `.idx` or `.json`."""
    return directory / f"{split}-{number:05d}{suffix}"


def total(shards: Iterable[Shard]) -> Shard:
    """The sums of the counts of several shards."""
    shards = list(shards)
    return Shard(
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
    )


def write_record(path: Path, record: PreparationSettings | Shard | Index) -> None:
    """Write a record as JSON, whole or not at all."""
    write_atomically(path, [json.dumps({"format": _FORMAT, **asdict(record)}, indent=2).encode()])


def read_settings(path: Path) -> PreparationSettings:
    """Read the settings of a directory, complete or not.

    Raises:
        UserError: if the file can't be read, or was written in the format of another version of diloco.
    """
    return _read_record(path, _settings)


def read_shard(path: Path) -> Shard:
    """Read the counts of one shard; errors as for `read_settings`."""
    return _read_record(path, lambda values: _checked(Shard(**values)))


def read_index(directory: Path) -> Index:
    """Read the index of a prepared directory.

    Raises:
        UserError: if the directory is not complete; else as for `read_settings`.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        raise UserError(f"{directory} has no {INDEX_FILE}: prepare it, or finish what was interrupted")
    return _read_record(path, _index)


def _index(values: dict[str, Any]) -> Index:
    splits = {split: tuple(_checked(Shard(**shard)) for shard in values["splits"][split]) for split in SPLITS}
    index = _checked(Index(**values | {"settings": _settings(values["settings"]), "splits": splits}))
    if index.dtype not in ("<u2", "<u4"):
        raise ValueError(f"dtype is {index.dtype!r}")
    return index


def _settings(values: dict[str, Any]) -> PreparationSettings:
    sources: dict[str, Any] = {name: tuple(values[name]) for name in ("train", "held_out")}
    return _checked(PreparationSettings(**values | sources))


def _checked(record: _Record) -> _Record:
    """The record, if each of its values has the type of its field."""
    for field in fields(record):
        kind = field.type if isinstance(field.type, UnionType) else get_origin(field.type) or field.type
        if not isinstance(value := getattr(record, field.name), kind):  # pyright: ignore[reportArgumentType]
            raise ValueError(f"{field.name} is {value!r}")
    return record


def _read_record(path: Path, make: Callable[[dict[str, Any]], _Record]) -> _Record:
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format", None) == _FORMAT:
            return make(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} can't be read ({error}): prepare the data again") from error
    raise UserError(f"{path} is not in format {_FORMAT} of a prepared directory: prepare the data again")
