"""What a prepared directory says of itself, and how its files are named.

DIR/settings.json          what was asked for; the first file written
DIR/tokenizer.json, .model the tokenizer, unless it is `bytes`
DIR/train-00000.bin        tokens of whole documents, each preceded by BOS; little-endian, of the index's dtype
DIR/train-00000.idx        where in it each document starts: int64, little-endian, counted in tokens
DIR/train-00000.json       its counts; written after the two others, so its presence says that they are whole
DIR/held_out-00000.…       the same for the held-out split
DIR/index.json             all of it; written last, so its presence says that the directory is complete
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from diloco.errors import UserError
from diloco.files import write_atomically

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the content of a prepared directory, to the last bit."""

    train: tuple[str, ...]
    """Sources of the training split."""
    held_out: tuple[str, ...]
    """Sources of the held-out split; empty for a fraction of the training documents."""
    held_out_fraction: float
    """That fraction."""
    tokenizer: str
    """The tokenizer as the config names it."""
    tokenizer_file_digest: str
    """SHA-256 of the tokenizer's file; empty where the config names none."""
    source_digest: str
    """SHA-256 of names, sizes and modification times of the sources' files, and of Python's version."""
    shard_tokens: int
    """Tokens after which a shard ends with the document."""
    max_train_bytes: int | None = None
    """Bytes of text after which the training split ends with the document."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Counts of one shard, or of several together."""

    num_tokens: int
    """BOS included."""
    num_documents: int
    """Whole documents."""
    num_bytes: int
    """UTF-8 bytes of their text."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """A prepared directory."""

    settings: Settings
    """What it was made from."""
    tokenizer_digest: str
    """`Tokenizer.digest` of what made its tokens."""
    vocab_size: int
    """All tokens are below it."""
    bos_id: int
    """The token before each document."""
    dtype: str
    """NumPy's name of the tokens' type: `<u2` or `<u4`."""
    splits: dict[Split, tuple[Shard, ...]]
    """The shards of each split, in order."""
    digest: str
    """SHA-256 of all token bytes in order, those of the training split first."""


def shard_path(directory: Path, split: Split, number: int, suffix: str) -> Path:
    """The file of one shard: `suffix` is `.bin`, `.idx` or `.json`."""
    return directory / f"{split}-{number:05d}{suffix}"


def total(shards: Iterable[Shard]) -> Shard:
    """The counts of several shards together."""
    shards = list(shards)
    return Shard(
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
    )


def write_record(path: Path, record: Settings | Shard | Index) -> None:
    """Write a record as JSON, whole or not at all."""
    write_atomically(path, [json.dumps({"format": _FORMAT, **asdict(record)}, indent=2).encode()])


def read_settings(path: Path) -> Settings:
    """Read the settings of a directory, complete or not.

    Raises:
        UserError: if another version of diloco wrote them in another format.
    """
    return _settings(_read_record(path))


def read_shard(path: Path) -> Shard:
    """Read the counts of one shard; errors as for `read_settings`."""
    return Shard(**_read_record(path))


def read_index(directory: Path) -> Index:
    """Read the index of a prepared directory.

    Raises:
        UserError: if the directory is not complete, or in the format of another version of diloco.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        raise UserError(f"{directory} has no {INDEX_FILE}: prepare it, or finish what was interrupted")
    record = _read_record(path)
    record["settings"] = _settings(record["settings"])
    record["splits"] = {split: tuple(Shard(**shard) for shard in record["splits"][split]) for split in SPLITS}
    return Index(**record)


def _settings(record: dict[str, Any]) -> Settings:
    return Settings(**{**record, "train": tuple(record["train"]), "held_out": tuple(record["held_out"])})


def _read_record(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_bytes())
    if not isinstance(record, dict) or record.pop("format", None) != _FORMAT:
        raise UserError(f"{path} is not in format {_FORMAT} of a prepared directory; prepare the data again")
    return record
