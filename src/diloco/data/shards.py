"""One split of a prepared directory: a long line of tokens, cut into windows."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from diloco.data.index import Index, Split, read_index, shard_path, total
from diloco.errors import UserError


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
    """All tokens are below it."""
    bos_id: int
    """The token before each document."""
    digest: str
    """`Index.digest` of the directory."""

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
                f"the split holds {self.num_tokens} tokens, and a window of sequence_length={length} takes "
                f"{length + 1}: add text, or choose shorter sequences",
                "sequence_length",
            )
        return (self.num_tokens - 1) // length

    def window(self, i: int, length: int) -> np.ndarray:
        """Tokens i·`length` … (i + 1)·`length`, both included: int64, shape (length + 1,)."""
        assert 0 <= i < self.num_windows(length), (i, self.num_windows(length))
        first, stop = i * length, (i + 1) * length + 1
        pieces = []
        for number in range(int(np.searchsorted(self._ends, first, side="right")), len(self.shards)):
            start = int(self._ends[number]) - len(self.shards[number])
            if start >= stop:
                break
            pieces.append(self.shards[number][max(first - start, 0) : stop - start])
        return np.concatenate(pieces).astype(np.int64)


def open_split(directory: Path, split: Split) -> TokenShards:
    """Open one split of a prepared directory; its tokens stay on disk until they are read.

    Raises:
        UserError: if the directory is not complete, or a shard is missing or not of the size that the index
            says.
    """
    index = read_index(directory)
    return TokenShards(
        shards=tuple(_map_shard(directory, index, split, i) for i in range(len(index.splits[split]))),
        num_bytes=total(index.splits[split]).num_bytes,
        vocab_size=index.vocab_size,
        bos_id=index.bos_id,
        digest=index.digest,
    )


def _map_shard(directory: Path, index: Index, split: Split, number: int) -> np.ndarray:
    path = shard_path(directory, split, number, ".bin")
    expected = index.splits[split][number].num_tokens * np.dtype(index.dtype).itemsize
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes != expected:
        raise UserError(f"{path} holds {num_bytes} bytes, not the {expected} of the index: prepare the data again")
    return np.memmap(path, dtype=index.dtype, mode="r")
