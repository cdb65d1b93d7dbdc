"""One run of a grid, in a process of its own: train, evaluate, and say what it came to or why it failed."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from diloco.data.atomic import write_atomically
from diloco.training.config import TrainConfig, from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, and what to evaluate it on."""

    config: TrainConfig
    """As a user would ask for it."""
    tasks: tuple[Path, ...] = ()
    """Files of questions for the outer parameters."""
    parameters: tuple[str, ...] = ()
    """Of replica and average, whose held-out loss is wanted, too."""

    @property
    def directory(self) -> Path:
        """Of the run."""
        return self.config.directory


def run_job(job: Job) -> dict[str, Any]:
    """Train what is left to train, evaluate, and return the result, or `{"failed": why}`; a thread a process."""
    directory = job.directory
    directory.mkdir(parents=True, exist_ok=True)
    answer = directory / "answer.json"
    answer.unlink(missing_ok=True)
    told = {"config": to_json(job.config), "parameters": job.parameters, "parent": os.getpid()}
    told["tasks"] = [str(task) for task in job.tasks]
    write_atomically(directory / "job.json", [json.dumps(told).encode()])
    environment = {name: value for name, value in os.environ.items() if name not in _A_LAUNCHERS}
    with (directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco.experiments.job", str(directory / "job.json"), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
    _RUNNING.add(process)
    try:
        exit_code = process.wait()
    finally:
        _RUNNING.discard(process)
    if answer.exists():
        return json.loads(answer.read_text())
    return {"failed": f"the run's process ended with exit code {exit_code}: see {directory.name}/log.txt"}


_RUNNING: set["subprocess.Popen[bytes]"] = set()


def end_running_jobs() -> None:
    """Let the runs that this process has started come to an end, to be resumed later."""
    for process in tuple(_RUNNING):
        process.terminate()


_A_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _end_with(parent: int) -> None:
    """Let this process be ended when its parent is, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(1)


def _main(job_file: Path, answer: Path) -> None:
    from diloco.training.launcher import exit_code_of, launch
    from diloco.training.run_directory import CONFIG_FILE
    from diloco.training.start import prepare_run

    told = json.loads(job_file.read_text())
    _end_with(told["parent"])
    asked = from_json(TrainConfig, told["config"])
    try:
        if not (asked.directory / "summary.json").exists():
            begun = (asked.directory / CONFIG_FILE).exists()
            config = prepare_run(asked, resume=asked.directory if begun else None)
            launch(_train, config.num_replicas, config.num_shards, config, begun)
        result = _result(asked.directory, told["tasks"], told["parameters"])
    except Exception as error:
        if exit_code_of(error) is None:
            raise
        result = {"failed": str(error)}
    write_atomically(answer, [json.dumps(result).encode()])


def _train(config: TrainConfig, resume: bool) -> None:
    """One replica, or shard."""
    from diloco.training.loop import train

    train(config, resume=resume)


def _result(directory: Path, tasks: list[str], parameters: list[str]) -> dict[str, Any]:
    from diloco.training.finished import Parameters, evaluate_run

    named = {Path(task).stem: Path(task) for task in tasks}
    wanted = [name for name in get_args(Parameters) if name in parameters]
    found = {
        "summary": json.loads((directory / "summary.json").read_text()),
        "losses": {name: evaluate_run(directory, parameters=name)["eval_loss"] for name in wanted},
        "tasks": evaluate_run(directory, tasks=named, held_out=False)["tasks"] if named else {},
    }
    return found | {"outer_steps": _outer_steps(directory)}


def _outer_steps(directory: Path) -> list[dict[str, Any]]:
    """What replica 0 wrote down of them."""
    lines = (directory / "metrics-0.jsonl").read_text().splitlines()
    return [outer_step for line in lines for outer_step in json.loads(line).get("outer_steps", ())]


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
