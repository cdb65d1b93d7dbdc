"""The papers' numbers equal another transcription of them, in a folder beside the project."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from diloco import paper_tables

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "published"
Rows = Iterable[dict[str, Any]]


def transcribed(*names: str) -> list[dict[str, Any]]:
    texts = [(BESIDE / f"{name}.csv").read_text() for name in names]
    lines = ([line for line in text.splitlines() if not line.startswith("#")] for text in texts)
    rows = [row for table in lines for row in csv.DictReader(table)]
    return [{name: paper_tables.as_number(cell) for name, cell in row.items() if cell} for row in rows]


def cells(rows: Rows, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row.get(column) for column in columns) for row in rows]


def bandwidths(rows: Rows, *key: str) -> list[tuple[Any, ...]]:
    rows_of_cells = cells(rows, *key, "cu50", "cu80", "cu90", "cu95", "cu99")
    return [tuple(float("inf") if cell == "1000+" else cell for cell in row) for row in rows_of_cells]


TARGETS = ("0.5", "0.8", "0.9", "0.95", "0.99")
SCORES = ("eval_loss", "hellaswag", "piqa", "arc_easy")
QUANTITIES = {"loss": "loss", "learning_rate": "learning_rate", "batch_size": "batch_tokens"}
TABLES: dict[str, tuple[Callable[[Rows], list[Any]], Callable[[], list[Any]]]] = {
    "streaming_bandwidth": (
        lambda ours: cells(ours, "size", "method", *TARGETS),
        lambda: bandwidths(transcribed("streaming_bandwidth", "streaming_bandwidth_100b"), "model", "method"),
    ),
    "scaling_bandwidth": (
        lambda ours: cells(ours, "size", "sync_every", *TARGETS),
        lambda: bandwidths(transcribed("scaling_bandwidth"), "model", "sync_every"),
    ),
    "streaming_overtraining": (
        lambda ours: cells(ours, "tokens_billion", "hours", "hours_1_gbit_s", "tebibits", *SCORES),
        lambda: cells(
            transcribed("streaming_dolma"),
            *("tokens_billion", "hours_infinite_link", "hours_1_gbit", "terabytes_exchanged", *SCORES),
        ),
    ),
    "streaming_scaling": (
        lambda ours: cells(ours, "flops", *SCORES),
        lambda: cells(transcribed("streaming_scaling"), "flops", *SCORES),
    ),
    "scaling_loss": (
        lambda ours: cells(ours, "replicas", "eval_loss"),
        lambda: cells(transcribed("scaling_loss"), "replicas", "eval_loss"),
    ),
    "scaling_power_laws": (
        lambda ours: cells(ours, "quantity", "replicas", "factor", "exponent", "replicas_exponent"),
        lambda: [
            (QUANTITIES[quantity], *law)
            for quantity, *law in cells(
                transcribed("scaling_power_laws"), "quantity", "replicas", "A", "alpha", "beta"
            )
        ],
    ),
    "scaling_extrapolation": (
        lambda ours: cells(ours, "fit", "replicas", "4B", "10B"),
        lambda: cells(transcribed("scaling_extrapolation"), "fit", "replicas", "loss_4b", "loss_10b"),
    ),
    "scaling_forms": (
        lambda ours: cells(ours, "residual"),
        lambda: cells(transcribed("scaling_parametric"), "average_residual"),
    ),
}


@pytest.mark.skipif(not BESIDE.is_dir(), reason=f"there are no published tables in {BESIDE}")
@pytest.mark.parametrize("table", TABLES)
def test_a_table_equals_another_transcription(table):
    ours, theirs = TABLES[table]
    assert sorted(map(repr, ours(paper_tables.rows(table)))) == sorted(map(repr, theirs()))
