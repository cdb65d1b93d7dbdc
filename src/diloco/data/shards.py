"""A prepared directory: its records, and the tokens of a split as a long line, cut into windows.

DIR/settings.json          the settings that it is made with; the first file written
DIR/tokenizer.json, .model the tokenizer, unless it is `bytes`
DIR/train-00000.bin        tokens of whole documents, each preceded by BOS; little-endian, of the index's dtype
DIR/train-00000.idx        the token at which each document starts: int64, little-endian
DIR/train-00000.json       the shard's counts and digest; written last, so that all three are whole where it is
DIR/held_out-00000.…       the same for the held-out split
DIR/index.json             all settings and counts; written last, so that a directory with it is complete
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from diloco.data.config import DataConfig
from diloco.errors import FileError, UserError
from diloco.files import write_json
from diloco.schema import Count, converted, read_json

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SETTINGS_FILE = "settings.json"
INDEX_FILE = "index.json"

FORMAT = 3
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
    max_train_bytes: _Positive | None
    """Bytes of text after which the training split ends, with the document that reaches them; None is all text."""
    text_field: str
    """The field that holds the text of a row."""
    skip_null: bool
    """True if rows whose text is null were left out."""
    weights: tuple[float, ...] = ()
    """Shares of the training text per source; empty where one source follows the other."""


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
    held_out_by_position: bool
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
    """Write a record as JSON, as `write_json` does."""
    write_json(path, {"format": FORMAT, **asdict(record)})


def read_index(directory: Path) -> Index:
    """Read the index of a prepared directory.

    Raises:
        UserError: if the directory is not complete; else as for `read_record`.
    """
    path = directory / INDEX_FILE
    if not directory.exists():
        raise UserError(f"there is no directory {directory}")
    if not path.is_file():
        raise UserError(f"{directory} has no {INDEX_FILE}: prepare it, or finish what was interrupted")
    return read_record(path, Index)


def read_record(path: Path, kind: type[_Record]) -> _Record:
    """Read a record as `write_record` wrote it.

    Raises:
        FileError: if the file can't be read, a value is of another type or out of its range, or the format is that
            of another version of diloco.
    """
    try:
        values = read_json(path, dict[str, Any])
        if values.pop("format", None) == FORMAT:
            return converted(values, kind, source=str(path))
    except FileError as error:
        raise FileError(f"{error}: {PREPARE_ANEW}", *error.fields) from error
    raise FileError(f"{path} was prepared by another version of diloco: {PREPARE_ANEW}")


@dataclass(frozen=True, kw_only=True)
class TokenShards:
    """The tokens of one split: its shards end to end.

    >>> tokens = TokenShards(
    ...     shards=(np.arange(4), np.arange(4, 9)), num_bytes=7, vocab_size=9, bos_id=0, digest=""
    ... )
    >>> tokens.num_windows(3), tokens.window(1, 3)
    (2, array([3, 4, 5, 6]))
    """

    shards: tuple[np.ndarray, ...]
    """Unsigned integers, each of shape (num_tokens of the shard,)."""
    num_bytes: int
    """UTF-8 bytes of the text, by which bits per byte divides."""
    vocab_size: int
    """Number of tokens in the vocabulary: every token is below it."""
    bos_id: int
    """The token before each document."""
    digest: str
    """`Index.digest` of the directory."""
    name: str = "text"
    """The split, as refusals name it."""
    checks: tuple[Callable[[], None], ...] = ()
    """One per shard that is a file, run once, before a token of it is used; it raises a UserError."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the split, BOS included."""
        return int(self._ends[-1])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(shard) for shard in self.shards])

    @cached_property
    def _unchecked(self) -> set[int]:
        return set(range(len(self.checks)))

    def first(self, num_tokens: int | None) -> "TokenShards":
        """The first tokens alone, at most so many; all for None. `num_bytes` stays that of the whole text."""
        if num_tokens is None or num_tokens >= self.num_tokens:
            return self
        last = int(np.searchsorted(self._ends, num_tokens))
        rest = num_tokens - (int(self._ends[last - 1]) if last else 0)
        shards = (*self.shards[:last], self.shards[last][:rest])
        return replace(self, shards=shards, checks=self.checks[: last + 1])

    def num_windows(self, length: int) -> int:
        """The number of windows of `length` + 1 tokens at stride `length`: (num_tokens − 1) // length.

        Each token but the first, and but a remainder at the end, is then the target of one prediction.

        Raises:
            UserError: if the split is shorter than one window.
        """
        assert length >= 1, length
        if self.num_tokens < length + 1:
            raise UserError(
                f"the {self.name} holds {self.num_tokens} tokens, and a sequence of sequence_length={length} "
                f"takes {length + 1}: add text, or choose shorter sequences",
                "sequence_length",
            )
        return (self.num_tokens - 1) // length

    def window(self, i: int, length: int) -> np.ndarray:
        """Tokens i·`length` … (i + 1)·`length`, both included: int64, shape (length + 1,).

        Raises:
            UserError: if a shard that it reads is not as it was prepared.
        """
        assert 0 <= i < self.num_windows(length), (i, self.num_windows(length))
        first, stop = i * length, (i + 1) * length + 1
        pieces = []
        for number in range(int(np.searchsorted(self._ends, first, side="right")), len(self.shards)):
            start = int(self._ends[number]) - len(self.shards[number])
            if start >= stop:
                break
            if number in self._unchecked:
                self.checks[number]()
                self._unchecked.remove(number)
            pieces.append(self.shards[number][max(first - start, 0) : stop - start])
        return np.concatenate(pieces).astype(np.int64)


def open_split(directory: Path, split: Split) -> TokenShards:
    """Open one split of a prepared directory; its tokens stay on disk until they are read.

    Raises:
        UserError: if the directory is not complete, or a shard is missing or not of the size that the index
            says.
    """
    index = read_index(directory)
    paths = [shard_path(directory, split, number, ".bin") for number in range(len(index.splits[split]))]
    return TokenShards(
        shards=tuple(map(partial(_map_shard, index), paths, index.splits[split])),
        num_bytes=total(index.splits[split]).num_bytes,
        vocab_size=index.vocab_size,
        bos_id=index.bos_id,
        digest=index.digest,
        name=_NAMES[split],
        checks=tuple(
            partial(check_shard, path, shard, dtype=index.dtype, vocab_size=index.vocab_size)
            for path, shard in zip(paths, index.splits[split], strict=True)
        ),
    )


def open_training_text(data: DataConfig) -> TokenShards:
    """The training text that a run reads, of a config whose text is prepared; errors as those of `open_split`."""
    assert data.prepared is not None, "the text is prepared"
    return open_split(data.prepared, "train").first(data.max_train_tokens)


_NAMES: dict[Split, str] = {"train": "training text", "held_out": "held-out text"}


def _map_shard(index: Index, path: Path, shard: Shard) -> np.ndarray:
    expected = shard.num_tokens * np.dtype(index.dtype).itemsize
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes != expected:
        raise UserError(f"{path} holds {num_bytes} bytes, not the {expected} of the index: {PREPARE_ANEW}")
    return np.memmap(path, dtype=index.dtype, mode="r")


_CHUNK_BYTES = 2**20


def tokens_digest(tokens: bytes | bytearray) -> str:
    """`Shard.tokens_digest` of the bytes of a shard's tokens."""
    return xxhash.xxh3_128_hexdigest(tokens)


def check_shard(path: Path, shard: Shard, *, dtype: str, vocab_size: int | None = None) -> None:
    """Check that the file of a shard holds the tokens that were prepared, all below `vocab_size`.

    Raises:
        UserError: if it does not, or can't be read.
    """
    digest, buffer, largest = xxhash.xxh3_128(), bytearray(_CHUNK_BYTES), 0
    try:
        with path.open("rb") as file:
            while size := file.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
                if vocab_size is not None:
                    tokens = np.frombuffer(buffer, dtype, count=size // np.dtype(dtype).itemsize)
                    largest = max(largest, int(tokens.max(initial=0)))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): {PREPARE_ANEW}") from error
    if digest.hexdigest() != shard.tokens_digest:
        raise UserError(f"{path} has been altered since it was prepared: {PREPARE_ANEW}")
    if vocab_size is not None and largest >= vocab_size:
        raise UserError(
            f"{path} holds token {largest}, beyond the vocabulary of {vocab_size} tokens: {PREPARE_ANEW}"
        )
