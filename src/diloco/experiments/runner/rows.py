"""The rows of a grid as CSV: the first columns are labels, and a number comes back as a number."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.files import write_atomically


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write all rows; the columns are those of any row, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [text.getvalue().encode()])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `write_rows` wrote, without empty values.

    Raises:
        UserError: if there is no such file, or it has no rows.
    """
    try:
        with path.open(newline="") as file:
            rows = [_values(row.items()) for row in csv.DictReader(file)]
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _values(items: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {name: _value(text) for name, text in items if text not in ("", None)}


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
