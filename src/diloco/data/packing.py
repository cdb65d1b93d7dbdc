"""Pack the documents of one split end to end into shards; finished shards survive an interruption."""

from array import array
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from diloco.data.index import Counts, Shard, Split, read_shard, shard_path, total, write_record
from diloco.data.shards import check_shard, tokens_digest
from diloco.files import write_atomically


class SplitWriter:
    """Packs documents in the order in which they come; a shard ends with the document that fills it.

    A shard is a function of the documents alone. So a writer that keeps the finished shards of an interrupted one,
    and is given the documents after theirs, writes the same files as a writer that was never interrupted.
    """

    def __init__(self, directory: Path, split: Split, *, dtype: str, bos_id: int, shard_tokens: int) -> None:
        self.shards = _finished_shards(directory, split, dtype)
        self._directory = directory
        self._split: Split = split
        self._bos = np.array([bos_id], dtype=dtype)
        self._shard_tokens = shard_tokens
        self._begin_shard()

    @property
    def packed(self) -> Counts:
        """Counts of all documents so far, those of kept shards included."""
        return total([*self.shards, self._counts()])

    def add(self, ids: np.ndarray, *, num_bytes: int) -> None:
        """Pack one document: its tokens without BOS, shape (num_tokens,), and the UTF-8 bytes of its text."""
        self._starts.append(self._num_tokens)
        self._tokens += self._bos.data
        self._tokens += ids.astype(self._bos.dtype).data
        self._num_tokens += 1 + len(ids)
        self._num_bytes += num_bytes
        if self._num_tokens >= self._shard_tokens:
            self._write_shard()

    def close(self) -> None:
        """Write the last shard, which may be short."""
        if self._starts:
            self._write_shard()

    def _begin_shard(self) -> None:
        # Compact, since a document may have no token but BOS.
        self._starts = array("q")
        self._tokens = bytearray()
        self._num_tokens = 0
        self._num_bytes = 0

    def _counts(self) -> Counts:
        return Counts(num_tokens=self._num_tokens, num_documents=len(self._starts), num_bytes=self._num_bytes)

    def _write_shard(self) -> None:
        path = shard_path(self._directory, self._split, len(self.shards), ".json")
        write_atomically(path.with_suffix(".bin"), [memoryview(self._tokens)])
        write_atomically(path.with_suffix(".idx"), [np.array(self._starts, dtype="<i8").data])
        shard = Shard(**asdict(self._counts()), tokens_digest=tokens_digest(self._tokens))
        write_record(path, shard)
        self.shards.append(shard)
        self._begin_shard()


def _finished_shards(directory: Path, split: Split, dtype: str) -> list[Shard]:
    paths = takewhile(Path.exists, (shard_path(directory, split, number, ".json") for number in count()))
    shards = []
    for path in paths:
        shards.append(read_shard(path))
        check_shard(path.with_suffix(".bin"), shards[-1], dtype=dtype)
    return shards
