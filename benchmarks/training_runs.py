"""Runs of the trainer for a comparison: each is run once, resumed if it was interrupted, and read back."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.experiments.runner.grid import LabelledRun, LocalMachine, run_grid
from diloco.experiments.runner.rows import write_rows
from diloco.training.config import TrainConfig
from diloco.training.recipes import recipe


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


def base_config(arguments: argparse.Namespace, *, num_tokens: int | None = None) -> TrainConfig:
    """The config that the runs have in common."""
    base = recipe(arguments.recipe)
    data = {"train": (arguments.train,), "held_out": (arguments.held_out,), "cache": arguments.output / "data"}
    return replace(
        base,
        global_batch=8,
        num_tokens=num_tokens or base.num_tokens,
        data=replace(base.data, **data),
        evaluation=replace(base.evaluation, num_tokens=1_000_000),
    )


def finish(runs: Sequence[LabelledRun], output: Path) -> list[dict[str, Any]]:
    """The rows of all runs; they are written to OUTPUT/results.csv as the runs finish."""
    rows: list[dict[str, Any]] = []
    for rows in run_grid(runs, output / "runs", LocalMachine()):
        if rows:
            write_rows(rows, output / "results.csv")
    for row in rows:
        if "failed" in row:
            raise SystemExit(f"run {row['run']} failed: {row['failed']}")
    return rows
