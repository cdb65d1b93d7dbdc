"""One run of a grid, in a process of its own: train, evaluate, and say what it came to or why it failed."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from diloco.training.config import TrainConfig
from diloco.training.traits import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, and what to evaluate it on."""

    config: TrainConfig
    """As a user would ask for it."""
    tasks: tuple[Path, ...] = ()
    """Files of questions, for the outer parameters and those below."""
    parameters: tuple[str, ...] = ()
    """Of replica and average, which are to be evaluated, too."""

    @property
    def directory(self) -> Path:
        """Of the run."""
        return self.config.directory


def run_job(job: Job) -> dict[str, Any]:
    """Train what is left to train, evaluate, and return the result; a thread a process.

    Of a run that fails it is `{"failed": why, "is_final": whether it would fail again}`.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    told = {"config": to_json(job.config), "parameters": job.parameters, "parent": os.getpid()}
    told["tasks"] = [str(task) for task in job.tasks]
    environment = {name: value for name, value in os.environ.items() if name not in _A_LAUNCHERS}
    with (job.directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco.experiments.runner.job", str(job.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
    _RUNNING.add(process)
    try:
        answer, _ = process.communicate(json.dumps(told).encode())
    finally:
        _RUNNING.discard(process)
    if answer:
        return json.loads(answer)
    where = f"{job.directory.name}/log.txt"
    return {
        "failed": f"the run's process ended with exit code {process.returncode}: see {where}",
        "is_final": False,
    }


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


def _main(directory: Path) -> None:
    told = json.load(sys.stdin)
    _end_with(told["parent"])
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints does so into the log
    with (directory / "lock").open("w") as lock:
        # Another call may be at this run; the operating system drops the lock of a process that is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = from_json(TrainConfig, told["config"])
        result = _trained(asked) or _evaluated(asked, told["tasks"], told["parameters"])
    with os.fdopen(answer, "w") as file:
        json.dump(result, file)


def _trained(asked: TrainConfig) -> dict[str, Any] | None:
    """Train what is left to train; what went wrong, or None."""
    from diloco.data.prepare import resolve
    from diloco.errors import UserError
    from diloco.training.launcher import exit_code_of, launch
    from diloco.training.prepare import prepare_run
    from diloco.training.runs import CONFIG_FILE, read_config

    if (asked.directory / "summary.json").exists():
        return None
    try:
        prepared = resolve(asked.data)
    except (ValueError, OSError) as error:  # text, or a library, that may be here later
        return {"failed": str(error), "is_final": False}
    try:
        begun = (asked.directory / CONFIG_FILE).exists()
        if begun:  # the same run, whose text may by now be found under another name
            config = read_config(asked.directory)
            config = replace(config, data=replace(config.data, prepared=prepared))
        else:
            config = prepare_run(asked, resume=None)
        launch(_train, config.num_replicas, config.num_shards, config, begun)
    except Exception as error:
        if exit_code_of(error) is None:
            raise
        return {"failed": str(error), "is_final": exit_code_of(error) == UserError.exit_code}
    return None


def _train(config: TrainConfig, resume: bool) -> None:
    """One replica, or shard."""
    from diloco.errors import CheckpointError
    from diloco.training.loop import train

    try:
        train(config, resume=resume)
    except CheckpointError as error:  # which says what to delete, and may then be called again
        raise OSError(str(error)) from error


def _evaluated(asked: TrainConfig, tasks: list[str], parameters: list[str]) -> dict[str, Any]:
    from diloco.data.prepare import resolve
    from diloco.training.finished import Parameters, evaluate_run
    from diloco.training.launcher import exit_code_of

    directory, named = asked.directory, {Path(task).stem: Path(task) for task in tasks}
    evaluated: dict[str, Any] = {}
    try:
        for name in get_args(Parameters):
            if name in parameters or (name == "outer" and named):
                evaluated[name] = evaluate_run(
                    directory,
                    parameters=name,
                    tasks=named,
                    held_out=name != "outer",
                    prepared=resolve(asked.data),  # it may have been elsewhere when the run was trained
                )
    except Exception as error:
        if exit_code_of(error) is None:
            raise
        return {"failed": str(error), "is_final": False}
    summary = json.loads((directory / "summary.json").read_text())
    return {"summary": summary, "evaluated": evaluated, "outer_steps": _outer_steps(directory)}


def _outer_steps(directory: Path) -> list[dict[str, Any]]:
    """What replica 0 wrote down of them."""
    lines = (directory / "metrics-0.jsonl").read_text().splitlines()
    return [outer_step for line in lines for outer_step in json.loads(line).get("outer_steps", ())]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
