"""The papers' own numbers: a CSV per table, whose first line names its source; losses in nats per token."""

import csv
from pathlib import Path
from typing import Any


def rows(table: str) -> list[dict[str, Any]]:
    """The rows of a table by column: numbers as numbers, empty cells left out.

    >>> rows("streaming_freezing")
    [{'frozen': 'no', 'eval_loss': 2.6749}, {'frozen': 'yes', 'eval_loss': 3.2145}]
    """
    _, *lines = Path(__file__).with_name(f"{table}.csv").read_text(encoding="utf-8").splitlines()
    return [{name: as_number(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]


def as_number(cell: str) -> int | float | str:
    """A cell as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
