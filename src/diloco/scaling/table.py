"""Tables of runs: the loss and the settings of each, by size and number of replicas; a sweep's, or the paper's."""

import csv
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.paper_tables import rows as published_rows
from diloco.schema import read_bytes

MOST_TABLE_BYTES = 64 << 20
"""Size of the largest CSV that is read: a larger one is no table of runs."""

_OF_THE_OUTER_STEP = ("outer_learning_rate", "outer_momentum", "sync_every")
_OPTIONAL = ("learning_rate", "batch_tokens", *_OF_THE_OUTER_STEP, "tokens")


@dataclass(frozen=True)
class Point:
    """A run, or the mean of several that differ in their seed."""

    params: float
    """N."""
    replicas: int
    """M; 0 is Data-Parallel."""
    eval_loss: float
    """Nats a token."""
    settings: dict[str, float] = field(default_factory=dict)
    """The known ones of learning_rate, batch_tokens, tokens, and those of the outer step: outer_learning_rate,
    outer_momentum and sync_every."""
    num_seeds: int = 1
    """The number of runs whose mean loss it is."""


PUBLISHED_PARAMS: dict[str, float] = {
    row["size"]: 12.0 * row["num_layers"] * row["width"] ** 2 + 32_000 * row["width"]
    for row in published_rows("scaling_models")
}
"""N by the paper's name: the matrices of the blocks of Table 3, and 32,000 embeddings, which the head shares.

The paper does not print N. With these counts its losses give its Tables 7, 10 and 11, up to the rounding of the
losses; with the rounded sizes that are the names, or with 32,768 embeddings, they do not.
"""


def published_table() -> list[Point]:
    """The losses of arXiv 2503.09799, Table 4."""
    return [
        Point(PUBLISHED_PARAMS[row["size"]], row["replicas"], row["eval_loss"])
        for row in published_rows("scaling_loss")
    ]


def method_name(num_replicas: int) -> str:
    """The name of M in tables and pictures.

    >>> method_name(0), method_name(2)
    ('Data-Parallel', 'DiLoCo, M = 2')
    """
    return f"DiLoCo, M = {num_replicas}" if num_replicas else "Data-Parallel"


def read_table(path: Path, *, sync_every: float | None = None) -> list[Point]:
    """The points of a CSV with the columns params, replicas (0 is Data-Parallel), eval_loss and optional others.

    Lines that begin with # are comments; Data-Parallel's cells in the columns of the outer step are ignored. Runs
    that differ only in the column seed are one point, at their mean loss.

    Args:
        path: of the CSV.
        sync_every: the H of the runs to read, beside Data-Parallel's; None reads all.

    Raises:
        UserError: if the file can't be read, a row is wrong, a column is missing, or no law holds for all rows.
    """
    content = read_bytes(path, most_bytes=MOST_TABLE_BYTES)
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} can't be read as a table: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    try:
        rows = csv.DictReader(line + "\n" for _, line in numbered)
        columns = rows.fieldnames or ()
        numbered_rows = [(numbered[rows.line_num - 1][0], row) for row in rows]
    except csv.Error as error:
        raise UserError(f"{path} can't be read as a table: {error}") from None
    for name in ("params", "replicas", "eval_loss"):
        if name not in columns:
            given = ", ".join(map(repr, columns)) or "none"
            raise UserError(
                f"{path} has no column {name!r}: it needs params, replicas and eval_loss, with commas between "
                f"them, and has {given}"
            )
    if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
        raise UserError(f"{path} has two columns {twice[0]!r}: drop one")
    runs = list(_runs(path, numbered_rows))
    points = [run.point for run in runs]
    if sync_every is not None:
        periods = sorted({point.settings["sync_every"] for point in points if "sync_every" in point.settings})
        if sync_every not in periods:
            given = ", ".join(f"{period:g}" for period in periods) or "none"
            raise UserError(f"{path} has no run with sync_every={sync_every:g}, but {given}", "sync_every")
        runs = [run for run in runs if run.point.settings.get("sync_every", sync_every) == sync_every]
        points = [run.point for run in runs]
    _check_alike(path, points)
    sizes = sorted({point.params for point in points})
    if not sizes or sizes[-1] < 1.05 * sizes[0]:
        given = f"runs of one size only ({sizes[0]:g})" if sizes else "no run"
        raise UserError(f"{path} has {given}: a law in N needs two sizes or more")
    return _averaged(path, runs)


@dataclass(frozen=True)
class _Run:
    """A row of the table."""

    point: Point
    seed: str
    line: int


_SUCCEEDED = ("", "false", "no", "none", "nan", "0", "0.0")
"""Cells of `failed` in rows that did not fail, as various programs write them."""


def _runs(path: Path, numbered: list[tuple[int, dict[Any, Any]]]) -> Iterator[_Run]:
    """The runs of a table's rows; refuse a row that lacks a number or has one out of range."""
    # Failed runs of our own sweep give the reason in `failed`.
    numbered = [(line, row) for line, row in numbered if (row.get("failed") or "").lower() in _SUCCEEDED]
    used = [name for name in _OPTIONAL if any(row.get(name) for _, row in numbered)]
    for line, row in numbered:
        where = f"{path}, line {line}"
        if any(row.get(None, ())):  # DictReader's place for cells without a column
            raise UserError(f"{where}: more cells than columns (a decimal comma? write 2.95)")
        replicas = _number(row, "replicas", where, least=0.0)
        if replicas != int(replicas):
            raise UserError(f"{where}: replicas must be a whole number, not {row['replicas']}")
        known = [name for name in used if replicas or name not in _OF_THE_OUTER_STEP]
        for name in known:
            if not row.get(name):
                raise UserError(
                    f"{where}: {name} is missing, and other rows have it: fill it in, or drop the column"
                )
        settings = {
            name: _number(row, name, where, least=0.0 if name == "outer_momentum" else None) for name in known
        }
        point = Point(_number(row, "params", where), int(replicas), _number(row, "eval_loss", where), settings)
        yield _Run(point, row.get("seed") or "", line)


def _number(row: dict[str, str], name: str, where: str, least: float | None = None) -> float:
    text = row[name]
    if not text:
        raise UserError(f"{where}: {name} is missing")
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {name} must be a number, not {text[:40]!r}") from None
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise UserError(f"{where}: {name} must be {bound} and finite, not {text}")
    return value


def _check_alike(path: Path, points: Sequence[Point]) -> None:
    """Refuse a table whose runs no one law holds for."""
    periods = sorted({point.settings["sync_every"] for point in points if "sync_every" in point.settings})
    if len(periods) > 1:
        given = ", ".join(f"{period:g}" for period in periods)
        raise UserError(
            f"{path} has runs of several periods ({given}): set sync_every to one of them", "sync_every"
        )
    momenta = sorted({point.settings["outer_momentum"] for point in points if "outer_momentum" in point.settings})
    if len(momenta) > 1:
        given = ", ".join(f"{momentum:g}" for momentum in momenta)
        raise UserError(f"{path} has runs of several outer momenta ({given}): keep the rows of one")
    ratios = sorted(point.settings["tokens"] / point.params for point in points if "tokens" in point.settings)
    if ratios and ratios[-1] > 1.1 * ratios[0]:
        raise UserError(
            f"{path} has runs of {ratios[0]:.3g} to {ratios[-1]:.3g} tokens a parameter: a law holds for one "
            "budget, so keep the rows of one"
        )


def _averaged(path: Path, runs: Sequence[_Run]) -> list[Point]:
    """One point for the runs that differ in their seed alone."""
    same: dict[tuple[object, ...], dict[str, _Run]] = {}
    for run in runs:
        point = run.point
        seeds = same.setdefault((point.params, point.replicas, *sorted(point.settings.items())), {})
        if run.seed in seeds:
            raise UserError(
                f"{path}, lines {seeds[run.seed].line} and {run.line} are runs of the same settings: if they "
                "differ in their seed, say so in a column seed; if in something else, keep the rows of one"
            )
        seeds[run.seed] = run
    return [
        replace(
            next(iter(seeds.values())).point,
            eval_loss=statistics.mean(run.point.eval_loss for run in seeds.values()),
            num_seeds=len(seeds),
        )
        for seeds in same.values()
    ]


def best_points(
    points: Sequence[Point], key: Callable[[Point], object] = lambda point: (point.params, point.replicas)
) -> list[Point]:
    """The lowest loss for each key, by default a size and an M, among the settings that most seeds have tried.

    A single run that is the best of many is lucky: a mean over seeds would rarely beat it.
    """
    best: dict[object, Point] = {}
    for point in sorted(points, key=lambda point: (-point.num_seeds, point.eval_loss)):
        best.setdefault(key(point), point)
    return [best[one] for one in dict.fromkeys(map(key, points))]
