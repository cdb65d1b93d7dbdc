"""A sweep's table: losses, and what they were reached with, for each size and number of replicas."""

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.errors import UserError
from diloco.scaling.published import LOSS, NUM_PARAMS

_OF_THE_OUTER_STEP = ("outer_learning_rate", "sync_every")
_OPTIONAL = ("learning_rate", "batch_tokens", "outer_learning_rate", "sync_every", "tokens")


@dataclass(frozen=True)
class Point:
    """A run, or the best of several."""

    params: float
    """N."""
    replicas: int
    """M; 0 is Data-Parallel."""
    eval_loss: float
    """Nats a token."""
    settings: dict[str, float] = field(default_factory=dict)
    """Of learning_rate, batch_tokens, outer_learning_rate, sync_every and tokens, those that are known."""
    num_seeds: int = 1
    """Of how many runs the loss is the mean."""


def published_table() -> list[Point]:
    """The losses of arXiv 2503.09799, Table 4."""
    return [
        Point(params, replicas, loss)
        for replicas, losses in LOSS.items()
        for params, loss in zip(NUM_PARAMS, losses, strict=True)
    ]


def read_table(path: Path, *, sync_every: float | None = None) -> list[Point]:
    """The points of a CSV with the columns params, replicas (0 is Data-Parallel) and eval_loss, and maybe others.

    Lines that begin with # are comments, and what Data-Parallel has in the columns of the outer step is nothing.
    Runs that differ in the column seed alone are one point, at their mean loss.

    Args:
        path: of the CSV.
        sync_every: the H whose runs are read, beside Data-Parallel's; None reads all.

    Raises:
        UserError: naming the row that is wrong, or the column that is missing or mixes what no one law holds for.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read as a table: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    rows = csv.DictReader(line + "\n" for _, line in numbered)
    for name in ("params", "replicas", "eval_loss"):
        if name not in (rows.fieldnames or ()):
            found = ", ".join(map(repr, rows.fieldnames or ())) or "none"
            raise UserError(
                f"{path} has no column {name!r}: it needs params, replicas and eval_loss, with commas between "
                f"them, and has {found}"
            )
    runs = list(_runs(path, rows, [number for number, _ in numbered]))
    points = [run.point for run in runs]
    if sync_every is not None:
        found = sorted({point.settings["sync_every"] for point in points if "sync_every" in point.settings})
        if sync_every not in found:
            has = ", ".join(f"{period:g}" for period in found) or "none"
            raise UserError(f"{path} has no run with sync_every = {sync_every:g}, but {has}")
        runs = [run for run in runs if run.point.settings.get("sync_every", sync_every) == sync_every]
        points = [run.point for run in runs]
    _check_alike(path, points)
    sizes = sorted({point.params for point in points})
    if not sizes or sizes[-1] < 1.05 * sizes[0]:
        has = f"runs of one size only ({sizes[0]:g})" if sizes else "no run"
        raise UserError(f"{path} has {has}: a law in N needs two sizes or more")
    return _averaged(path, runs)


@dataclass(frozen=True)
class _Run:
    """A row."""

    point: Point
    seed: str
    line: int


def _runs(path: Path, rows: "csv.DictReader[str]", numbers: list[int]) -> Iterator[_Run]:
    told = [(numbers[rows.line_num - 1], row) for row in rows]
    # Rows of our own sweep that came to nothing say why in `failed`.
    told = [(line, row) for line, row in told if (row.get("failed") or "").lower() in ("", "false", "0")]
    used = [name for name in _OPTIONAL if any(row.get(name) for _, row in told)]
    for line, row in told:
        where = f"{path}, line {line}"
        if any(row.get(None, ())):  # where DictReader puts what has no column
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
        settings = {name: _number(row, name, where) for name in known}
        point = Point(_number(row, "params", where), int(replicas), _number(row, "eval_loss", where), settings)
        yield _Run(point, row.get("seed") or "", line)


def _number(row: dict[str, str], name: str, where: str, least: float | None = None) -> float:
    text = row[name]
    if not text:
        raise UserError(f"{where}: {name} is missing")
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {name} must be a number, not {text!r}") from None
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise UserError(f"{where}: {name} must be {bound} and finite, not {text}")
    return value


def _check_alike(path: Path, points: Sequence[Point]) -> None:
    """Refuse a table of runs that no one law holds for."""
    periods = sorted({point.settings["sync_every"] for point in points if "sync_every" in point.settings})
    if len(periods) > 1:
        found = ", ".join(f"{period:g}" for period in periods)
        raise UserError(
            f"{path} has runs with sync_every = {found}: a law holds for one, so choose it by --sync-every"
        )
    ratios = sorted(point.settings["tokens"] / point.params for point in points if "tokens" in point.settings)
    if ratios and ratios[-1] > 1.1 * ratios[0]:
        raise UserError(
            f"{path} has runs of {ratios[0]:.3g} to {ratios[-1]:.3g} tokens a parameter: a law holds for one "
            "budget, so keep the rows of one"
        )


def _averaged(path: Path, runs: Sequence[_Run]) -> list[Point]:
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


def best_points(points: list[Point]) -> list[Point]:
    """The lowest loss of each size and number of replicas, among the settings that most seeds have tried.

    Of many single runs the best is a lucky one, which a mean over seeds would not beat.
    """
    best: dict[tuple[float, int], Point] = {}
    for point in sorted(points, key=lambda point: (-point.num_seeds, point.eval_loss)):
        best.setdefault((point.params, point.replicas), point)
    return [best[key] for key in dict.fromkeys((point.params, point.replicas) for point in points)]
