"""Runs of the command line, and what they leave."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.processes import Program, program

from diloco.cli.main import main
from diloco.models.decoder_config import DecoderConfig
from diloco.rendezvous.log.log import ENTRY
from diloco.training.config.config import EvaluationConfig, TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.prepare import prepare_run

TIMEOUT_SECONDS = 200
DILOCO = [sys.executable, "-m", "diloco"]

BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT = ["--diloco.overlap-steps", "2", "7"]
SHORT = ["--num-tokens", "15360", "--evaluation.every-steps", "15", "--evaluation.num-tokens", "2048"]
SHORT += BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT
"""A run of 30 steps."""
SAVING = ["--checkpoint.every-steps", "10"]


def command(*flags: str) -> list[str]:
    text = ["--data.train", "text.jsonl", "--data.held-out-fraction", "0.1"]
    return [*DILOCO, "train", "tiny", *([] if "--resume" in flags else text), *flags]


def run(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with started(folder, *flags, **environment) as process:
        return process.wait(TIMEOUT_SECONDS)


def started(folder: Path, *flags: str, **environment: str) -> AbstractContextManager[Program]:
    return program(main, command(*flags)[len(DILOCO) :], folder=folder, **environment)


def complaints(process: subprocess.CompletedProcess[str]) -> str:
    """The lines of a process's stderr, but for a wait for others, which are slow to start on a busy machine."""
    return "\n".join(line for line in process.stderr.splitlines() if not line.startswith("waiting for "))


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def lines(run: Path, replica: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"metrics-{replica}.jsonl").read_text().splitlines()]


def quick_config(folder: Path, corpus: Path, **settings: Any) -> TrainConfig:
    """The config of a run that takes milliseconds per step, in `folder`."""
    asked = replace(
        recipe("tiny"),
        runs=folder / "runs",
        sequence_length=32,
        model=DecoderConfig(num_layers=2, num_heads=2, width=16),
        evaluation=EvaluationConfig(num_tokens=512),
        precision="fp32",
        trackers=(),
        timeout_seconds=30.0,
        **settings,
    )
    data = replace(asked.data, train=(str(corpus),), held_out_fraction=0.1, cache=folder / "data")
    return resolved(prepare_run(replace(asked, data=data)))


def replicas(launcher: int) -> list[int]:
    """The forks of the supervisor, which the launcher's child has forked."""
    supervisors = [supervisor for ancestor in children(launcher) for supervisor in children(ancestor)]
    return [replica for supervisor in supervisors for replica in children(supervisor)]


def wait_for_step(process: Program, run: Path, step: int, *, num_replicas: int = 1) -> int:
    """The process of the last replica, once the first ones have come that far."""
    paths = [run / f"metrics-{replica}.jsonl" for replica in range(num_replicas)]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all(path.exists() and path.read_text().count("\n") >= step for path in paths):
        assert time.monotonic() < deadline and process.process.exitcode is None, "the run came to nothing"
        time.sleep(0.02)
    return max(replicas(process.pid))


def children(pid: int) -> Iterator[int]:
    """The processes that a process has started and not waited for."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return


def bodies(store: str, kind: type) -> list:
    """The bodies of a kind in a log, in its order."""
    paths = sorted(Path(store, "log").glob("[0-9]" * 10))  # a kill may leave one half-written, of a longer name
    entries = (ENTRY.open(path.read_bytes(), "").header.body for path in paths)
    return [body for body in entries if isinstance(body, kind)]
