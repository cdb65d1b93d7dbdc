"""Runs of the trainer for a comparison: each is run once, resumed if it was interrupted, and read back."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.experiments.runner.grid import LabelledRun, adopt, run_grid
from diloco.experiments.runner.machines import LocalMachine
from diloco.experiments.runner.rows import read_rows, write_rows
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe


def parser(
    description: str | None, *, seeds: Sequence[int], learning_rates: Sequence[float]
) -> argparse.ArgumentParser:
    """The arguments that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default="laptop")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--learning-rates", type=float, nargs="+", default=list(learning_rates))
    return parser


def base_config(arguments: argparse.Namespace, *, num_steps: int, global_batch: int = 8) -> TrainConfig:
    """The config that the runs have in common."""
    base = recipe(arguments.recipe)
    data = {"train": (arguments.train,), "held_out": (arguments.held_out,), "cache": arguments.output / "data"}
    return replace(
        base,
        global_batch=global_batch,
        num_tokens=num_steps * global_batch * base.sequence_length,
        data=replace(base.data, **data),
        evaluation=replace(base.evaluation, num_tokens=1_000_000),
    )


def finish(runs: Sequence[LabelledRun], output: Path) -> list[dict[str, Any]]:
    """The rows of all runs; they are written to OUTPUT/results.csv as the runs finish.

    A run that the table has is not run again, and the table keeps its rows of other runs.
    """
    table = output / "results.csv"
    earlier = read_rows(table) if table.exists() else []
    adopt(earlier, output / "runs")
    rows: list[dict[str, Any]] = []
    for rows in run_grid(runs, output / "runs", LocalMachine()):
        done = {row["run"] for row in rows}
        if written := [*rows, *(row for row in earlier if row["run"] not in done)]:
            write_rows(written, table)
    for row in rows:
        if "failed" in row:
            raise SystemExit(f"run {row['run']} failed: {row['failed']}")
    return rows


def best_rate(rows: Sequence[dict[str, Any]], variant: str) -> float:
    """The learning rate of a variant's lowest loss."""
    best = min((row for row in rows if row["variant"] == variant), key=lambda row: row["eval_loss"])
    return best["learning_rate"]


def rate_beyond_edge(rows: Sequence[dict[str, Any]], variant: str) -> float | None:
    """The learning rate a factor √2 beyond a variant's best, if that is the lowest or the highest of several."""
    rates = {row["learning_rate"] for row in rows if row["variant"] == variant}
    best = best_rate(rows, variant)
    if len(rates) == 1 or min(rates) < best < max(rates):
        return None
    return float(f"{best * math.sqrt(2 if best == max(rates) else 0.5):.3g}")
