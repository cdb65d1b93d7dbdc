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
from typing import IO, Any

import msgspec

from diloco.data.config import DataConfig
from diloco.data.parquet import ParquetReader
from diloco.errors import UserError
from diloco.files import expanded, require, sha256


@dataclass(frozen=True)
class Document:
    """One text. Its `id` is the same wherever the source lies, so that all machines agree on it."""

    id: str
    text: str


def documents(source: str, *, longest_bytes: int = DataConfig.max_document_bytes) -> Iterator[Document]:
    """Stream the documents of `source`, always in the same order.

    `source` is one of

    - `stdlib`: each module of the running Python's standard library, tests left out;
    - a file or a glob (`~` and `**` are understood) of `.txt` (a document a file), `.jsonl` or
      `.parquet` (a document a row: field `text`, and `id` where it has one); `.txt` and `.jsonl` also
      as `.gz` or `.zst`;
    - `hf:NAME[:CONFIG][:SPLIT]`: a dataset of the Hugging Face Hub, split `train` by default.

    Memory is bounded by a small multiple of `longest_bytes`, whatever compressed or damaged files hold. That of
    the library that reads the Hub is not.

    Args:
        source: as above.
        longest_bytes: bytes of the longest line of `.jsonl`, and of the longest text of the others.

    Raises:
        UserError: if nothing matches, a suffix is unknown, a file or row can't be read, or one is longer.
    """
    if source == "stdlib":
        return _stdlib()
    if source.startswith("hf:"):
        return _hub(source, longest_bytes)
    return _files(source, longest_bytes)


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


def _hub(source: str, longest_bytes: int) -> Iterator[Document]:
    name, config, split = _parse_hub(source)
    load_dataset = require("datasets", extra="hub").load_dataset
    try:
        for number, row in enumerate(load_dataset(name, config, split=split, streaming=True), start=1):
            yield _document(row, longest_bytes, default_id=f"{source}:{number}", place=f"row {number}")
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


def _files(source: str, longest_bytes: int) -> Iterator[Document]:
    root, paths = _match(source)

    def read() -> Iterator[Document]:
        """The documents of all files."""
        with ParquetReader(longest_bytes) as parquet:
            for path in paths:
                name = path.relative_to(root).as_posix()
                if path.suffix == ".parquet":
                    yield from _read_parquet(path, name, longest_bytes, parquet)
                else:
                    yield from _read(path, name, longest_bytes)

    return read()


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
        _suffixes(path)
    return root, paths


def _read(path: Path, name: str, longest_bytes: int) -> Iterator[Document]:
    try:
        with _open(path) as file:
            yield from _READERS[_suffixes(path)](file, name, longest_bytes)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} can't be read: {error}", *(error.fields if isinstance(error, UserError) else ()))


def _too_long(place: str, longest_bytes: int) -> UserError:
    return UserError(
        f"{place} is longer than data.max_document_bytes={longest_bytes}: cut it into documents, or raise that",
        "data.max_document_bytes",
    )


def _suffixes(path: Path) -> str:
    """The known suffixes of a file.

    Raises:
        UserError: if it has others.
    """
    suffixes = "".join(path.suffixes[-2:] if path.suffix in (".gz", ".zst") else path.suffixes[-1:])
    if suffixes not in (*_READERS, ".parquet"):
        raise UserError(f"{path} has none of the known suffixes: {', '.join(_READERS)}, .parquet")
    return suffixes


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path), _BUFFER_BYTES)
    if path.suffix == ".zst":
        # zstandard's own reader would take a file that was cut short for a whole one. This one refuses windows of
        # more than 128 MiB.
        stream = require("pyarrow", extra="data").input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream, _BUFFER_BYTES)
    return path.open("rb")


def _read_text(file: IO[bytes], name: str, longest_bytes: int) -> Iterator[Document]:
    content = bytearray()
    while piece := file.read(_BUFFER_BYTES):
        content += piece
        if len(content) > longest_bytes:
            raise _too_long("the text", longest_bytes)
    yield Document(name, content.decode())


def _read_jsonl(file: IO[bytes], name: str, longest_bytes: int) -> Iterator[Document]:
    number = 0
    while line := file.readline(longest_bytes + 1):
        number += 1
        place = f"line {number}"
        if len(line) > longest_bytes:
            raise _too_long(place, longest_bytes)
        yield _document(_parsed(line, place), longest_bytes, default_id=f"{name}:{number}", place=place)


class _Row(msgspec.Struct):
    """The fields that are kept of a row."""

    text: str
    id: msgspec.Raw = msgspec.Raw(b"null")


_ROW = msgspec.json.Decoder(_Row)


def _parsed(line: bytes, place: str) -> Any:
    """A row, of which the other fields take no memory if the line is long."""
    try:
        if len(line) <= _SHORT_LINE_BYTES:
            return json.loads(line.decode())  # it takes NaN, and halves of surrogates, in the other fields
        row = _ROW.decode(line)
        return {"text": row.text, "id": msgspec.json.decode(row.id) if bytes(row.id).startswith(b'"') else None}
    except RecursionError:
        raise UserError(f"{place} is not JSON: its lists and objects are nested too deep") from None
    except ValueError as error:
        raise UserError(f"{place} is not JSON: {error}") from error


def _read_parquet(path: Path, name: str, longest_bytes: int, reader: ParquetReader) -> Iterator[Document]:
    for number, row in enumerate(reader.rows(path), start=1):
        try:
            yield _document(row, longest_bytes, default_id=f"{name}:{number}", place=f"row {number}")
        except UserError as error:
            raise _unreadable(path, error) from error


def _document(row: Any, longest_bytes: int, *, default_id: str, place: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{place} has no field `text` that holds a string")
    if len(row["text"]) > longest_bytes:  # in characters, of which each is a byte or more
        raise _too_long(place, longest_bytes)
    return Document(row["id"] if isinstance(row.get("id"), str) else default_id, row["text"])


_BUFFER_BYTES = 2**17
_SHORT_LINE_BYTES = 2**20

_READERS: dict[str, Callable[[IO[bytes], str, int], Iterator[Document]]] = {
    ".txt": _read_text,
    ".txt.gz": _read_text,
    ".txt.zst": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
}
