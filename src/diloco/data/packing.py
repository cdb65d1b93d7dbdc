"""Encoded documents, in the order of the sources or by weights, packed into the shards of a prepared directory."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count, takewhile
from pathlib import Path

import numpy as np

from diloco.data.config import DataConfig
from diloco.data.corpora import pieces
from diloco.data.encoding import Encoded, Encoders, Place, Task
from diloco.data.shards import (
    SPLITS,
    Counts,
    Shard,
    Split,
    check_shard,
    read_record,
    shard_path,
    tokens_digest,
    total,
    write_record,
)
from diloco.data.splits import in_order, reading_of
from diloco.files import write_atomically


@dataclass(frozen=True)
class Run:
    """Documents of an encoded piece that follow each other in the text."""

    encoded: Encoded
    first: int
    stop: int

    @property
    def ends_piece(self) -> bool:
        """True if it has the piece's last document."""
        return self.stop == self.encoded.num_documents

    @property
    def train_bytes(self) -> int:
        """UTF-8 bytes of its training text."""
        first, stop = self.within("train")
        return int(self.encoded.parts["train"].num_bytes_K[first:stop].sum())

    def within(self, split: Split) -> tuple[int, int]:
        """The first of its parts in a split, and the one after its last, counted in the piece."""
        first, stop = np.searchsorted(self.encoded.parts[split].document_K, (self.first, self.stop))
        return int(first), int(stop)

    def until(self, train_bytes: int) -> "Run | None":
        """The run up to the document with which its training text reaches so many bytes; None if none does."""
        (first, stop), train = self.within("train"), self.encoded.parts["train"]
        place = first + int(np.searchsorted(np.cumsum(train.num_bytes_K[first:stop]), train_bytes))
        return None if place == stop else Run(self.encoded, self.first, int(train.document_K[place]) + 1)


def runs(
    config: DataConfig,
    encoders: Encoders,
    packed: Mapping[Place, Mapping[Split, int]] | None,
    *,
    skipped: Counter[str] | None = None,
    ended: Callable[[str], object] = lambda _: None,
) -> Iterator[Run]:
    """All documents of a config, encoded, in the order of `split_documents`.

    Args:
        config: names the sources.
        encoders: encode them.
        packed: the documents of each split at the beginning of pieces that need no tokens; None is all.
        skipped: counts the rows that `config.skip_null` leaves out, by file.
        ended: called with the source that ended the training text, where there are weights.

    Raises:
        UserError: as `documents` does, and `Encoders.in_order`.
    """
    skipped = Counter() if skipped is None else skipped

    def tasks(place: int, source: str) -> Iterator[Task]:
        for number, piece in enumerate(pieces(source, reading_of(config, skipped))):
            num_packed = None if packed is None else packed.get((place, number), {})
            yield Task((place, number), piece, place < len(config.train), num_packed)

    def checked(read: Iterator[Run]) -> Iterator[Run]:
        for run in read:
            if run.ends_piece:
                skipped.update(run.encoded.skipped)
            yield run
            if run.ends_piece and run.encoded.error is not None:
                raise run.encoded.error

    train, held_out = (
        [tasks(place, source) for place, source in enumerate((*config.train, *config.held_out)) if within(place)]
        for within in (lambda place: place < len(config.train), lambda place: place >= len(config.train))
    )
    streams = [_one_by_one(encoders.in_order(source)) for source in train]
    if not config.weights:
        streams = [map(_whole, encoders.in_order(chain.from_iterable(train)))]
    yield from _limited(checked(in_order(streams, config, lambda run: run.train_bytes, ended=ended)), config)
    yield from checked(map(_whole, encoders.in_order(chain.from_iterable(held_out))))


def _whole(encoded: Encoded) -> Run:
    return Run(encoded, 0, encoded.num_documents)


def _one_by_one(read: Iterator[Encoded]) -> Iterator[Run]:
    for encoded in read:
        for number in range(max(encoded.num_documents, 1)):
            yield Run(encoded, number, min(number + 1, encoded.num_documents))


def _limited(read: Iterator[Run], config: DataConfig) -> Iterator[Run]:
    """Runs up to the document with which the training text reaches its limit."""
    left = config.max_train_bytes
    for run in read:
        last = None if left is None else run.until(left)
        yield last or run
        if last is not None:
            return
        left = None if left is None else left - run.train_bytes


def packed_by_piece(
    config: DataConfig, encoders: Encoders, num_packed: Mapping[Split, int]
) -> dict[Place, Mapping[Split, int]]:
    """The documents of each piece that are among the first `num_packed` of their splits; nothing is tokenized."""
    left, places = Counter(num_packed), dict[Place, Counter[Split]]()
    for run in runs(config, encoders, None) if left.total() else ():
        counts = places.setdefault(run.encoded.place, Counter())
        for split in SPLITS:
            first, stop = run.within(split)
            count = min(stop - first, left[split])
            counts[split] += count
            left[split] -= count
        if not left.total():
            break
    return {**places}


class SplitWriter:
    """Packs documents in the order in which they come; a shard ends with the document that fills it.

    A shard is a function of the documents alone. So a writer that keeps the finished shards of an interrupted one,
    and is given the documents after theirs, writes the same files as a writer that was never interrupted.
    """

    def __init__(self, directory: Path, split: Split, *, dtype: str, shard_tokens: int) -> None:
        self.shards = _finished_shards(directory, split, dtype)
        self._finished = total(self.shards)
        self._directory = directory
        self._split: Split = split
        self._shard_tokens = shard_tokens
        self._begin_shard()

    @property
    def packed(self) -> Counts:
        """Counts of all documents so far, those of kept shards included."""
        return total([self._finished, self._counts()])

    def add(self, run: Run) -> None:
        """Pack the documents of a run, or their parts, that are in this split, but for those that are packed."""
        parts, (first, stop) = run.encoded.parts[self._split], run.within(self._split)
        num_packed = len(parts.document_K) + 1 - len(parts.bounds)
        first = max(first, num_packed)
        bound_L, num_bytes_K = parts.bounds[first - num_packed :], parts.num_bytes_K[first:stop]
        while len(num_bytes_K):
            # A shard ends with the document that fills it.
            room = self._shard_tokens - self._num_tokens
            start = int(bound_L[0])
            taken = min(int(np.searchsorted(bound_L[1:], start + room)) + 1, len(num_bytes_K))
            end = int(bound_L[taken])
            self._starts.frombytes((bound_L[:taken] - start + self._num_tokens).tobytes())
            self._tokens += parts.tokens[start:end].data
            self._num_tokens += end - start
            self._num_bytes += int(num_bytes_K[:taken].sum())
            bound_L, num_bytes_K = bound_L[taken:], num_bytes_K[taken:]
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
        self._finished = total([self._finished, shard])
        self._begin_shard()


def _finished_shards(directory: Path, split: Split, dtype: str) -> list[Shard]:
    paths = takewhile(Path.exists, (shard_path(directory, split, number, ".json") for number in count()))
    shards = []
    for path in paths:
        shards.append(read_record(path, Shard))
        check_shard(path.with_suffix(".bin"), shards[-1], dtype=dtype)
    return shards
