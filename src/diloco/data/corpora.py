"""Documents of text, streamed from the standard library, from files, or from the Hugging Face Hub."""

import gzip
import io
import json
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from diloco.errors import UserError
from diloco.files import expanded, require, sha256


@dataclass(frozen=True)
class Document:
    """One text. Its `id` is the same wherever the source lies, so that all machines agree on it."""

    id: str
    text: str


def documents(source: str) -> Iterator[Document]:
    """Stream the documents of `source`, always in the same order.

    `source` is one of

    - `stdlib`: each module of the running Python's standard library, tests left out;
    - a file or a glob (`~` and `**` are understood) of `.txt` (a document a file), `.jsonl` or
      `.parquet` (a document a row: field `text`, and `id` where it has one); `.txt` and `.jsonl` also
      as `.gz` or `.zst`;
    - `hf:NAME[:CONFIG][:SPLIT]`: a dataset of the Hugging Face Hub, split `train` by default.

    Raises:
        UserError: if nothing matches, a suffix is unknown, or a file or row can't be read.
    """
    if source == "stdlib":
        return _stdlib()
    if source.startswith("hf:"):
        return _hub(source)
    return _files(source)


def fingerprint(source: str) -> list[Any]:
    """Facts that change with the text of `source`: Python's version, or each file's size and time.

    It is empty for a dataset of the Hub, which is taken to be as constant as its name.
    """
    if source == "stdlib":
        return [platform.python_version()]
    if source.startswith("hf:"):
        return []
    root, paths = _match(source)
    stats = [(path, path.stat()) for path in paths]
    return [[path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def parts(source: str) -> list[str]:
    """The parts of a source, each under one name however it was asked for: files by path, a dataset's split."""
    if source == "stdlib":
        return [source]
    if source.startswith("hf:"):
        return [":".join(["hf", *(part or "" for part in _parse_hub(source))])]
    return [str(path.resolve()) for path in _match(source)[1]]


def content(source: str) -> list[Any]:
    """The text of `source` wherever it lies: Python's version, files' names and SHA-256, or a dataset's name."""
    if source == "stdlib":
        return [source, platform.python_version()]
    if source.startswith("hf:"):
        return [source]
    root, paths = _match(source)
    return [[path.relative_to(root).as_posix(), file_digest(path)] for path in paths]


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; it is read again only when its size or time has changed."""
    stat = path.stat()
    return _sha256(path.absolute(), stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    return sha256(path)


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.isdisjoint(relative.parts):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            yield Document(relative.as_posix(), text)


def _hub(source: str) -> Iterator[Document]:
    name, config, split = _parse_hub(source)
    load_dataset = require("datasets", extra="hub").load_dataset
    try:
        for number, row in enumerate(load_dataset(name, config, split=split, streaming=True), start=1):
            yield _document(row, default_id=f"{source}:{number}", place=f"row {number}")
    except (ValueError, OSError) as error:  # an unknown name, configuration or split; no network
        raise UserError(f"source {source!r} can't be read: {error}") from error


def _parse_hub(source: str) -> tuple[str, str | None, str]:
    match source.split(":")[1:]:
        case [name] if name:
            return name, None, "train"
        case [name, config] if name:
            return name, config or None, "train"
        case [name, config, split] if name and split:
            return name, config or None, split
    raise UserError(f"source {source!r} is not of the form hf:NAME[:CONFIG][:SPLIT]")


def _files(source: str) -> Iterator[Document]:
    root, paths = _match(source)
    return (document for path in paths for document in _read(path, path.relative_to(root).as_posix()))


def _match(source: str) -> tuple[Path, list[Path]]:
    """The directory that ids are relative to, and the files that `source` names, sorted."""
    pattern = expanded(source)
    try:
        if pattern.is_dir():
            root, paths = pattern, []
        elif pattern.is_file():
            root, paths = pattern.parent, [pattern]
        else:
            root = Path(*takewhile(lambda part: not set("*?[") & set(part), pattern.parts[:-1]))
            paths = sorted(path for path in root.glob(str(pattern.relative_to(root))) if path.is_file())
    except (OSError, ValueError) as error:  # a directory closed to us, or a pattern that is none
        raise UserError(f"source {source!r} can't be looked up: {error}") from error
    if root == pattern:
        raise UserError(
            f"source {source!r} is a directory: name the files in it, such as '{pattern / '**/*.txt'}'"
        )
    if not paths:
        raise UserError(f"source {source!r} matches no file: name a file, or a glob such as 'texts/**/*.txt'")
    for path in paths:
        _reader(path)
    return root, paths


def _read(path: Path, name: str) -> Iterator[Document]:
    try:
        yield from _reader(path)(path, name)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read: {error}") from error


def _reader(path: Path) -> Callable[[Path, str], Iterator[Document]]:
    suffixes = "".join(path.suffixes[-2:] if path.suffix in (".gz", ".zst") else path.suffixes[-1:])
    if suffixes not in _READERS:
        raise UserError(f"{path} has none of the known suffixes: {', '.join(_READERS)}")
    return _READERS[suffixes]


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with _open(path) as file:
        yield Document(name, file.read())


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"line {number} is not JSON: {error}") from error
            yield _document(row, default_id=f"{name}:{number}", place=f"line {number}")


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    with require("pyarrow.parquet", extra="data").ParquetFile(path) as file:
        columns = [column for column in ("id", "text") if column in file.schema_arrow.names]
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield _document(row, default_id=f"{name}:{number}", place=f"row {number}")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        stream = gzip.open(path)  # noqa: SIM115 - closed by the wrapper below
    elif path.suffix == ".zst":
        # zstandard's own reader would take a file that was cut short for a whole one.
        stream = require("pyarrow", extra="data").input_stream(str(path), compression="zstd")
    else:
        stream = path.open("rb")
    # newline="\n": text keeps its line ends, and only "\n" ends a row of JSON.
    return io.TextIOWrapper(stream, encoding="utf-8", newline="\n")


def _document(row: Any, *, default_id: str, place: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{place} has no field `text` that holds a string")
    return Document(row["id"] if isinstance(row.get("id"), str) else default_id, row["text"])


_READERS = {
    ".txt": _read_text,
    ".txt.gz": _read_text,
    ".txt.zst": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".parquet": _read_parquet,
}
