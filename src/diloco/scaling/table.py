"""A sweep's table: losses, and what they were reached with, for each size and number of replicas."""

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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


def read_table(path: Path) -> list[Point]:
    """The points of a CSV with the columns params, replicas (0 is Data-Parallel) and eval_loss, and maybe others.

    Lines that begin with # are comments. Runs of the same settings, which differ in their seed, are one point, at
    their mean loss.

    Raises:
        ValueError: naming the row that is wrong, or the column that is missing or mixes what no one law holds for.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as a table: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    rows = csv.DictReader(line + "\n" for _, line in numbered)
    for name in ("params", "replicas", "eval_loss"):
        if name not in (rows.fieldnames or ()):
            found = ", ".join(map(repr, rows.fieldnames or ())) or "none"
            raise ValueError(
                f"{path} has no column {name!r}: it needs params, replicas and eval_loss, with commas between "
                f"them, and has {found}"
            )
    points = list(_points(path, rows, [number for number, _ in numbered]))
    _check_alike(path, points)
    if len({point.params for point in points}) < 2:
        has = f"runs of one size only ({points[0].params:g})" if points else "no run"
        raise ValueError(f"{path} has {has}: a law in N needs two sizes or more")
    return _averaged(points)


def _points(path: Path, rows: "csv.DictReader[str]", numbers: list[int]) -> Iterator[Point]:
    # Rows of our own sweep that came to nothing say why in `failed`.
    told = [(numbers[rows.line_num - 1], row) for row in rows if not row.get("failed")]
    used = [name for name in _OPTIONAL if any(row.get(name) for _, row in told)]
    for line, row in told:
        where = f"{path}, line {line}"
        replicas = _number(row, "replicas", where, least=0.0)
        if replicas != int(replicas):
            raise ValueError(f"{where}: replicas must be a whole number, not {row['replicas']}")
        settings = {name: _number(row, name, where) for name in used if row.get(name)}
        for name in used:
            if name not in settings and (replicas or name not in _OF_THE_OUTER_STEP):
                raise ValueError(
                    f"{where}: {name} is missing, and other rows have it: fill it in, or drop the column"
                )
        yield Point(_number(row, "params", where), int(replicas), _number(row, "eval_loss", where), settings)


def _number(row: dict[str, str], name: str, where: str, least: float | None = None) -> float:
    text = row[name]
    if not text:
        raise ValueError(f"{where}: {name} is missing")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where}: {name} must be a number, not {text!r}") from None
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise ValueError(f"{where}: {name} must be {bound} and finite, not {text}")
    return value


def _check_alike(path: Path, points: Sequence[Point]) -> None:
    """Refuse a table of runs that no one law holds for."""
    periods = sorted({point.settings["sync_every"] for point in points if "sync_every" in point.settings})
    if len(periods) > 1:
        found = ", ".join(f"{period:g}" for period in periods)
        raise ValueError(
            f"{path} has runs with sync_every = {found}: a law holds for one, so keep the rows of one"
        )
    ratios = sorted(point.settings["tokens"] / point.params for point in points if "tokens" in point.settings)
    if ratios and ratios[-1] > 1.1 * ratios[0]:
        raise ValueError(
            f"{path} has runs of {ratios[0]:.3g} to {ratios[-1]:.3g} tokens a parameter: a law holds for one "
            "budget, so keep the rows of one"
        )


def _averaged(points: Sequence[Point]) -> list[Point]:
    same: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        same.setdefault((point.params, point.replicas, *sorted(point.settings.items())), []).append(point)
    return [
        replace(of[0], eval_loss=statistics.mean(point.eval_loss for point in of), num_seeds=len(of))
        for of in same.values()
    ]


def best_points(points: list[Point]) -> list[Point]:
    """The lowest loss of each size and number of replicas, among the settings that most seeds have tried.

    Of many single runs the best is a lucky one, which a mean over seeds would not beat.
    """
    best: dict[tuple[float, int], Point] = {}
    for point in sorted(points, key=lambda point: (-point.num_seeds, point.eval_loss)):
        best.setdefault((point.params, point.replicas), point)
    return [best[key] for key in dict.fromkeys((point.params, point.replicas) for point in points)]
