"""A fleet of three machines that train a tiny model, and how such a run must end."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.training.runs import bodies, lines, summary

from diloco.outer.step import parameters_hash
from diloco.rendezvous.log.entries import Join, Leave
from diloco.rendezvous.replay import replayed
from diloco.training.records.store_runs import initial_parameters

ROOT = Path(__file__).parents[2]
NAMES = ("a-0", "a-1", "b-0")


def write_fleet(folder: Path, corpus: Path, *, num_tokens: int, machine: str = "") -> Path:
    """A fleet file whose machines are the replicas of a run in a directory."""
    flags = ["--rendezvous", str(folder / "store"), "--num-tokens", str(num_tokens), "--num-replicas", "3"]
    flags += ["--data.train", str(corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(folder / "data")]
    flags += ["--global-batch", "6", "--precision", "fp32", "--checkpoint.every-steps", "5"]
    flags += ["--evaluation.num-tokens", "512"]
    command = shlex.join([sys.executable, "-m", "diloco", "train", "tiny", *flags])
    path = folder / "fleet.toml"
    path.write_text(f"""
        num_params = 1e5
        step_tokens = 384
        [launch]
        command = {command!r}
        directory = "{folder}"
        environment = {{ OMP_NUM_THREADS = "1", PYTHONPATH = "{ROOT / "src"}:{os.environ["PYTHONPATH"]}" }}
        [[machines]]
        name = "a"
        count = 2
        step_seconds = 0.01
        up_mbit_s = 100
        down_mbit_s = 100
        {machine}
        [[machines]]
        name = "b"
        count = 1
        {machine}
        """)
    return path


def num_steps(folder: Path, name: str) -> int:
    """Steps that a replica has written down."""
    path = folder / "runs" / name / "metrics-0.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def check_run(folder: Path, *, interrupted: str, said_so: bool) -> None:
    """All three replicas have ended with the Θ of the log, though one was interrupted, and has gone on.

    Args:
        folder: of the fleet.
        interrupted: the replica.
        said_so: True if it could leave the run before it ended.
    """
    store = str(folder / "store")
    replay = replayed(store, initial=initial_parameters)
    assert replay.state.finished and replay.checked.closed_by is not None
    expected = parameters_hash(replay.parameters())
    assert {summary(folder / "runs" / name)["outer_hash"] for name in NAMES} == {expected}
    joined = [join.name for join in bodies(store, Join)]
    assert sorted(joined) == sorted([*NAMES, interrupted])
    assert [leave.finished for leave in bodies(store, Leave)].count(False) == said_so
    steps = [line["step"] for line in lines(folder / "runs" / interrupted, 0)]
    assert steps == list(range(1, len(steps) + 1)), "it goes on from its checkpoint"


def wait(
    condition: Callable[[], bool], *, seconds: float = 60.0, explain: Callable[[], object] = lambda: ""
) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
