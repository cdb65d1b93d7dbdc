"""A grid of runs: configs in, a row for each finished run out; an interrupted grid goes on where it was.

Each run has a directory named by its identity, so that equal configs are one run, even in two grids that share a
directory. The result of a finished or failed run is the file `result.json` there.
"""

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from diloco.data.corpora import file_digest
from diloco.data.prepare import resolve as resolve_data
from diloco.errors import UserError
from diloco.experiments.runner.identity import run_name, with_absolute_paths
from diloco.experiments.runner.job import Job, end_running_jobs, run_job
from diloco.experiments.runner.progress import GridProgress, differing_labels
from diloco.experiments.runner.result import read_results, write_results
from diloco.experiments.runner.rows import columns, has_all_columns
from diloco.training.config.config import TrainConfig
from diloco.training.processes import num_cores as available_cores
from diloco.training.records.summary import SUMMARY_FILE


@dataclass(frozen=True, kw_only=True)
class LabelledRun:
    """A run of a grid."""

    labels: dict[str, Any]
    """The first columns of its row, by which it differs from the other runs."""
    config: TrainConfig
    """The config as a user writes it; the grid sets its name and directory."""
    at_step: int | None = None
    """The step of the checkpoint that is evaluated; None is the end."""


class Machines(Protocol):
    """One machine or a cluster that runs jobs."""

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as there is room for it; the future holds its result."""
        ...

    def close(self) -> None:
        """End the running jobs; they can be resumed."""
        ...


def run_grid(
    runs: Sequence[LabelledRun],
    directory: Path,
    machines: Machines,
    *,
    tasks: tuple[Path, ...] = (),
    parameters: tuple[str, ...] = (),
    with_curves: bool = False,
    on_progress: Callable[[GridProgress], None] = lambda _: None,
) -> Iterator[list[dict[str, Any]]]:
    """Run each job that has no result yet; after each of them, yield the rows of all finished runs.

    A failed run is a row whose `failed` says why. It is tried again by the next call, unless its settings are the
    reason: then its directory must be deleted first.

    Args:
        runs: all with the same labels.
        directory: holds a directory for each run.
        machines: run the jobs.
        tasks: files of questions, as `read_questions` reads them, to score the outer parameters on.
        parameters: `replica`, `average` or both, to be evaluated like the outer parameters.
        with_curves: add the cosines between outer gradients as curves over training.
        on_progress: called at the beginning, while text is prepared, and after each run.
    """
    options = {"tasks": tasks, "parameters": parameters, "with_curves": with_curves}
    jobs = [make_job(run.config, directory, at_step=run.at_step, **options) for run in runs]
    job_in = {job.directory: job for job in jobs}
    assert all(job_in[job.directory].at_step == job.at_step for job in jobs), (
        "equal runs are evaluated at one step"
    )
    results = {path: result for path, job in job_in.items() if (result := read_result(job)) is not None}
    # Jobs of one core first: two of them at once fill the cores that a job of two would have to wait for.
    waiting = [path for path in job_in if path not in results]
    waiting.sort(key=lambda path: job_in[path].config.num_processes)
    labels = {job.directory: run.labels for run, job in zip(reversed(runs), reversed(jobs), strict=True)}
    progress = GridProgress(jobs=job_in, labels=differing_labels(labels), results=dict(results))
    on_progress(progress)
    for data in dict.fromkeys(job_in[path].config.data for path in waiting):
        # Once, before several jobs do so at the same time.
        resolve_data(data, progress=lambda prepared: on_progress(replace(progress, preparing=prepared)))
    on_progress(progress)

    yield _rows(runs, jobs, results)
    pending = {machines.submit(job_in[path]): path for path in waiting}
    try:
        for future in as_completed(pending):
            path = pending[future]
            results[path] = _keep(job_in[path], future)
            on_progress(replace(progress, results=dict(results)))
            yield _rows(runs, jobs, results)
    finally:
        if not all(future.done() for future in pending):
            for future in pending:
                future.cancel()
            machines.close()


def _rows(
    runs: Sequence[LabelledRun], jobs: Sequence[Job], results: Mapping[Path, dict[str, Any]]
) -> list[dict[str, Any]]:
    measured = {job.directory: columns(results[job.directory], job) for job in jobs if job.directory in results}
    return [
        {**run.labels, "run": job.config.name, **measured[job.directory]}
        for run, job in zip(runs, jobs, strict=True)
        if job.directory in measured
    ]


def make_job(
    config: TrainConfig,
    directory: Path,
    *,
    tasks: tuple[Path, ...] = (),
    parameters: tuple[str, ...] = (),
    at_step: int | None = None,
    with_curves: bool = False,
) -> Job:
    """The job of a config, in the directory below `directory` that is named by the run's identity."""
    placed = replace(
        config, name=run_name(config), runs=directory.absolute(), data=with_absolute_paths(config.data)
    )
    is_alone = config.num_replicas == 1 or config.method == "data_parallel"
    return Job(
        config=placed,
        tasks=tuple(task.absolute() for task in tasks),
        parameters=() if is_alone else parameters,
        at_step=at_step,
        with_curves=with_curves and not is_alone,
    )


def read_result(job: Job) -> dict[str, Any] | None:
    """The result that an earlier call left, if it holds everything that this job measures."""
    result, tasks = read_results(job.directory), {task.stem for task in job.tasks}
    if "failed" in result and (job.directory / SUMMARY_FILE).exists():
        return None  # it was finished by another command since
    if "columns" in result:  # adopted from a table
        return result if has_all_columns(result["columns"], job) else None
    digests = result.get("questions", {})
    changed = {task for task, digest in _question_digests(job).items() if digests.get(task, digest) != digest}
    scored = {name: set(scores["tasks"]) - changed for name, scores in result.get("evaluated", {}).items()}
    has_all = all(job.key(name) in scored and tasks <= scored[job.key(name)] for name in job.parameters)
    has_all &= tasks <= scored.get(job.key("outer"), set())
    has_all &= job.at_step is None or job.key("outer") in scored
    return result if "failed" in result or (result and has_all) else None


def adopt(rows: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Turn the rows of a table into results, so that a grid goes on from its table on another machine.

    Failed runs are left out, and so run again. The columns of several tables add up; the result of a run that took
    place here stays as it is.

    Args:
        rows: as `run_grid` yields them.
        directory: holds a directory for each run.

    Raises:
        UserError: if a row names no run.
    """
    for row in rows:
        if not re.fullmatch(r"[\w-]+", name := str(row.get("run", ""))):
            raise UserError(f"the table's column run has {name!r}, which is no run's name: restore the table")
        earlier, names = read_results(directory / name), list(row)
        measured = {name: row[name] for name in names[names.index("run") + 1 :]}
        if "failed" not in row and (not earlier or "columns" in earlier or "failed" in earlier):
            write_results(directory / name, {"columns": measured | earlier.get("columns", {})})


def _keep(job: Job, future: "Future[dict[str, Any]]") -> dict[str, Any]:
    """Write a job's result, merged with earlier scores of the same run, and return it.

    A failure is written only if it is final and the run has no result: it never replaces one.
    """
    try:
        result = future.result()
    except Exception as error:  # any that a cluster raises
        return {"failed": f"lost: {error}"}
    earlier = read_results(job.directory)
    if "failed" in result:
        if not result.pop("is_final") or "summary" in earlier or "columns" in earlier:
            return result
    else:
        result |= _with_earlier_scores(result, earlier, job)
    write_results(job.directory, result)
    return result


def _with_earlier_scores(result: dict[str, Any], earlier: dict[str, Any], job: Job) -> dict[str, Any]:
    """`evaluated` and `questions` of both results; without earlier scores of a file that has changed."""
    digests, earlier_digests = _question_digests(job), earlier.get("questions", {})
    same = {task: digest for task, digest in earlier_digests.items() if digests.get(task, digest) == digest}
    evaluated = _without_tasks(earlier.get("evaluated", {}), earlier_digests.keys() - same.keys())
    for name, scores in result["evaluated"].items():
        earlier_tasks = evaluated.get(name, {}).get("tasks", {})
        evaluated[name] = {**scores, "tasks": earlier_tasks | scores["tasks"]}
    return {"evaluated": evaluated, "questions": same | digests}


def _without_tasks(evaluated: Mapping[str, Any], tasks: Collection[str]) -> dict[str, Any]:
    return {
        name: {**scores, "tasks": {task: each for task, each in scores["tasks"].items() if task not in tasks}}
        for name, scores in evaluated.items()
    }


def _question_digests(job: Job) -> dict[str, str]:
    """SHA-256 of each file of questions, by the name of its task; the job itself refuses a missing file."""
    return {task.stem: file_digest(task) if task.is_file() else "" for task in job.tasks}


class LocalMachine:
    """Runs jobs on this machine, as many at once as it has a core for each of their processes.

    A job of more processes than there are cores runs alone.

    Args:
        num_cores: cores to use; None is all that this process may use.

    Raises:
        UserError: if that is no number of cores.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        if num_cores is not None and num_cores < 1:
            raise UserError(f"cores={num_cores} must be at least 1; left out, all are used", "cores")
        self._num_cores = num_cores or available_cores()
        self._num_free, self._changed, self._is_closed = self._num_cores, threading.Condition(), False
        self._threads = ThreadPoolExecutor(self._num_cores)

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as enough cores are free."""
        return self._threads.submit(self._run, job)

    def close(self) -> None:
        """End the running jobs, and start no other."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            end_running_jobs()

    def _run(self, job: Job) -> dict[str, Any]:
        num_cores = min(job.config.num_processes, self._num_cores)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_free >= num_cores)
            if self._is_closed:
                raise CancelledError
            self._num_free -= num_cores
        try:
            return run_job(job)
        finally:
            with self._changed:
                self._num_free += num_cores
                self._changed.notify_all()
