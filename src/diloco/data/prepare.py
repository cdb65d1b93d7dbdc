"""From sources of text to a prepared directory of token shards (`diloco data prepare`).

It may be killed at any moment. A later call with the same settings keeps the finished shards, and ends with the
same bytes as a call that was never interrupted.
"""

import fcntl
import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from diloco.data.config import DataConfig, as_typed
from diloco.data.corpora import documents, fingerprint, left_out, parts
from diloco.data.readers import SUFFIXES, Document, Reading
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
from diloco.errors import UserError
from diloco.files import expanded, sha256, write_atomically

SHARD_TOKENS = 2**26
"""Tokens in a shard, by default: 128 MiB of 16 bits each."""

BPE_TRAINING_BYTES = 2**27
"""Bytes of text, at the most, on which a `bpe:SIZE` tokenizer is trained: the beginning of the training split."""

_BATCH_BYTES = 2**20
_DOCUMENT_BYTES = 2**8
"""Memory of a document without text."""


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """Progress of `prepare`, the work of earlier calls included."""

    stage: Literal["waiting for another process", "training the tokenizer", "packing"]
    """The present activity."""
    num_documents: int = 0
    """Documents packed."""
    num_bytes: int = 0
    """UTF-8 bytes of the documents' text."""
    num_tokens: int = 0
    """Tokens of the documents, BOS included."""


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
    made_with = read_index(directory).settings
    for name in _CONFIGURED:
        value, prepared_value = getattr(config, name), getattr(made_with, name)
        if value not in (getattr(DataConfig, name), prepared_value):
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
                *(len(names), source, ", ".join(SUFFIXES), _listed(names)),
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:8], *(["…"] if len(names) > 8 else [])])


def _settings(config: DataConfig, shard_tokens: int) -> PreparationSettings:
    _check_disjoint(config)
    sources = [[source, fingerprint(source)] for source in (*config.train, *config.held_out)]
    return PreparationSettings(
        **{name: getattr(config, name) for name in _CONFIGURED},
        tokenizer_file_digest=sha256(tokenizer_file(config.tokenizer)) if is_file(config.tokenizer) else "",
        source_digest=sha256(json.dumps(sources).encode()),
        shard_tokens=shard_tokens,
    )


@contextmanager
def _lock(output: Path, report: ProgressCallback) -> Iterator[None]:
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
    bytes_left = BPE_TRAINING_BYTES
    for split, document in split_documents(config, by_position=by_position):
        if split == "train":
            head = _utf8(document)[:bytes_left]
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
    dtype = token_dtype(tokenizer.vocab_size)
    writers: dict[Split, SplitWriter] = {
        split: SplitWriter(output, split, dtype=dtype, bos_id=tokenizer.bos_id, shard_tokens=settings.shard_tokens)
        for split in SPLITS
    }
    skipped = Counter[str]()
    read = split_documents(config, by_position=by_position, skipped=skipped)
    for batch in _batches(_unfinished(read, writers)):
        encoded = tokenizer.encode([document.text for _, document in batch])
        for (split, document), ids in zip(batch, encoded, strict=True):
            writers[split].add(ids, num_bytes=len(_utf8(document)))
        packed = total(writer.packed for writer in writers.values())
        report(PrepareProgress(stage="packing", **asdict(packed)))
    if skipped:
        names = _listed([*skipped])
        _LOG.warning("%s rows whose %s is null are left out of %s", skipped.total(), config.text_field, names)
    for split, writer in writers.items():
        writer.close()
        if not total(writer.shards).num_bytes:
            raise _empty_split(config, split)
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
        shards.append(read_record(path, Shard))
        check_shard(path.with_suffix(".bin"), shards[-1], dtype=dtype)
    return shards


def _unfinished(
    assigned: Iterable[tuple[Split, Document]], writers: dict[Split, SplitWriter]
) -> Iterator[tuple[Split, Document]]:
    num_packed = {split: writer.packed.num_documents for split, writer in writers.items()}
    for split, document in assigned:
        if num_packed[split]:
            num_packed[split] -= 1
        else:
            yield split, document


def _batches(assigned: Iterable[tuple[Split, Document]]) -> Iterator[list[tuple[Split, Document]]]:
    batch: list[tuple[Split, Document]] = []
    size_bytes = 0
    for split, document in assigned:
        batch.append((split, document))
        size_bytes += len(_utf8(document)) + _DOCUMENT_BYTES
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text of document {document.id!r} can't be encoded in UTF-8: {error}") from error


def _check_disjoint(config: DataConfig) -> None:
    """Refuse to hold out text that is trained on.

    Raises:
        UserError: with the file or dataset that is among both.
    """
    trained = {part for source in config.train for part in parts(source)}
    for source in config.held_out:
        for part in parts(source):
            if part in trained:
                raise UserError(
                    f"{part} is both training and held-out text: leave it out of data.held_out or data.train",
                    "data.held_out",
                    "data.train",
                )


def is_held_out_by_position(config: DataConfig) -> bool:
    """True if the end of each document is held out, since hashing ids would leave a split empty.

    The documents are read until that is known.
    """
    splits, train_bytes = set[Split](), 0
    for document in () if config.held_out else _documents(config, config.train):
        (split, _), *_ = _parts(document, config, by_position=False)
        if document.text:
            splits.add(split)
        train_bytes += _num_bytes(document) if split == "train" else 0
        if len(splits) == 2 or (config.max_train_bytes is not None and train_bytes >= config.max_train_bytes):
            break
    return not config.held_out and len(splits) < 2


def split_documents(
    config: DataConfig, *, by_position: bool, skipped: Counter[str] | None = None
) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of a config, each with its split, always in the same order.

    Args:
        config: names the sources.
        by_position: as `is_held_out_by_position` says.
        skipped: counts the rows that `config.skip_null` leaves out, by file.

    Raises:
        UserError: as `documents` does.
    """
    train_bytes = 0
    for document in _documents(config, config.train, skipped):
        for split, part in _parts(document, config, by_position=by_position):
            yield split, part
            train_bytes += _num_bytes(part) if split == "train" else 0
        if config.max_train_bytes is not None and train_bytes >= config.max_train_bytes:
            break
    for document in _documents(config, config.held_out, skipped):
        yield "held_out", document


def _documents(
    config: DataConfig, sources: tuple[str, ...], skipped: Counter[str] | None = None
) -> Iterator[Document]:
    skipped = Counter() if skipped is None else skipped
    reading = Reading(config.text_field, config.max_document_bytes, skipped if config.skip_null else None)
    return chain.from_iterable(documents(source, reading) for source in sources)


def _parts(document: Document, config: DataConfig, *, by_position: bool) -> list[tuple[Split, Document]]:
    """A document in the split of its id, or its beginning and its end, unless empty, in a split each."""
    if not by_position:
        is_train = bool(config.held_out) or not is_held_out(document.id, config.held_out_fraction)
        return [("train" if is_train else "held_out", document)]
    cut = round(len(document.text) * (1 - config.held_out_fraction))
    texts: dict[Split, str] = {"train": document.text[:cut], "held_out": document.text[cut:]}
    return [(split, Document(document.id, text)) for split, text in texts.items() if text]


def _num_bytes(document: Document) -> int:
    return len(document.text.encode(errors="surrogatepass"))


def is_held_out(document_id: str, fraction: float) -> bool:
    """True for the `fraction` of all ids whose hash is lowest.

    Nothing else counts: a document stays in its split whatever is read beside it, in whatever order.
    """
    digest = hashlib.sha256(document_id.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _empty_split(config: DataConfig, split: Split) -> UserError:
    """The error for a split that no document belongs to."""
    if not config.held_out and any(document.text for document in _documents(config, config.train)):
        effect, remedy = (
            ("holds out none", "raise it") if split == "held_out" else ("leaves nothing to train on", "lower it")
        )
        return UserError(
            f"data.held_out_fraction={config.held_out_fraction} {effect} of the text of "
            f"data.train={as_typed(config.train)}: {remedy}, add text, or name data.held_out",
            *("data.held_out_fraction", "data.train", "data.held_out"),
        )
    is_named = split == "held_out" and config.held_out
    name, sources = ("data.held_out", config.held_out) if is_named else ("data.train", config.train)
    return UserError(f"{name}={as_typed(sources)} holds no text: name other sources", name)
