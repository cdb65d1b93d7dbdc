"""One split of a prepared directory: a long line of tokens, cut into windows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock, Thread

import numpy as np
import xxhash

from diloco.data.index import PREPARE_ANEW, Index, Shard, Split, read_index, shard_path, total
from diloco.errors import UserError

_CHUNK_BYTES = 2**20


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
    checks: "ShardChecks | None" = None
    """The check of each shard, which ends before a token of it is used; None where they are not files."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the split, BOS included."""
        return int(self._ends[-1])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(shard) for shard in self.shards])

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
            UserError: if a shard that it reads, or any other that was checked, is not as it was prepared.
        """
        assert 0 <= i < self.num_windows(length), (i, self.num_windows(length))
        first, stop = i * length, (i + 1) * length + 1
        pieces = []
        for number in range(int(np.searchsorted(self._ends, first, side="right")), len(self.shards)):
            start = int(self._ends[number]) - len(self.shards[number])
            if start >= stop:
                break
            if self.checks is not None:
                self.checks.ensure(number)
            pieces.append(self.shards[number][max(first - start, 0) : stop - start])
        return np.concatenate(pieces).astype(np.int64)


class ShardChecks:
    """The checks that shards hold the tokens that were prepared; each runs once, by whoever comes first.

    Args:
        checks: one a shard; it raises a UserError if the shard does not.
    """

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = checks
        self._locks = [Lock() for _ in checks]
        self._are_done = [False for _ in checks]
        self._error: UserError | None = None

    def start(self) -> None:
        """Check all shards in a thread."""
        Thread(target=self._check_all, name="check of shards", daemon=True).start()

    def _check_all(self) -> None:
        for number in range(len(self._checks)):
            self._check(number)

    def _check(self, number: int) -> None:
        with self._locks[number]:
            if not self._are_done[number]:
                try:
                    self._checks[number]()
                except UserError as error:
                    self._error = error
                self._are_done[number] = True

    def ensure(self, number: int) -> None:
        """Wait for the check of a shard, or run it.

        Raises:
            UserError: if the shard, or any other that was checked, is not as it was prepared.
        """
        if not self._are_done[number]:
            self._check(number)
        if self._error is not None:
            raise self._error


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
        checks=ShardChecks(
            [
                partial(check_shard, path, shard, dtype=index.dtype, vocab_size=index.vocab_size)
                for path, shard in zip(paths, index.splits[split], strict=True)
            ]
        ),
    )


_NAMES: dict[Split, str] = {"train": "training text", "held_out": "held-out text"}


def _map_shard(index: Index, path: Path, shard: Shard) -> np.ndarray:
    expected = shard.num_tokens * np.dtype(index.dtype).itemsize
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes != expected:
        raise UserError(f"{path} holds {num_bytes} bytes, not the {expected} of the index: {PREPARE_ANEW}")
    return np.memmap(path, dtype=index.dtype, mode="r")


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
