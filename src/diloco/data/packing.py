"""Pack the documents of one split end to end into shards; finished shards survive an interruption."""

from itertools import count, takewhile
from pathlib import Path

import numpy as np

from diloco.data.index import Shard, Split, read_shard, shard_path, total, write_record
from diloco.files import write_atomically


class SplitWriter:
    """Packs documents in the order in which they come; a shard ends with the document that fills it.

    A shard is a function of the documents alone. So a writer that keeps the finished shards of an interrupted one,
    and is given the documents after theirs, writes the same files as a writer that was never interrupted.
    """

    def __init__(self, directory: Path, split: Split, *, dtype: str, bos_id: int, shard_tokens: int) -> None:
        self.shards = _finished_shards(directory, split)
        self._directory = directory
        self._split: Split = split
        self._bos = np.array([bos_id], dtype=dtype)
        self._shard_tokens = shard_tokens
        self._begin_shard()

    @property
    def packed(self) -> Shard:
        """Counts of all documents so far, those of kept shards included."""
        return total([*self.shards, self._open_shard()])

    def add(self, ids: np.ndarray, *, num_bytes: int) -> None:
        """Pack one document: its tokens without BOS, shape (num_tokens,), and the UTF-8 bytes of its text."""
        self._starts.append(self._num_tokens)
        self._pieces += [self._bos, ids.astype(self._bos.dtype)]
        self._num_tokens += 1 + len(ids)
        self._num_bytes += num_bytes
        if self._num_tokens >= self._shard_tokens:
            self._write_shard()

    def close(self) -> None:
        """Write the last shard, which may be short."""
        if self._starts:
            self._write_shard()

    def _begin_shard(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[np.ndarray] = []
        self._num_tokens = 0
        self._num_bytes = 0

    def _open_shard(self) -> Shard:
        return Shard(num_tokens=self._num_tokens, num_documents=len(self._starts), num_bytes=self._num_bytes)

    def _write_shard(self) -> None:
        shard, number = self._open_shard(), len(self.shards)
        path = shard_path(self._directory, self._split, number, ".json")
        write_atomically(path.with_suffix(".bin"), (piece.data for piece in self._pieces))
        write_atomically(path.with_suffix(".idx"), [np.array(self._starts, dtype="<i8").data])
        write_record(path, shard)
        self.shards.append(shard)
        self._begin_shard()


def _finished_shards(directory: Path, split: Split) -> list[Shard]:
    paths = (shard_path(directory, split, number, ".json") for number in count())
    return [read_shard(path) for path in takewhile(Path.exists, paths)]
