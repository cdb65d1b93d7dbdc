"""The records of a prepared directory, and the names of its files.

DIR/settings.json          the settings that it is made with; the first file written
DIR/tokenizer.json, .model the tokenizer, unless it is `bytes`
DIR/train-00000.bin        tokens of whole documents, each preceded by BOS; little-endian, of the index's dtype
DIR/train-00000.idx        the token at which each document starts: int64, little-endian
DIR/train-00000.json       the shard's counts and digest; written last, so that all three are whole where it is
DIR/held_out-00000.…       the same for the held-out split
DIR/index.json             all settings and counts; written last, so that a directory with it is complete
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from diloco.errors import FileError, UserError
from diloco.files import write_atomically
from diloco.schema import Count, converted, read_json

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"

FORMAT = 2
"""Version of the directory's records."""

PREPARE_ANEW = "delete the directory, and prepare the data again"
"""The advice for a directory that is damaged."""

MOST_TOKENS = 2**24
"""The largest vocabulary; those that are in use have 2^18 entries."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]


@dataclass(frozen=True, kw_only=True)
class PreparationSettings:
    """Everything that the bytes of a prepared directory depend on."""

    train: tuple[str, ...]
    """Sources of the training split."""
    held_out: tuple[str, ...]
    """Sources of the held-out split; empty for a fraction of the training documents."""
    held_out_fraction: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Share of the training documents that is held out where no source is."""
    tokenizer: str
    """The tokenizer as the config names it."""
    tokenizer_file_digest: str
    """SHA-256 of the tokenizer's file; empty for `bytes` and `bpe:SIZE`."""
    source_digest: str
    """SHA-256 of names, sizes and modification times of the sources' files, and of Python's version."""
    shard_tokens: _Positive
    """Tokens after which a shard ends, with the document that reaches them."""
    max_train_bytes: _Positive | None = None
    """Bytes of text after which the training split ends, with the document that reaches them; None is all text."""
    text_field: str = "text"
    """The field that holds the text of a row."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of one shard, or of several together."""

    num_tokens: Count
    """Tokens, BOS included."""
    num_documents: Count
    """Documents, all whole."""
    num_bytes: Count
    """UTF-8 bytes of the documents' text."""


@dataclass(frozen=True, kw_only=True)
class Shard(Counts):
    """The record of one shard."""

    tokens_digest: _Digest
    """XXH3 of 128 bits of the file of tokens, in hexadecimal."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_documents <= self.num_tokens:
            raise UserError(f"num_tokens={self.num_tokens} can't be those of num_documents={self.num_documents}")


@dataclass(frozen=True, kw_only=True)
class Index:
    """A prepared directory."""

    settings: PreparationSettings
    """The settings that it was made with."""
    tokenizer_digest: _Digest
    """`Tokenizer.digest` of the tokenizer that made its tokens."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    """Number of tokens in the vocabulary: every token is below it."""
    bos_id: Count
    """The token before each document."""
    dtype: Literal["<u2", "<u4"]
    """NumPy's name for the type of the tokens."""
    splits: dict[Split, tuple[Shard, ...]]
    """The shards of each split, in order."""
    digest: _Digest
    """SHA-256 of all token bytes in order, those of the training split first."""
    held_out_by_position: bool = False
    """True if the end of each document is held out, since hashing their ids would leave a split empty."""

    def __post_init__(self) -> None:
        if self.bos_id >= self.vocab_size:
            raise UserError(f"bos_id={self.bos_id} is not below vocab_size={self.vocab_size}")
        if self.dtype != token_dtype(self.vocab_size):
            raise UserError(f"dtype={self.dtype} is not that of vocab_size={self.vocab_size}")
        for split in SPLITS:
            if not self.splits.get(split):
                raise UserError(f"splits: {split} has no shard")


_Record = TypeVar("_Record", PreparationSettings, Shard, Index)


def token_dtype(vocab_size: int) -> Literal["<u2", "<u4"]:
    """NumPy's name for the type of tokens below `vocab_size`."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def shard_path(directory: Path, split: Split, number: int, suffix: str) -> Path:
    """The path of one file of a shard; `suffix` is `.bin`, `.idx` or `.json`."""
    return directory / f"{split}-{number:05d}{suffix}"


def total(shards: Iterable[Counts]) -> Counts:
    """The sums of the counts of several shards."""
    shards = list(shards)
    return Counts(
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
    )


def write_record(path: Path, record: PreparationSettings | Shard | Index) -> None:
    """Write a record as JSON, whole or not at all."""
    write_atomically(path, [json.dumps({"format": FORMAT, **asdict(record)}, indent=2).encode()])


def read_settings(path: Path) -> PreparationSettings:
    """Read the settings of a directory, complete or not.

    Raises:
        UserError: if the file can't be read, a value is of another type or out of its range, or the format is that
            of another version of diloco.
    """
    return _read_record(path, PreparationSettings)


def read_shard(path: Path) -> Shard:
    """Read the counts of one shard; errors as for `read_settings`."""
    return _read_record(path, Shard)


def read_index(directory: Path) -> Index:
    """Read the index of a prepared directory.

    Raises:
        UserError: if the directory is not complete; else as for `read_settings`.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        raise UserError(f"{directory} has no {INDEX_FILE}: prepare it, or finish what was interrupted")
    return _read_record(path, Index)


def _read_record(path: Path, kind: type[_Record]) -> _Record:
    try:
        values = read_json(path, dict[str, Any])
        if values.pop("format", None) == FORMAT:
            return converted(values, kind, source=str(path))
    except FileError as error:
        raise FileError(f"{error}: {PREPARE_ANEW}", *error.fields) from error
    raise FileError(f"{path} is not in format {FORMAT} of a prepared directory: {PREPARE_ANEW}")
