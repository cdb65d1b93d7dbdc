"""Rows of Parquet files, read in a process of their own: a file may ask for any memory, or crash its library."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from diloco.data.contained import MIB, Contained
from diloco.errors import UserError
from diloco.files import require

_FEWEST_ROWS, _MOST_ROWS = 16, 4096
"""Rows that are decoded together; within these limits, as many as an answer holds."""
_ANSWER_BYTES = MIB
_MOST_SECONDS = 300.0


class ParquetReader:
    """Reads one Parquet file after another in one process.

    Args:
        text_field: the column of the text.
        longest_bytes: UTF-8 bytes of the longest text.
    """

    def __init__(self, text_field: str, longest_bytes: int) -> None:
        self._most_bytes = 1024 * MIB + _FEWEST_ROWS * longest_bytes
        self._process = Contained(f"{__name__}:answering_with_rows", text_field, doing="")

    def rows(self, path: Path) -> Iterator[dict[str, Any]]:
        """The text and the field `id` of each row, where they are strings; all its strings where it has no text.

        Raises:
            UserError: if the file can't be read, or that takes more memory than 1 GiB and 16 of the longest texts.
        """
        self._process.doing = f"{path} can't be read"
        request = str(path).encode("utf-8", "surrogateescape")
        while rows := self._ask(request):
            yield from rows
            request = b""

    def _ask(self, request: bytes) -> list[dict[str, Any]]:
        answer = self._process.ask(request, most_bytes=self._most_bytes, most_seconds=_MOST_SECONDS)
        return msgspec.json.decode(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()


def answering_with_rows(text_field: str) -> Callable[[bytes], bytes]:
    """The reader's other end: a path opens a file, and each answer holds its next rows, none at its end."""
    parquet = require("pyarrow.parquet", extra="data")
    rows: Iterator[dict[str, Any]] = iter(())
    path = ""

    def answer(request: bytes) -> bytes:
        """The next rows, of a new file where the request names one."""
        nonlocal rows, path
        if request:
            path = request.decode("utf-8", "surrogateescape")
            rows = _rows(parquet, path, text_field)
        gathered: list[dict[str, Any]] = []
        size = 0
        try:
            for row in rows:
                gathered.append(row)
                size += sum(map(len, row.values()))
                if size >= _ANSWER_BYTES or len(gathered) >= _MOST_ROWS:
                    break
        except MemoryError:
            raise
        except Exception as error:  # a damaged file raises errors of any class
            raise UserError(f"{path} can't be read: {error}") from error
        return msgspec.json.encode(gathered)

    return answer


def _rows(parquet: Any, path: str, text_field: str) -> Iterator[dict[str, Any]]:
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=MIB) as file:
        names = file.schema_arrow.names
        if names.count(text_field) > 1:
            raise UserError(f"it has several columns `{text_field}`: rename all but one")
        columns = [column for column in ("id", text_field) if column in names] if text_field in names else names
        row_bytes = max(1, _column_bytes(file.metadata, columns)) / max(1, file.metadata.num_rows)
        num_rows = round(min(max(_ANSWER_BYTES / row_bytes, _FEWEST_ROWS), _MOST_ROWS))
        for batch in file.iter_batches(batch_size=num_rows, columns=columns, use_threads=False):
            for row in batch.to_pylist():
                yield {name: value for name, value in row.items() if isinstance(value, str)}


def _column_bytes(metadata: Any, names: list[str]) -> int:
    """The uncompressed bytes of columns, as the file says."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in names)
