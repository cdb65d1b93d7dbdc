"""A fleet of two machines that train a tiny model, and how such a run must end."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.training.runs import bodies, lines, summary

from diloco.outer.digest import parameters_hash
from diloco.rendezvous.log.entries import Join, Leave
from diloco.rendezvous.replay import replayed
from diloco.training.records.store_runs import initial_parameters

ROOT = Path(__file__).parents[2]


def write_fleet(folder: Path, corpus: Path, *, counts: Mapping[str, int], machine: str = "") -> Path:
    """A fleet file of two machines, by kind, that are the replicas of a run in a directory."""
    flags = ["--rendezvous", str(folder / "store"), "--num-tokens", "20000", "--num-replicas", "2"]
    flags += ["--data.train", str(corpus), "--data.held-out-fraction", "0.1", "--data.cache", str(folder / "data")]
    flags += ["--global-batch", "4", "--precision", "fp32", "--checkpoint.every-steps", "5"]
    flags += ["--evaluation.num-tokens", "512"]
    command = shlex.join([sys.executable, "-m", "diloco", "train", "tiny", *flags])
    path, kinds = folder / "fleet.toml", [f"name = {name!r}\ncount = {count}" for name, count in counts.items()]
    text = f"""
        num_params = 1e5
        step_tokens = 256
        [launch]
        command = {command!r}
        directory = "{folder}"
        environment = {{ OMP_NUM_THREADS = "1", PYTHONPATH = "{ROOT / "src"}:{os.environ["PYTHONPATH"]}" }}
        """
    path.write_text(text + "".join(f"[[machines]]\n{kind}\n{machine}\n" for kind in kinds))
    return path


def num_steps(folder: Path, name: str) -> int:
    """Steps that a replica has written down."""
    path = folder / "runs" / name / "metrics-0.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def check_run(folder: Path, other: str, interrupted: str, *, said_so: bool) -> None:
    """Both replicas have ended with the Θ of the log, though one was interrupted, and has gone on.

    Args:
        folder: of the fleet.
        other: the replica that was not interrupted.
        interrupted: the one that was.
        said_so: True if it could leave the run before it ended.
    """
    store = str(folder / "store")
    replay = replayed(store, initial=initial_parameters)
    assert replay.state.finished and replay.checked.closed_by is not None
    expected = parameters_hash(replay.parameters())
    assert {summary(folder / "runs" / name)["outer_hash"] for name in (other, interrupted)} == {expected}
    joined = [join.name for join in bodies(store, Join)]
    assert sorted(joined) == sorted([other, interrupted, interrupted])
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
