"""The measurements that `links.py` keeps: rows in links.csv, and steps without an exchange in alone.jsonl.

Shapes: S steps, M replicas.
"""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Key = tuple[float, float, str]
"""Repeat, Mbit/s, method."""


def key(row: Mapping[str, Any]) -> Key:
    """A row's identity."""
    return row["repeat"], row["mbit_s"], row["method"]


def read(path: Path) -> list[Row]:
    """The rows of an earlier call, with numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def write(rows: list[Row], path: Path) -> None:
    """Write all rows; their columns may differ."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read_alone(path: Path) -> dict[Key, np.ndarray]:
    """Seconds of each step alone, (S, M), by the row that they belong to."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key(line): np.array(line["seconds_SxM"]) for line in map(json.loads, lines)}


def append_alone(path: Path, row: Row, seconds_SxM: np.ndarray) -> None:
    """Add the steps alone of one row."""
    identity = dict(zip(("repeat", "mbit_s", "method"), key(row), strict=True))
    with path.open("a") as file:
        file.write(json.dumps(identity | {"seconds_SxM": seconds_SxM.round(6).tolist()}) + "\n")
