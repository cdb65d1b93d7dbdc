"""A grid of runs: configs in, a row for each finished run out; an interrupted grid goes on where it was.

Each run has a directory named by its identity, so that equal configs are one run, even in two grids that share a
directory. The identity is a digest of the run's settings and its text, the same wherever that text lies; only
fields that differ from their defaults are digested, so that a new field renames no stored run. The result of a
finished or failed run is the file `result.json` in its directory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.corpora import content, file_digest
from diloco.data.prepare import PrepareProgress
from diloco.data.prepare import resolve as resolve_data
from diloco.data.shards import read_index
from diloco.data.tokenizers import is_file, tokenizer_file
from diloco.errors import UserError
from diloco.experiments.runner.job import Job, running_jobs
from diloco.experiments.runner.machines import Machines
from diloco.experiments.runner.rows import columns, has_all_columns, read_results, write_results
from diloco.files import expanded, sha256
from diloco.training.config.config import TrainConfig, differences_from_defaults, fields_with
from diloco.training.config.resolve import identity
from diloco.training.records.summary import SUMMARY_FILE


@dataclass(frozen=True)
class LabelledRun:
    """A run of a grid."""

    labels: dict[str, Any]
    """The first columns of its row, by which it differs from the other runs."""
    config: TrainConfig
    """The config as a user writes it; the grid sets its name and directory."""
    at_step: int | None = None
    """The step of the checkpoint that is evaluated; None is the end."""


@dataclass(frozen=True, kw_only=True)
class GridProgress:
    """A grid at one moment."""

    jobs: Mapping[Path, Job]
    """All jobs, by the directories of their runs."""
    labels: Mapping[Path, str]
    """The labels of each run that differ within the grid."""
    results: Mapping[Path, Mapping[str, Any]]
    """The results of the runs that are over."""
    preparing: PrepareProgress | None = None
    """The text that is being prepared."""

    @property
    def num_failed(self) -> int:
        """Runs that are over without a result."""
        return sum("failed" in result for result in self.results.values())

    @property
    def running(self) -> list[Path]:
        """The runs that this process runs now; those on a cluster's machines are not known."""
        return [path for path in running_jobs() if path in self.jobs and path not in self.results]

    def part(self, of_running: Mapping[Path, float] | None = None) -> float:
        """The share of the work that is done, counted in floating-point operations.

        Args:
            of_running: the share that is done of each run that is not over.
        """
        parts = {**(of_running or {}), **dict.fromkeys(self.results, 1.0)}
        work = {path: _work(job) for path, job in self.jobs.items()}
        return sum(work[path] * part for path, part in parts.items()) / sum(work.values())


def _work(job: Job) -> float:
    """Floating-point operations of a run, 6·N·tokens."""
    return 6.0 * job.config.model.num_matrix_params * job.config.num_tokens


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
    _refuse_two_precisions(jobs, measured)
    return [
        {**run.labels, "run": job.config.name, **measured[job.directory]}
        for run, job in zip(runs, jobs, strict=True)
        if job.directory in measured
    ]


def _refuse_two_precisions(jobs: Sequence[Job], measured: Mapping[Path, Mapping[str, Any]]) -> None:
    """Stop a grid whose machines are of two kinds, for which precision=auto is not the same.

    Raises:
        UserError: with a run of each.
    """
    names: dict[str, str] = {}
    for job in jobs:
        taken = measured.get(job.directory, {}).get("precision")
        if taken and job.config.precision == "auto":
            names.setdefault(taken, job.config.name)
    if len(names) > 1:
        (one, name), (other, another), *_ = names.items()
        raise UserError(
            f"precision=auto was {one} on the machine of {name}, and {other} on that of {another}, so that their "
            "losses can't be compared: set precision for all runs, with another output, or delete the directories "
            f"of one kind in {jobs[0].directory.parent}",
            "precision",
        )


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
        tasks={_key(task): task.absolute() for task in tasks},
        parameters=() if is_alone else parameters,
        at_step=at_step,
        with_curves=with_curves and not is_alone,
    )


def _key(task: Path) -> str:
    """The name of a task and a digest of its questions; the job itself refuses a missing file."""
    return f"{task.stem}-{file_digest(task)[:12] if task.is_file() else ''}"


def run_name(config: TrainConfig) -> str:
    """The name of a run's directory, `run-` and a digest: equal for equal runs, whatever grid they belong to."""
    return f"run-{_digest(_facts(config))}"


def text_name(data: DataConfig) -> str:
    """The name of a text's directory, `text-` and a digest: equal for equal text and tokenizer."""
    return f"text-{_digest(_facts_of_data(data))}"


def base_name(config: TrainConfig) -> str:
    """The name of a sweep's base, whose runs belong in one table: its digest leaves out fields with a column."""
    with_a_column = fields_with(TrainConfig, "column")
    return f"base-{_digest({name: value for name, value in _facts(config).items() if name not in with_a_column})}"


def _digest(facts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode())[:12]


def _facts(config: TrainConfig) -> dict[str, Any]:
    return {**identity(config), "data": _facts_of_data(config.data)}


def _facts_of_data(data: DataConfig) -> dict[str, Any]:
    """Text and tokenizer by their content, so that a copy elsewhere is the same and a changed file is not."""
    if data.prepared is not None:
        index = read_index(expanded(data.prepared))
        first = {} if (most := data.max_train_tokens) is None else {"max_train_tokens": most}
        return {"prepared": index.digest, "tokenizer": index.tokenizer_digest, **first}
    facts = differences_from_defaults(replace(data, cache=DataConfig.cache))
    if is_file(data.tokenizer):
        facts["tokenizer"] = file_digest(tokenizer_file(data.tokenizer))
    return facts | {name: [content(source) for source in getattr(data, name)] for name in ("train", "held_out")}


def with_absolute_paths(data: DataConfig) -> DataConfig:
    """The same data, named so that any process on this machine finds it."""
    cache = data.cache.absolute()
    if data.prepared is not None:  # it names its sources as they were when it was made
        return replace(data, prepared=expanded(data.prepared).absolute(), cache=cache)
    tokenizer = data.tokenizer
    return replace(
        data,
        train=tuple(map(_absolute, data.train)),
        held_out=tuple(map(_absolute, data.held_out)),
        tokenizer=str(tokenizer_file(tokenizer).absolute()) if is_file(tokenizer) else tokenizer,
        cache=cache,
    )


def _absolute(source: str) -> str:
    return source if source == "stdlib" or source.startswith("hf:") else str(expanded(source).absolute())


def read_result(job: Job) -> dict[str, Any] | None:
    """The result that an earlier call left, if it holds everything that this job measures."""
    result = read_results(job.directory)
    if "failed" in result and (job.directory / SUMMARY_FILE).exists():
        return None  # it was finished by another command since
    if "columns" in result:  # adopted from a table
        return result if has_all_columns(result["columns"], job) else None
    return (
        result if "failed" in result or (result and job.evaluated <= result.get("evaluated", {}).keys()) else None
    )


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
        result["evaluated"] = earlier.get("evaluated", {}) | result["evaluated"]
    write_results(job.directory, result)
    return result


def differing_labels(labels: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """The labels of each run as text, without those that all runs share.

    >>> differing_labels({Path("a"): {"seed": 0, "τ": 1}, Path("b"): {"seed": 0, "τ": 2}})
    {PosixPath('a'): 'τ=1', PosixPath('b'): 'τ=2'}
    """
    shared = set.intersection(*({(k, str(v)) for k, v in each.items()} for each in labels.values()))
    return {
        path: " ".join(
            f"{name}={_short(value)}" for name, value in each.items() if (name, str(value)) not in shared
        )
        for path, each in labels.items()
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
