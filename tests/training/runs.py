"""Runs of the command line, and what they leave."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 200
DILOCO = [sys.executable, "-m", "diloco"]

BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT = ["--diloco.overlap-steps", "2", "7"]


def command(*flags: str) -> list[str]:
    text = ["--data.train", "text.jsonl", "--data.held-out-fraction", "0.1"]
    return [*DILOCO, "train", "tiny", *([] if "--resume" in flags else text), *flags]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return call(command(*flags), folder)


def call(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; if it takes too long, end it with all its children."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def lines(run: Path, replica: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"metrics-{replica}.jsonl").read_text().splitlines()]
