"""Files of text, opened by their suffixes and cut into documents: plain text, JSON lines, CSV, Parquet.

A file is read once, from its beginning to its end, and unpacked on the way. What takes longer, to parse it and to
tokenize it, is left to whoever gets its pieces: lines of `.jsonl` and rows of Parquet as they are, and documents.
"""

import codecs
import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, count, groupby
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from diloco import files
from diloco.data.config import DataConfig
from diloco.errors import UserError


@dataclass(frozen=True)
class Document:
    """One text. Its `id` is the same wherever the source lies, so that all machines agree on it."""

    id: str
    text: str


@dataclass(frozen=True)
class Reading:
    """The way from a row to a document."""

    text_field: str = DataConfig.text_field
    """The field that holds the text."""
    longest_bytes: int = DataConfig.max_document_bytes
    """Bytes of the longest text, and of the longest line of `.jsonl`."""
    skipped: Counter[str] | None = None
    """Counts, by the file's name, the rows whose text is null, which are left out; None refuses them."""

    def documents(self, rows: Iterable[tuple[int, Any]], *, name: str, noun: str) -> Iterator[Document]:
        """The documents of numbered rows.

        Args:
            rows: with their numbers, which are their ids beside the file's name where they have none.
            name: of the file.
            noun: for a row, `row` or `line`.

        Raises:
            UserError: if a row has no text, or a longer one.
        """
        for number, row in rows:
            place = f"{noun} {number}"
            text = row.get(self.text_field) if isinstance(row, Mapping) else None
            if isinstance(text, str):
                if len(text) > self.longest_bytes:  # in characters, of which each is a byte or more
                    raise self.too_long(place)
                yield Document(row["id"] if isinstance(row.get("id"), str) else f"{name}:{number}", text)
            elif isinstance(row, Mapping) and self.text_field in row and text is None:
                if self.skipped is None:
                    raise UserError(
                        f"{place} has null as its field `{self.text_field}`: set data.skip_null to leave such "
                        "rows out",
                        "data.skip_null",
                    )
                self.skipped[name] += 1
            else:
                raise self._no_text(row, place)

    def _no_text(self, row: Any, place: str) -> UserError:
        texts = [name for name, value in row.items() if isinstance(value, str)] if isinstance(row, Mapping) else []
        others = [f"`{name:.40}`" for name in texts if name != self.text_field]
        hint = f", but {', '.join(others[:8])}: name one in data.text_field" if others else ""
        return UserError(f"{place} has no field `{self.text_field}` that holds a string{hint}", "data.text_field")

    def too_long(self, place: str) -> UserError:
        """The refusal of a document, by its place in the file."""
        return UserError(
            f"{place} is longer than data.max_document_bytes={self.longest_bytes}: cut it into documents, "
            "or raise that",
            "data.max_document_bytes",
        )


PIECE_BYTES = 2**20
"""Text of a piece, but for the end of its last document."""


class Piece(Protocol):
    """Some of a source's text, which one process parses and tokenizes at a time; it can be pickled."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the source's files that it comes from, about."""
        ...

    def documents(self, reading: Reading) -> Iterator[Document]:
        """The documents of the piece.

        Raises:
            UserError: with the file's name, if a document can't be read.
        """
        ...


@dataclass(frozen=True)
class Lines:
    """Some lines of a `.jsonl`."""

    path: Path
    name: str
    first: int
    """Number of the first line, counted from 1."""
    content: bytes
    read_bytes: int

    def documents(self, reading: Reading) -> Iterator[Document]:
        """The documents of the lines."""
        with files.reading(self.path):
            lines = _lines(io.BytesIO(self.content), self.first, reading)
            yield from reading.documents(lines, name=self.name, noun="line")


@dataclass(frozen=True)
class Rows:
    """Some rows of a Parquet file."""

    path: Path
    name: str
    first: int
    """Number of the first row, counted from 1."""
    content: bytes
    """A stream of Arrow."""
    read_bytes: int

    def documents(self, reading: Reading) -> Iterator[Document]:
        """The documents of the rows."""
        with files.reading(self.path):
            batches = files.require("pyarrow", extra="data").ipc.open_stream(self.content)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from reading.documents(enumerate(rows, self.first), name=self.name, noun="row")


@dataclass(frozen=True)
class Given:
    """Some documents that were read already."""

    content: list[Document]

    @property
    def read_bytes(self) -> int:
        """Characters of their text."""
        return sum(len(document.text) for document in self.content)

    def documents(self, reading: Reading) -> Iterator[Document]:
        """The documents."""
        return iter(self.content)


def given(documents: Iterable[Document]) -> Iterator[Given]:
    """Documents, whatever they come from, as pieces."""
    return map(Given, _grouped(documents, lambda document: len(document.text) + _DOCUMENT_BYTES))


_DOCUMENT_BYTES = 2**8
"""Memory of a document without text."""

_T = TypeVar("_T")


def _grouped(items: Iterable[_T], num_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Items in groups of so many bytes; where reading them fails, those before come before the error."""
    group, size = list[_T](), 0
    try:
        for item in items:
            group.append(item)
            size += num_bytes(item)
            if size >= PIECE_BYTES:
                yield group
                group, size = [], 0
    except Exception:
        if group:
            yield group
        raise
    if group:
        yield group


def pieces(named: Iterable[tuple[Path, str]], reading: Reading) -> Iterator[Piece]:
    """The pieces of files, whose documents are known by the files' names.

    Raises:
        UserError: if a file can't be read.
    """
    for kind, some in groupby(named, lambda one: _kind(one[0])):
        if kind in _CUTTERS:
            for path, name in some:
                yield from _cut(path, name, reading)
        else:  # files may be small, and a piece holds many
            yield from given(chain.from_iterable(_read(path, name, reading) for path, name in some))


def _cut(path: Path, name: str, reading: Reading) -> Iterator[Piece]:
    with files.reading(path), path.open("rb") as raw, _unpacked(raw, path) as file:
        yield from _CUTTERS[_kind(path)](file, raw, path, name, reading)


def _read(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    with files.reading(path), path.open("rb") as raw, _unpacked(raw, path) as file:
        yield from _READERS[_kind(path)](file, name, reading)


def suffixes_of(path: Path) -> str | None:
    """The suffixes by which a file is read; None if it has others."""
    parts = [suffix.lower() for suffix in path.suffixes]
    suffixes = "".join(parts[-2:] if parts[-1:] in ([".gz"], [".zst"]) else parts[-1:])
    return suffixes if suffixes in SUFFIXES else None


def _kind(path: Path) -> str:
    """The suffix of what a file holds once it is unpacked."""
    suffixes = suffixes_of(path)
    assert suffixes is not None, "the files of a source have known suffixes"
    return suffixes.removesuffix(".gz").removesuffix(".zst")


def _unpacked(raw: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER_BYTES)
    if path.suffix.lower() == ".zst":
        # zstandard's own reader would take a file that was cut short for a whole one. This one refuses windows of
        # more than 128 MiB.
        stream = files.require("pyarrow", extra="data").input_stream(raw, compression="zstd")
        return io.BufferedReader(stream, _BUFFER_BYTES)
    return nullcontext(raw)


def _read_text(file: IO[bytes], name: str, reading: Reading) -> Iterator[Document]:
    content = bytearray()
    while piece := file.read(_BUFFER_BYTES):
        content += piece
        if len(content) > reading.longest_bytes:
            raise reading.too_long("the text")
    yield Document(name, content.decode("utf-8-sig"))


def _cut_jsonl(file: IO[bytes], raw: IO[bytes], path: Path, name: str, reading: Reading) -> Iterator[Lines]:
    first, position = 1, 0
    while content := file.read(PIECE_BYTES):
        content += file.readline(reading.longest_bytes + 1)
        yield Lines(path, name, first, content, raw.tell() - position)
        first, position = first + content.count(b"\n"), raw.tell()


def _lines(file: IO[bytes], first: int, reading: Reading) -> Iterator[tuple[int, Any]]:
    for number in count(first):
        if not (line := file.readline(reading.longest_bytes + 1)):
            return
        place = f"line {number}"
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.lstrip().startswith(b"[") or line.strip() == b"{":
            raise UserError(
                f"{place} is not one JSON object, as each line of a .jsonl is: write it so, as jq -c '.[]' does "
                "with an array, and jq -c . with objects of several lines"
            )
        if len(line) > reading.longest_bytes:
            raise reading.too_long(place)
        if line.strip():
            yield number, _parsed(line, place)


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode())
    except RecursionError:
        raise UserError(f"{place} is not JSON: its lists and objects are nested too deep") from None
    except ValueError as error:
        raise UserError(f"{place} is not JSON: {error}") from error


def _read_csv(file: IO[bytes], name: str, reading: Reading) -> Iterator[Document]:
    return reading.documents(_csv_rows(file, reading), name=name, noun="row")


def _csv_rows(file: IO[bytes], reading: Reading) -> Iterator[tuple[int, Any]]:
    # The limit is the whole process's, and is only ever raised; `Reading.documents` refuses what is too long.
    csv.field_size_limit(max(csv.field_size_limit(), reading.longest_bytes))
    lines = codecs.iterdecode(file, "utf-8-sig")  # a spreadsheet writes a byte order mark
    rows = filter(None, csv.reader(lines, strict=True))  # without blank lines
    place = "the header"
    try:
        header = next(rows, list[str]())
        if header.count(reading.text_field) > 1:
            raise UserError(f"the header has several columns `{reading.text_field}`: rename all but one")
        place = "row 1"
        for number, row in enumerate(rows, start=1):
            if len(row) != len(header):
                raise UserError(f"{place} has {len(row)} fields, and the header {len(header)}")
            yield number, dict(zip(header, row, strict=True))
            place = f"row {number + 1}"
    except csv.Error as error:
        is_long = "field limit" in str(error)
        raise reading.too_long(place) if is_long else UserError(f"{place} is not CSV: {error}") from error


def _cut_parquet(file: IO[bytes], raw: IO[bytes], path: Path, name: str, reading: Reading) -> Iterator[Rows]:
    """A Parquet file in pieces of whole batches, each as a stream of Arrow."""
    library = files.require("pyarrow.parquet", extra="data")
    ipc = files.require("pyarrow", extra="data").ipc
    size, first = path.stat().st_size, 1
    with library.ParquetFile(file, buffer_size=_BUFFER_BYTES) as opened:
        for batches in _grouped(_batches(opened, reading), lambda batch: batch.nbytes):
            content = io.BytesIO()
            with ipc.new_stream(content, batches[0].schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
            num_rows = sum(batch.num_rows for batch in batches)
            share = num_rows / max(opened.metadata.num_rows, num_rows)
            yield Rows(path, name, first, content.getvalue(), round(share * size))
            first += num_rows


def _batches(file: Any, reading: Reading) -> Iterator[Any]:
    """The text and the field `id` of the rows of a Parquet file; all of a row where it has no text."""
    names: list[str] = file.schema_arrow.names
    if names.count(reading.text_field) > 1:
        raise UserError(f"it has several columns `{reading.text_field}`: rename all but one")
    columns = [name for name in ("id", reading.text_field) if name in names]
    columns = columns if reading.text_field in names else names
    return file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, use_threads=False)


_ROWS_AT_ONCE = 64
_BUFFER_BYTES = 2**17

_READERS = {".txt": _read_text, ".csv": _read_csv}
_CUTTERS: dict[str, Callable[[IO[bytes], IO[bytes], Path, str, Reading], Iterator[Piece]]] = {
    ".jsonl": _cut_jsonl,
    ".parquet": _cut_parquet,
}

SUFFIXES = tuple(
    suffix + packed
    for suffix in (".txt", ".jsonl", ".csv", ".parquet")
    for packed in ("", ".gz", ".zst")
    if not (suffix == ".parquet" and packed)  # it is compressed in itself
)
"""The suffixes of files that can be read."""
