"""Runs of the trainer for a comparison: each is done once, resumed if it was interrupted, and read back."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.experiments.runner.grid import LabelledRun, LocalMachine, run_grid
from diloco.experiments.runner.rows import write_rows
from diloco.training.config import TrainConfig
from diloco.training.recipes import recipe


def parser(description: str | None, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """Where the text is, and where the runs go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    return parser


def base_config(arguments: argparse.Namespace) -> TrainConfig:
    """What the runs have in common."""
    laptop = recipe("laptop")
    data = {"train": (arguments.train,), "held_out": (arguments.held_out,), "cache": arguments.output / "data"}
    evaluation = replace(laptop.evaluation, num_tokens=1_000_000)
    return replace(laptop, global_batch=8, data=replace(laptop.data, **data), evaluation=evaluation)


def finish(runs: Sequence[LabelledRun], output: Path) -> list[dict[str, Any]]:
    """The rows of all runs, which are in OUTPUT/results.csv, too, as they finish."""
    rows: list[dict[str, Any]] = []
    for rows in run_grid(runs, output / "runs", LocalMachine()):
        if rows:
            write_rows(rows, output / "results.csv")
    for row in rows:
        if "failed" in row:
            raise SystemExit(f"run {row['run']} failed: {row['failed']}")
    return rows
