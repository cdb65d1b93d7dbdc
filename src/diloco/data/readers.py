"""Files of text, opened by their suffixes and cut into documents: plain text, JSON lines, CSV, Parquet."""

import codecs
import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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


def read_file(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    """The documents of a file, which are known by its name.

    Raises:
        UserError: if the file or a row can't be read.
    """
    suffixes = suffixes_of(path)
    assert suffixes is not None, "the files of a source have known suffixes"
    with files.reading(path), _open(path, suffixes) as file:
        yield from _READERS[suffixes.partition(".gz")[0].partition(".zst")[0]](file, name, reading)


def suffixes_of(path: Path) -> str | None:
    """The suffixes by which a file is read; None if it has others."""
    parts = [suffix.lower() for suffix in path.suffixes]
    suffixes = "".join(parts[-2:] if parts[-1:] in ([".gz"], [".zst"]) else parts[-1:])
    return suffixes if suffixes in SUFFIXES else None


def _open(path: Path, suffixes: str) -> IO[bytes]:
    if suffixes.endswith(".gz"):
        return io.BufferedReader(gzip.open(path), _BUFFER_BYTES)
    if suffixes.endswith(".zst"):
        # zstandard's own reader would take a file that was cut short for a whole one. This one refuses windows of
        # more than 128 MiB.
        stream = files.require("pyarrow", extra="data").input_stream(path.open("rb"), compression="zstd")
        return io.BufferedReader(stream, _BUFFER_BYTES)
    return path.open("rb")


def _read_text(file: IO[bytes], name: str, reading: Reading) -> Iterator[Document]:
    content = bytearray()
    while piece := file.read(_BUFFER_BYTES):
        content += piece
        if len(content) > reading.longest_bytes:
            raise reading.too_long("the text")
    yield Document(name, content.decode("utf-8-sig"))


def _read_jsonl(file: IO[bytes], name: str, reading: Reading) -> Iterator[Document]:
    return reading.documents(_lines(file, reading), name=name, noun="line")


def _lines(file: IO[bytes], reading: Reading) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := file.readline(reading.longest_bytes + 1):
        number += 1
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


def _read_parquet(file: IO[bytes], name: str, reading: Reading) -> Iterator[Document]:
    library = files.require("pyarrow.parquet", extra="data")
    with library.ParquetFile(file, buffer_size=_BUFFER_BYTES) as opened:
        rows = enumerate(_rows(opened, reading), start=1)
        yield from reading.documents(rows, name=name, noun="row")


def _rows(file: Any, reading: Reading) -> Iterator[dict[str, Any]]:
    """The text and the field `id` of each row of a Parquet file; all of a row where it has no text."""
    names: list[str] = file.schema_arrow.names
    if names.count(reading.text_field) > 1:
        raise UserError(f"it has several columns `{reading.text_field}`: rename all but one")
    columns = [name for name in ("id", reading.text_field) if name in names]
    columns = columns if reading.text_field in names else names
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns, use_threads=False):
        yield from batch.to_pylist()


_ROWS_AT_ONCE = 64
_BUFFER_BYTES = 2**17

_READERS: dict[str, Callable[[IO[bytes], str, Reading], Iterator[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}

SUFFIXES = tuple(
    suffix + packed
    for suffix in _READERS
    for packed in ("", ".gz", ".zst")
    if not (suffix == ".parquet" and packed)  # it is compressed in itself
)
"""The suffixes of files that can be read."""
