"""A list of configs in, one row for each finished run out: resumable, and nothing is run twice.

A run's directory is named by the digest of its config, so that equal configs are one run, also of two grids that
keep their runs in one place. What is left of a run that ended, or failed, is its `result.json`.
"""

import hashlib
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from diloco.data.atomic import write_atomically
from diloco.data.prepare import resolve as resolve_data
from diloco.experiments.job import Job, run_job
from diloco.models.ladder import num_matrix_params
from diloco.training.config import TrainConfig, to_json

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class LabelledRun:
    """A run of a grid."""

    labels: dict[str, Any]
    """What tells it from the others: the first columns of its row."""
    config: TrainConfig
    """As a user would ask for it; its name and place are the grid's."""


class Machines(Protocol):
    """Where runs take place."""

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as there is room for it; what it came to."""
        ...


def run_grid(
    runs: Sequence[LabelledRun],
    directory: Path,
    machines: Machines,
    *,
    tasks: tuple[Path, ...] = (),
    on_finished: Callable[[float], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Run what has not been run, and yield the rows of all runs so far whenever one has finished.

    A run that fails is a row whose `failed` says why; it is not tried again until its directory is deleted.

    Args:
        runs: with the same labels each.
        directory: where the runs are kept, one directory each.
        machines: where they take place.
        tasks: files of questions to score the outer parameters on, as `read_questions` reads them.
        on_finished: told what part of the work, by floating-point operations, is done.
    """
    jobs = {job.directory: job for job in (make_job(run.config, directory, tasks) for run in runs)}
    results = {job.directory: found for job in jobs.values() if (found := read_result(job)) is not None}
    work = {path: _work(job.config) for path, job in jobs.items()}
    for data in {job.config.data for path, job in jobs.items() if path not in results}:
        resolve_data(data)  # once, before several runs would

    def rows() -> list[dict[str, Any]]:
        paths = [make_job(run.config, directory, tasks).directory for run in runs]
        return [
            {**run.labels, "run": path.name, **columns(results[path])}
            for run, path in zip(runs, paths, strict=True)
            if path in results
        ]

    if on_finished is not None:
        on_finished(sum(work[path] for path in results) / sum(work.values()))
    yield rows()
    pending = {machines.submit(job): path for path, job in jobs.items() if path not in results}
    try:
        for future in as_completed(pending):
            path = pending[future]
            results[path] = future.result()
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / RESULT_FILE, [json.dumps(results[path], indent=1).encode()])
            if on_finished is not None:
                on_finished(sum(work[done] for done in results) / sum(work.values()))
            yield rows()
    finally:
        for future in pending:
            future.cancel()


def make_job(config: TrainConfig, directory: Path, tasks: tuple[Path, ...]) -> Job:
    """What a machine is told of a run, whose directory has the name of its config's digest."""
    facts = to_json(replace(config, name="", runs=Path(), recipe=""))
    facts["data"] = {name: value for name, value in facts["data"].items() if name != "cache"}
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    data = replace(config.data, cache=config.data.cache.absolute())
    placed = replace(config, name=name, runs=directory.absolute(), data=data)
    return Job(config=placed, tasks=tuple(task.absolute() for task in tasks))


def read_result(job: Job) -> dict[str, Any] | None:
    """What an earlier call left of a run, if it lacks nothing that is asked for now."""
    path = job.directory / RESULT_FILE
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    complete = "failed" in result or {task.stem for task in job.tasks} <= set(result["tasks"])
    return result if complete else None


def columns(result: dict[str, Any]) -> dict[str, Any]:
    """What a row has of a result; no times, which depend on what else the machine did."""
    if "failed" in result:
        return {"failed": result["failed"]}
    row = {name: result["summary"][name] for name in _SUMMARY}
    row |= {f"eval_loss_{parameters}": loss for parameters, loss in result["losses"].items()}
    for task, scores in result["tasks"].items():
        row |= {f"{task}_{name}": value for name, value in scores.items()}
    return row | _cosines(result)


def _cosines(result: dict[str, Any]) -> dict[str, float]:
    """Mean cosine between the replicas' outer gradients: in each third of training, and of each block."""
    num_steps, values = result["summary"]["num_steps"], {}
    for outer_step in result["outer_steps"]:
        third = ("first", "middle", "last")[min(2, 3 * outer_step["sent_step"] // num_steps)]
        values.setdefault(f"cosine_{third}_third", []).append(outer_step["cosine"])
        for block, cosine in outer_step.get("layer_cosine", {}).items():
            values.setdefault(f"cosine_block_{block.rpartition('.')[2]}", []).append(cosine)
    means = {name: [value for value in found if value is not None] for name, found in sorted(values.items())}
    return {name: statistics.mean(found) for name, found in means.items() if found}


_SUMMARY = (
    "eval_loss",
    "eval_standard_error",
    "eval_bits_per_byte",
    "num_params",
    "num_tokens",
    "num_steps",
    "bytes_sent_per_replica",
    "data_parallel_bytes_per_replica",
    "outer_hash",
)


def _work(config: TrainConfig) -> float:
    """Floating-point operations of a run, 6·N·tokens."""
    return 6.0 * num_matrix_params(config.model) * config.num_tokens


class LocalMachine:
    """Runs jobs here, as many at once as the cores carry: a core for each process, and one job at least.

    Args:
        num_cores: to be used; None is all that this process may use.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._num_free, self._changed = self._num_cores, threading.Condition()
        self._threads = ThreadPoolExecutor(self._num_cores)

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as enough cores are free."""
        return self._threads.submit(self._run, job)

    def _run(self, job: Job) -> dict[str, Any]:
        wanted = min(job.config.num_processes, self._num_cores)
        with self._changed:
            self._changed.wait_for(lambda: self._num_free >= wanted)
            self._num_free -= wanted
        try:
            return run_job(job)
        finally:
            with self._changed:
                self._num_free += wanted
                self._changed.notify_all()
