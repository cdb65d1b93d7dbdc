"""Runs of the command line, and what they leave."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.processes import Program, program

from diloco.cli.main import main

TIMEOUT_SECONDS = 200
DILOCO = [sys.executable, "-m", "diloco"]

BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT = ["--diloco.overlap-steps", "2", "7"]


def command(*flags: str) -> list[str]:
    text = ["--data.train", "text.jsonl", "--data.held-out-fraction", "0.1"]
    return [*DILOCO, "train", "tiny", *([] if "--resume" in flags else text), *flags]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    with started(folder, *flags) as process:
        return process.wait(TIMEOUT_SECONDS)


def started(folder: Path, *flags: str) -> AbstractContextManager[Program]:
    return program(main, command(*flags)[len(DILOCO) :], folder=folder)


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def lines(run: Path, replica: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"metrics-{replica}.jsonl").read_text().splitlines()]
