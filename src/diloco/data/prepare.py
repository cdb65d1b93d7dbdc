"""From sources of text to a prepared directory of token shards (`diloco data prepare`).

It may be killed at any moment. A later call with the same settings keeps the finished shards, and ends with the
same bytes as a call that was never interrupted.
"""

import fcntl
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from diloco.data.config import DataConfig, as_typed
from diloco.data.corpora import fingerprint, left_out, num_bytes
from diloco.data.encoding import Encoders, utf8
from diloco.data.packing import SplitWriter, packed_by_piece, runs
from diloco.data.readers import SUFFIXES
from diloco.data.shards import (
    FORMAT,
    INDEX_FILE,
    SETTINGS_FILE,
    SPLITS,
    Index,
    PreparationSettings,
    Shard,
    Split,
    read_index,
    read_record,
    shard_path,
    token_dtype,
    total,
    write_record,
)
from diloco.data.splits import check_disjoint, empty_split, is_held_out_by_position, split_documents
from diloco.data.tokenizers import FILES, Tokenizer, is_file, load_tokenizer, tokenizer_file, train_bpe
from diloco.errors import UserError
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
        names = _listed([*skipped])
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
