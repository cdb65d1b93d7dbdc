"""The results of a grid: the file `result.json` of each run, the columns that follow from it, and tables as CSV.

A row holds labels first, then measurements. It holds no times, which depend on what else the machine did.
"""

import csv
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import FileError, UserError
from diloco.experiments.runner.job import Job
from diloco.files import make_directory, write_atomically
from diloco.paper_tables import as_number
from diloco.scaling.table import MOST_TABLE_BYTES
from diloco.schema import converted, read_bytes, read_json
from diloco.training.records.metrics import OuterStepMetrics
from diloco.training.records.summary import Summary

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The content of `result.json`: why a run failed, the columns of a row from a table, or a run's results."""

    failed: str | None = None
    columns: dict[str, int | float | str | None] | None = None
    summary: Summary | None = None
    evaluated: dict[str, dict[str, float | None]] = field(default_factory=dict)
    outer_steps: tuple[OuterStepMetrics, ...] = ()
    eval_losses: dict[str, float] = field(default_factory=dict)
    is_final: bool | None = None

    def __post_init__(self) -> None:
        if [self.failed, self.columns, self.summary].count(None) != 2:
            raise UserError("it must hold failed, columns or summary, and one of them alone")


def read_results(directory: Path) -> dict[str, Any]:
    """The values of a run's `result.json`; none if there is no file.

    Raises:
        UserError: if it is damaged.
    """
    path = directory / RESULT_FILE
    if not path.exists():
        return {}
    try:
        result = read_json(path, dict[str, Any])
        converted(result, _Result, source=str(path))
    except FileError as error:
        raise UserError(f"{error}: delete it, so that the run is made again") from None
    return result


def write_results(directory: Path, result: Mapping[str, Any]) -> None:
    """Write the values to a run's `result.json`."""
    make_directory(directory)
    write_atomically(directory / RESULT_FILE, [json.dumps(result, indent=1).encode()])


_OF_THE_SUMMARY = (
    "eval_loss",
    "eval_standard_error",
    "eval_bits_per_byte",
    "num_params",
    "num_tokens",
    "num_steps",
    "bytes_sent_per_replica",
    "data_parallel_bytes_per_replica",
    "outer_hash",
    "precision",
)


def columns(result: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The columns of a job's result."""
    if "failed" in result:
        return {"failed": " ".join(result["failed"].split())}
    if "columns" in result:  # adopted from tables, of which others may have asked for more
        return {name: value for name, value in result["columns"].items() if _is_asked_for(name, job)}
    row = {name: result["summary"][name] for name in _OF_THE_SUMMARY}
    if job.at_step is not None:
        scores = result["evaluated"][job.key("outer")]
        row |= {name: scores[name] for name in _OF_THE_SUMMARY[:3]}
    row |= {f"eval_loss_{name}": result["evaluated"][job.key(name)]["eval_loss"] for name in job.parameters}
    for name in ("outer", *job.parameters):
        suffix = "" if name == "outer" else f"_{name}"
        for key, task in job.tasks.items():
            scores = result["evaluated"][job.key(name, key)]
            row |= {f"{task.stem}_{metric}{suffix}": value for metric, value in scores.items()}
    return row | _losses(result) | _cosines(result, with_curves=job.with_curves)


def has_all_columns(adopted: Mapping[str, Any], job: Job) -> bool:
    """True if the columns of an adopted run have everything that a job measures."""
    return all(any(name.startswith(prefix) for name in adopted) for prefix in _asked_for(job))


def _is_asked_for(name: str, job: Job) -> bool:
    if name in _OF_THE_SUMMARY or name.startswith(LOSS):
        return True
    if any(name.endswith(f"_{other}") for other in ("replica", "average") if other not in job.parameters):
        return False
    return name.startswith((*(f"cosine_{part}" for part in (*_THIRDS, "block")), *_asked_for(job)))


def _asked_for(job: Job) -> Iterator[str]:
    """The prefixes of the columns that a job asks for, beside those of every run."""
    yield from (f"eval_loss_{name}" for name in job.parameters)
    for task in job.tasks.values():
        yield from (f"{task.stem}_acc", *(f"{task.stem}_acc_{name}" for name in job.parameters))
    if job.with_curves:
        yield from (CURVE, EMBEDDING_CURVE)


LOSS = "eval_loss_at_"
"""Columns of the held-out loss while training, by the steps that were taken, in percent."""


def _losses(result: Mapping[str, Any]) -> dict[str, float]:
    """The held-out losses while training, but for that after the last step, which is the run's own."""
    num_steps = result["summary"]["num_steps"]
    losses = {int(step): loss for step, loss in result.get("eval_losses", {}).items()}
    return {f"{LOSS}{round(100 * step / num_steps)}": losses[step] for step in losses if step < num_steps}


_THIRDS = ("first", "middle", "last")
CURVE, EMBEDDING_CURVE = "cosine_at_", "embedding_cosine_at_"
"""Columns of the mean cosine in a tenth of training, by its middle in percent: of blocks, of embeddings."""
TENTHS = tuple(range(5, 100, 10))
"""The middles of the tenths of training, in percent."""


def _cosines(result: Mapping[str, Any], *, with_curves: bool) -> dict[str, float]:
    """Mean cosine between the replicas' outer gradients: in parts of training, and of each block."""
    num_steps = result["summary"]["num_steps"]
    last_fragment = max((outer_step["fragment"] for outer_step in result["outer_steps"]), default=0)
    values: dict[str, list[float | None]] = {}
    for outer_step in result["outer_steps"]:
        third = _THIRDS[min(2, 3 * outer_step["sent_step"] // num_steps)]
        values.setdefault(f"cosine_{third}_third", []).append(outer_step["cosine"])
        if with_curves:
            curve = EMBEDDING_CURVE if outer_step["fragment"] == last_fragment > 0 else CURVE
            tenth = TENTHS[min(9, 10 * outer_step["sent_step"] // num_steps)]
            values.setdefault(f"{curve}{tenth:02}", []).append(outer_step["cosine"])
        for block, cosine in outer_step.get("layer_cosine", {}).items():
            values.setdefault(f"cosine_block_{block.rpartition('.')[2]}", []).append(cosine)
    cosines = {name: [value for value in each if value is not None] for name, each in sorted(values.items())}
    return {name: statistics.mean(each) for name, each in cosines.items() if each}


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write all rows; the columns are those of any row, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    make_directory(path.parent)
    write_atomically(path, [text.getvalue().encode()])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that `write_rows` wrote: numbers as numbers, empty cells left out.

    Raises:
        UserError: if the file can't be read as a table, or has no rows.
    """
    content = read_bytes(path, most_bytes=MOST_TABLE_BYTES)
    try:
        text = io.StringIO(content.decode(), newline="")
        rows = [_values(row) for row in csv.DictReader(text, restkey="")]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is no table: {error}") from None
    if not rows:
        raise UserError(f"{path} has no rows")
    if any("" in row for row in rows):
        raise UserError(f"{path} is no table: a row has more cells than the header")
    return rows


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_number(cell) if isinstance(cell, str) else cell for name, cell in row.items() if cell}
