"""A list of configs in, one row for each finished run out: resumable, and nothing is run twice.

A run's directory is named by the digest of its config, so that equal configs are one run, also of two grids that
keep their runs in one place. What is left of a run that ended, or failed, is its `result.json`.
"""

import functools
import hashlib
import json
import operator
import statistics
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from diloco.data.config import DataConfig
from diloco.data.corpora import content, file_digest
from diloco.data.index import read_index
from diloco.data.prepare import resolve as resolve_data
from diloco.data.tokenizers import is_file, tokenizer_file
from diloco.errors import UserError
from diloco.experiments.runner.job import Job, end_running_jobs, run_job
from diloco.files import write_atomically
from diloco.training.config import TrainConfig
from diloco.training.launcher import num_cores as available_cores
from diloco.training.resolve import with_method_values
from diloco.training.traits import to_json

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

    def close(self) -> None:
        """End what is running; it can be resumed."""
        ...


def run_grid(
    runs: Sequence[LabelledRun],
    directory: Path,
    machines: Machines,
    *,
    tasks: tuple[Path, ...] = (),
    parameters: tuple[str, ...] = (),
    on_finished: Callable[[float], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Run what has not been run, and yield the rows of all runs so far whenever one has finished.

    A run that fails is a row whose `failed` says why. One that would fail again is not tried again until its
    directory is deleted.

    Args:
        runs: with the same labels each.
        directory: where the runs are kept, one directory each.
        machines: where they take place.
        tasks: files of questions, as `read_questions` reads them, to score the outer parameters on.
        parameters: of replica and average, to be evaluated like the outer ones.
        on_finished: told what part of the work, by floating-point operations, is done.
    """
    jobs = [make_job(run.config, directory, tasks, parameters) for run in runs]
    different = {job.directory: job for job in jobs}
    results = {path: found for path, job in different.items() if (found := read_result(job)) is not None}
    work = {path: _work(job.config) for path, job in different.items()}
    # Those that take one core first: two at once fill what a run on two would have to wait for.
    left = sorted(
        (path for path in different if path not in results), key=lambda p: different[p].config.num_processes
    )
    for data in dict.fromkeys(different[path].config.data for path in left):
        resolve_data(data)  # once, before several runs would

    def rows() -> list[dict[str, Any]]:
        told = {path: columns(result, different[path]) for path, result in results.items()}
        return [
            {**run.labels, "run": job.config.name, **told[job.directory]}
            for run, job in zip(runs, jobs, strict=True)
            if job.directory in told
        ]

    if on_finished is not None:
        on_finished(sum(work[path] for path in results) / sum(work.values()))
    yield rows()
    pending = {machines.submit(different[path]): path for path in left}
    try:
        for future in as_completed(pending):
            path = pending[future]
            results[path] = _kept(different[path], future)
            if on_finished is not None:
                on_finished(sum(work[done] for done in results) / sum(work.values()))
            yield rows()
    finally:
        if not all(future.done() for future in pending):
            for future in pending:
                future.cancel()
            machines.close()


def _kept(job: Job, future: "Future[dict[str, Any]]") -> dict[str, Any]:
    """A job's result, written down with what earlier ones say; not so a failure that may pass, or comes later."""
    try:
        result = future.result()
    except Exception as error:  # whatever a cluster raises
        return {"failed": f"lost: {error}"}
    earlier = _read(job.directory)
    if "failed" in result and (not result.pop("is_final") or "summary" in earlier or "columns" in earlier):
        return result
    if "failed" not in result:
        asked = _questions(job)
        known = earlier.get("questions", {})
        others = {name: digest for name, digest in known.items() if asked.get(name, digest) == digest}
        evaluated = _scores_of(earlier.get("evaluated", {}), without=known.keys() - others.keys())
        for name, found in result["evaluated"].items():
            found["tasks"] = evaluated.get(name, {}).get("tasks", {}) | found["tasks"]
        result |= {"evaluated": evaluated | result["evaluated"], "questions": others | asked}
    job.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(job.directory / RESULT_FILE, [json.dumps(result, indent=1).encode()])
    return result


def _questions(job: Job) -> dict[str, str]:
    """SHA-256 of each file of questions, by the name of its task; one that is not there fails in its job."""
    return {task.stem: file_digest(task) if task.is_file() else "" for task in job.tasks}


def _scores_of(evaluated: dict[str, Any], *, without: Collection[str]) -> dict[str, Any]:
    """What was evaluated, but for some tasks."""
    return {
        name: found | {"tasks": {task: scores for task, scores in found["tasks"].items() if task not in without}}
        for name, found in evaluated.items()
    }


def make_job(
    config: TrainConfig, directory: Path, tasks: tuple[Path, ...] = (), parameters: tuple[str, ...] = ()
) -> Job:
    """What a machine is told of a run, whose directory has the name of its config's digest."""
    placed = replace(
        config, name=f"run-{digest_of(config)}", runs=directory.absolute(), data=_found_from_anywhere(config.data)
    )
    alone = config.num_replicas == 1 or config.method == "data_parallel"
    return Job(
        config=placed, tasks=tuple(task.absolute() for task in tasks), parameters=() if alone else parameters
    )


def digest_of(config: TrainConfig, *, without: Collection[str] = ()) -> str:
    """What a config is known by, wherever its run lies; fields may be left out, by their dotted names."""
    facts = to_json(replace(with_method_values(config), name="", runs=Path(), recipe=""))
    facts["data"] = _facts_of_data(config.data)
    for name in without:
        *path, last = name.split(".")
        del functools.reduce(operator.getitem, path, facts)[last]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _facts_of_data(data: DataConfig) -> dict[str, Any]:
    """What is the same wherever text and tokenizer lie, and is not when either has changed."""
    if data.prepared is not None:
        index = read_index(data.prepared.expanduser())
        return {"prepared": index.digest, "tokenizer": index.tokenizer_digest}
    facts = to_json(data)
    del facts["cache"]
    if facts["max_train_bytes"] is None:  # no limit is no part of a name
        del facts["max_train_bytes"]
    if is_file(data.tokenizer):
        facts["tokenizer"] = file_digest(tokenizer_file(data.tokenizer))
    return facts | {name: [content(source) for source in getattr(data, name)] for name in ("train", "held_out")}


def _found_from_anywhere(data: DataConfig) -> DataConfig:
    """The same, as any process on this machine finds it."""
    if data.prepared is not None:  # whose sources are told as they were when it was made
        return replace(data, prepared=data.prepared.expanduser().absolute(), cache=data.cache.absolute())
    tokenizer = data.tokenizer
    return replace(
        data,
        train=tuple(map(_absolute, data.train)),
        held_out=tuple(map(_absolute, data.held_out)),
        tokenizer=str(tokenizer_file(tokenizer).absolute()) if is_file(tokenizer) else tokenizer,
        cache=data.cache.absolute(),
    )


def _absolute(source: str) -> str:
    """A source of text as any process on this machine finds it."""
    return source if source == "stdlib" or source.startswith("hf:") else str(Path(source).expanduser().absolute())


def read_result(job: Job) -> dict[str, Any] | None:
    """What an earlier call left of a run, if it lacks nothing that is asked for now."""
    result, tasks = _read(job.directory), {task.stem for task in job.tasks}
    if "columns" in result:  # of a table, which does not say how to evaluate it further
        return None if tasks or job.parameters else result
    known = result.get("questions", {})
    changed = {task for task, digest in _questions(job).items() if known.get(task, digest) != digest}
    found = {name: set(scored["tasks"]) - changed for name, scored in result.get("evaluated", {}).items()}
    has_all = all(name in found and tasks <= found[name] for name in job.parameters)
    has_all &= tasks <= found.get("outer", set())
    return result if "failed" in result or (result and has_all) else None


def adopt(rows: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Take runs that are not in this directory for done, as a table says: their rows are what is left of them.

    So a grid goes on from its table alone, on another machine. What failed is run again.

    Args:
        rows: as `run_grid` yields them.
        directory: where the grid keeps its runs.
    """
    for row in rows:
        path = directory / row["run"] / RESULT_FILE
        if "failed" not in row and not path.exists():
            names = list(row)
            told = {name: row[name] for name in names[names.index("run") + 1 :]}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [json.dumps({"columns": told}, indent=1).encode()])


def _read(directory: Path) -> dict[str, Any]:
    path = directory / RESULT_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def columns(result: dict[str, Any], job: Job) -> dict[str, Any]:
    """What a row has of a job's result; no times, which depend on what else the machine did."""
    if "failed" in result:
        return {"failed": " ".join(result["failed"].split())}
    if "columns" in result:
        return result["columns"]
    row = {name: result["summary"][name] for name in _SUMMARY}
    row |= {f"eval_loss_{name}": result["evaluated"][name]["eval_loss"] for name in job.parameters}
    for name in ("outer", *job.parameters):
        whose = "" if name == "outer" else f"_{name}"
        for task in job.tasks:
            scores = result["evaluated"][name]["tasks"][task.stem]
            row |= {f"{task.stem}_{metric}{whose}": value for metric, value in scores.items()}
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
    return 6.0 * config.model.num_matrix_params * config.num_tokens


class LocalMachine:
    """Runs jobs here, as many at once as the cores carry: a core for each process, and one job at least.

    Args:
        num_cores: to be used; None is all that this process may use.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        if num_cores is not None and num_cores < 1:
            raise UserError(f"--cores must be at least 1, not {num_cores}; left out, all are used")
        self._num_cores = num_cores or available_cores()
        self._num_free, self._changed, self._is_closed = self._num_cores, threading.Condition(), False
        self._threads = ThreadPoolExecutor(self._num_cores)

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as enough cores are free."""
        return self._threads.submit(self._run, job)

    def close(self) -> None:
        """End what is running, and begin nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            end_running_jobs()

    def _run(self, job: Job) -> dict[str, Any]:
        wanted = min(job.config.num_processes, self._num_cores)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_free >= wanted)
            if self._is_closed:
                raise CancelledError
            self._num_free -= wanted
        try:
            return run_job(job)
        finally:
            with self._changed:
                self._num_free += wanted
                self._changed.notify_all()
