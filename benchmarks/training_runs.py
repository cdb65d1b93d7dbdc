"""Runs of the trainer for a comparison: each is done once, resumed if it was interrupted, and read back."""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "eval_loss",
    "eval_standard_error",
    "eval_bits_per_byte",
    "num_params",
    "num_tokens",
    "num_steps",
    "bytes_sent_per_replica",
    "data_parallel_bytes_per_replica",
    "compute_utilization",
    "wall_seconds",
)
"""What is kept of a run's summary."""


def parser(description: str | None, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """Where the text is, and where the runs go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    return parser


def train(name: str, flags: Sequence[str], arguments: argparse.Namespace) -> dict:
    """One run of the trainer, or what an earlier call left of it: the columns above."""
    directory = arguments.output / name
    summary = directory / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "diloco", "train", "laptop", "--name", name]
        command += ["--runs", str(arguments.output), "--data.cache", str(arguments.output / "data")]
        command += ["--data.train", str(arguments.train), "--data.held-out", str(arguments.held_out)]
        command += ["--evaluation.num-tokens", "1000000", *flags]
        command += ["--resume", str(directory)] if (directory / "config.json").exists() else []
        subprocess.run(command, check=True)
    values = json.loads(summary.read_text())
    return {column: values[column] for column in COLUMNS}


def write(rows: list[dict], output: Path) -> None:
    """All rows so far, in `results.csv`."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
