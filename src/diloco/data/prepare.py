"""From sources of text to a prepared directory of token shards (`diloco data prepare`).

It may be killed at any moment. A later call with the same settings keeps the finished shards, and ends with the
same bytes as a call that was never interrupted.
"""

import fcntl
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from diloco.data.config import DataConfig, as_typed
from diloco.data.corpora import (
    check_disjoint,
    empty_split,
    fingerprint,
    in_order,
    is_held_out_by_position,
    left_out,
    num_bytes,
    pieces,
    reading_of,
    split_documents,
)
from diloco.data.encoding import Encoded, Encoders, Place, Task, utf8
from diloco.data.readers import SUFFIXES
from diloco.data.shards import (
    FORMAT,
    INDEX_FILE,
    SETTINGS_FILE,
    SPLITS,
    Counts,
    Index,
    PreparationSettings,
    Shard,
    Split,
    check_shard,
    read_index,
    read_record,
    shard_path,
    token_dtype,
    tokens_digest,
    total,
    write_record,
)
from diloco.data.tokenizers import FILES, Tokenizer, is_file, load_tokenizer, tokenizer_file, train_bpe
from diloco.errors import UserError, listed
from diloco.files import expanded, sha256, write_atomically

SHARD_TOKENS = 2**26
"""Tokens in a shard, by default: 128 MiB of 16 bits each."""

BPE_TRAINING_BYTES = 2**27
"""Bytes of text, at the most, on which a `bpe:SIZE` tokenizer is trained: the beginning of the training split."""


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """Progress of `prepare`, the work of earlier calls included."""

    stage: Literal["waiting for another process", "training the tokenizer", "reading what is packed", "packing"]
    """The present activity."""
    num_documents: int = 0
    """Documents packed."""
    num_bytes: int = 0
    """UTF-8 bytes of the documents' text."""
    num_tokens: int = 0
    """Tokens of the documents, BOS included."""
    fraction: float | None = None
    """The part of the text that is packed, at least; None where that is not known."""


ProgressCallback = Callable[[PrepareProgress], None]


def resolve(config: DataConfig, *, progress: ProgressCallback | None = None) -> Path:
    """The prepared directory of `config`, prepared now if it is not yet.

    Raises:
        UserError: as `prepare` does, or if `config.prepared` was made from other sources or with another
            tokenizer than `config` asks for.
    """
    if config.prepared is None:
        settings = _settings(config, SHARD_TOKENS)
        return prepare(config, expanded(config.cache).absolute() / _name(settings), progress=progress)
    directory = expanded(config.prepared).absolute()
    index = read_index(directory)
    for name in _CONFIGURED:
        value, prepared_value = getattr(config, name), getattr(index.settings, name)
        is_same = value in (getattr(DataConfig, name), prepared_value)
        if not is_same and name == "tokenizer" and is_file(value):  # by another path, or from another machine
            is_same = sha256(tokenizer_file(value)) == index.tokenizer_digest
        if not is_same:
            raise UserError(
                f"data.{name}={as_typed(value)} contradicts data.prepared={directory}, which was made with "
                f"data.{name}={as_typed(prepared_value)}: drop one of the two",
                f"data.{name}",
                "data.prepared",
            )
    return directory


def _name(settings: PreparationSettings) -> str:
    """The name of a directory in the cache: a digest of the settings."""
    return sha256(json.dumps({"format": FORMAT, **asdict(settings)}).encode())[:16]


def prepare(
    config: DataConfig,
    output: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: ProgressCallback | None = None,
) -> Path:
    """Tokenize the sources of `config` into `output`, unless that is done; return `output`.

    Several processes may prepare the same output at a time: one works, the others wait for it.

    Raises:
        UserError: if a source can't be read, a split holds no document, text is both trained on and held out, or
            `output` is no directory, was prepared with other settings, or lacks the settings of its files.
    """
    settings = _settings(config, shard_tokens)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} can't be made a directory: {error}") from error
    if (output / INDEX_FILE).exists() and (output / SETTINGS_FILE).exists():
        _check_settings(output, settings)  # nothing is written: the directory may be somebody else's
        return output
    report = progress or (lambda _: None)
    with _lock(output, report):
        _claim(output, settings)
        if not (output / INDEX_FILE).exists():
            _name_what_is_left_out(config)
            by_position = is_held_out_by_position(config)
            tokenizer = _install_tokenizer(config, by_position, output, report)
            write_record(output / INDEX_FILE, _pack(config, by_position, settings, output, tokenizer, report))
    return output


_LOG = logging.getLogger("diloco")


def _name_what_is_left_out(config: DataConfig) -> None:
    for source in (*config.train, *config.held_out):
        if names := left_out(source):
            _LOG.warning(
                "%s of the files in %s are left out, since they have none of the suffixes %s: %s",
                *(len(names), source, ", ".join(SUFFIXES), listed(names)),
            )


def _settings(config: DataConfig, shard_tokens: int) -> PreparationSettings:
    check_disjoint(config)
    sources = [[source, fingerprint(source)] for source in (*config.train, *config.held_out)]
    return PreparationSettings(
        **{name: getattr(config, name) for name in _CONFIGURED},
        tokenizer_file_digest=sha256(tokenizer_file(config.tokenizer)) if is_file(config.tokenizer) else "",
        source_digest=sha256(json.dumps(sources).encode()),
        shard_tokens=shard_tokens,
    )


@contextmanager
def _lock(output: Path, report: ProgressCallback) -> Iterator[None]:
    """Hold the lock of a directory, and wait for another process that has it."""
    # The operating system drops the lock of a process that is killed.
    with ExitStack() as stack:
        try:
            file = stack.enter_context((output / "lock").open("wb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(PrepareProgress(stage="waiting for another process"))
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"{output} can't be locked, to be written: {error}: name another directory") from error
        yield


def _claim(output: Path, settings: PreparationSettings) -> None:
    """Take a directory for these settings; remove the partial files of a process that was killed."""
    path, names = output / SETTINGS_FILE, (INDEX_FILE, *FILES, *(f"{split}-*" for split in SPLITS))
    if not path.exists() and any(any(output.glob(name)) for name in names):
        raise UserError(f"{output} holds files of another preparation: name another output", "output")
    for name in (SETTINGS_FILE, *names):
        for part in output.glob(f"{name.removesuffix('*')}*.partial"):  # of a process that was killed
            part.unlink(missing_ok=True)
    if not path.exists() or all(file.name in ("lock", SETTINGS_FILE) for file in output.iterdir()):
        write_record(path, settings)
    _check_settings(output, settings)


def _check_settings(output: Path, settings: PreparationSettings) -> None:
    """Refuse a directory that was prepared with other settings."""
    earlier = read_record(output / SETTINGS_FILE, PreparationSettings)
    for name, label in _LABELS.items():
        before, now = getattr(earlier, name), getattr(settings, name)
        if before != now:
            raise UserError(
                f"{output} was prepared with {label}={as_typed(before)}, not {label}={as_typed(now)}: choose "
                "another directory, or delete this one",
                *([label] if label.startswith("data.") else []),
            )


_CONFIGURED = tuple(field.name for field in fields(PreparationSettings) if hasattr(DataConfig, field.name))
"""The settings of a prepared directory that `DataConfig` has, too."""

_LABELS = {
    field.name: f"data.{field.name}" if field.name in _CONFIGURED else field.name
    for field in fields(PreparationSettings)
}


def _install_tokenizer(config: DataConfig, by_position: bool, output: Path, report: ProgressCallback) -> Tokenizer:
    """Put the tokenizer's file into `output`, which is then complete in itself."""
    if config.tokenizer == "bytes":
        return load_tokenizer("bytes")
    if config.tokenizer.startswith("bpe:"):
        path = output / "tokenizer.json"
        if not path.exists():
            report(PrepareProgress(stage="training the tokenizer"))
            train_bpe(_training_texts(config, by_position), int(config.tokenizer.removeprefix("bpe:")), path)
    else:
        original = tokenizer_file(config.tokenizer)
        load_tokenizer(original)  # an error then names the user's file, not the copy
        path = output / f"tokenizer{original.suffix}"
        write_atomically(path, [original.read_bytes()])
    return load_tokenizer(path)


def _training_texts(config: DataConfig, by_position: bool) -> Iterator[str]:
    """The beginning of the training text, from which a tokenizer is trained."""
    bytes_left = BPE_TRAINING_BYTES
    for split, document in split_documents(config, by_position=by_position):
        if split == "train":
            head = utf8(document)[:bytes_left]
            yield head.decode(errors="ignore")  # The cut may fall inside a character.
            bytes_left -= len(head)
            if not bytes_left:
                return


def _pack(
    config: DataConfig,
    by_position: bool,
    settings: PreparationSettings,
    output: Path,
    tokenizer: Tokenizer,
    report: ProgressCallback,
) -> Index:
    """Encode the documents and write their shards, after those that an earlier process has packed."""
    dtype = token_dtype(tokenizer.vocab_size)
    writers: dict[Split, SplitWriter] = {
        split: SplitWriter(output, split, dtype=dtype, shard_tokens=settings.shard_tokens) for split in SPLITS
    }
    skipped, sizes, read_bytes = Counter[str](), [num_bytes(s) for s in (*config.train, *config.held_out)], 0
    spec = "bytes" if config.tokenizer == "bytes" else str(output / tokenizer.name)
    with Encoders(config, by_position, tokenizer, spec=spec) as encoders:
        num_packed: dict[Split, int] = {split: writer.packed.num_documents for split, writer in writers.items()}
        if any(num_packed.values()):
            report(PrepareProgress(stage="reading what is packed"))
        packed = packed_by_piece(config, encoders, num_packed)
        for run in runs(config, encoders, packed, skipped=skipped, ended=_say_which_ended):
            for writer in writers.values():
                writer.add(run)
            if run.ends_piece:
                read_bytes += run.encoded.read_bytes
                counts = {split: writer.packed for split, writer in writers.items()}
                fraction = _fraction(config, counts["train"].num_bytes, read_bytes, sizes)
                report(PrepareProgress(stage="packing", fraction=fraction, **asdict(total(counts.values()))))
    if skipped:
        names = listed([*skipped])
        _LOG.warning("%s rows whose %s is null are left out of %s", skipped.total(), config.text_field, names)
    for split, writer in writers.items():
        writer.close()
        if not total(writer.shards).num_bytes:
            raise empty_split(config, split)
    splits: dict[Split, tuple[Shard, ...]] = {split: tuple(writer.shards) for split, writer in writers.items()}
    return Index(
        settings=settings,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        dtype=dtype,
        splits=splits,
        held_out_by_position=by_position,
        digest=sha256(
            *(shard_path(output, split, i, ".bin") for split in SPLITS for i in range(len(splits[split])))
        ),
    )


def _say_which_ended(source: str) -> None:
    _LOG.warning("the training text ends with %s, of which data.weights takes no more", source)


def _fraction(config: DataConfig, train_bytes: int, read_bytes: int, sizes: Sequence[int | None]) -> float | None:
    """The part of the text that is packed, at least; None where that is not known."""
    fractions = [] if config.max_train_bytes is None else [train_bytes / config.max_train_bytes]
    if not config.weights and None not in sizes:
        fractions.append(read_bytes / max(1, sum(filter(None, sizes))))
    return min(1.0, max(fractions)) if fractions else None


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
