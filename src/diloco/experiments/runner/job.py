"""One run of a grid, in a process of its own: train, evaluate, and return the result or why it failed."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, get_args

from diloco.errors import DilocoError, UserError, exit_code_of
from diloco.files import make_directory
from diloco.schema import read_json
from diloco.training.config.config import TrainConfig, fields_with
from diloco.training.processes import SIGNALS, Ancestor, Call, launch, prepared, slow_imports
from diloco.training.records.runs import running


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, and how to evaluate it."""

    config: TrainConfig
    """The config as a user writes it, with the run's name and directory."""
    tasks: Mapping[str, Path] = field(default_factory=dict)
    """Files of questions, for the outer parameters and for those below, by their name and a digest of them."""
    parameters: tuple[str, ...] = ()
    """`replica`, `average` or both: parameters to evaluate beside the outer ones."""
    at_step: int | None = None
    """The step of the checkpoint that is evaluated; None is the end."""
    with_curves: bool = False
    """True if the cosines between outer gradients are asked for as curves."""

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.config.directory

    def key(self, name: str, task: str = "") -> str:
        """The key of a loss among a result's evaluations, or of a task's scores, such as `outer at step 500`."""
        return f"{name}{'' if self.at_step is None else f' at step {self.at_step}'}{task and f', {task}'}"

    @property
    def evaluated(self) -> set[str]:
        """The keys of all evaluations; the loss of the outer parameters at the end is in the summary."""
        names = ("outer", *self.parameters)
        losses = {self.key(name) for name in (names if self.at_step is not None else self.parameters)}
        return losses | {self.key(name, task) for name in names for task in self.tasks}


def run_job(job: Job) -> dict[str, Any]:
    """Run a job, `result_of`, in a new process, and return its result; each process of the run has one thread.

    What it prints goes into `log.txt` in the run's directory.
    """
    imports: tuple[str, ...] = ()
    with suppress(DilocoError, ImportError):  # the job itself says so
        imports = slow_imports(job.config)
    call = Call(_be_job, job, imports=imports)
    _RUNNING[call] = job.directory
    try:
        make_directory(job.directory)
        return _ancestor().run(call)
    except EOFError:
        reason = f"the run's process was killed, or met a bug: see {job.directory.name}/log.txt"
        return {"failed": reason if call.pid else "the run's process could not be started", "is_final": False}
    finally:
        del _RUNNING[call]


_RUNNING: dict[Call, Path] = {}


def running_jobs() -> tuple[Path, ...]:
    """The directories of the runs that this process has started and that are not over."""
    return tuple(_RUNNING.values())


def end_running_jobs() -> None:
    """End the jobs that this process has started, those that have not begun yet, too; they can be resumed."""
    for call in tuple(_RUNNING):
        call.end()


def _ancestor() -> Ancestor:
    """The ancestor of all jobs of this process, which ends with it."""
    with _LOCK:
        while _ANCESTORS and not _ANCESTORS[0].is_alive:
            _ANCESTORS.pop().close()
        if not _ANCESTORS:
            _ANCESTORS.append(Ancestor("spawn"))
            # Not by atexit: a process that multiprocessing has started joins its children without calling that.
            Finalize(None, _ANCESTORS[0].close, exitpriority=1)
        return _ANCESTORS[0]


_ANCESTORS: list[Ancestor] = []
"""The one that there is, if any."""
_LOCK = threading.Lock()


def _be_job(job: Job) -> dict[str, Any]:
    """Be the process of a job: no launcher's, with one thread, and with a file for what it prints."""
    import torch

    log = os.open(job.directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"  # for its replicas, too
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return result_of(job)


def result_of(job: Job) -> dict[str, Any]:
    """Train what is left to train, evaluate, and return the result.

    It forks, and so is called before this process starts threads. The result of a failure is
    `{"failed": the reason, "is_final": True if it would fail again}`.
    """
    # The process from which replicas are forked holds no lock.
    with prepared(), running(job.directory, waits=True):  # another grid may be at the same run
        failure = _train_or_resume(job.config)
        return _evaluate(job) if failure is None else failure


def _train_or_resume(config: TrainConfig) -> dict[str, Any] | None:
    """Train what is left to train; return the failure, or None."""
    from diloco.data.prepare import resolve
    from diloco.training.prepare import prepare_run
    from diloco.training.records.runs import CONFIG_FILE, read_asked

    if (config.directory / "summary.json").exists():
        return None
    try:
        text = resolve(config.data)
    except (DilocoError, OSError) as error:  # a text or a library that may be here later
        return {"failed": str(error), "is_final": False}
    try:
        is_resumed = (config.directory / CONFIG_FILE).exists()
        if is_resumed:  # the same text may have another name by now
            asked = read_asked(config.directory)
            asked = replace(asked, data=replace(asked.data, prepared=text))
        else:
            asked = prepare_run(config)
        sizes = asked.num_replicas, asked.processes_per_replica
        launch(_train, *sizes, asked, is_resumed, imports=slow_imports(asked))
    except Exception as error:
        if exit_code_of(error) is None:
            raise
        return {"failed": str(error), "is_final": _is_final(error)}
    return None


def _is_final(error: Exception) -> bool:
    """True if the run would fail again; not if the setting at fault is one of this machine."""
    at_fault = next(iter(getattr(error, "fields", ())), None)
    # A smaller micro_batch is the remedy for a lack of memory, which other programs may have taken.
    of_the_machine = {*fields_with(TrainConfig, "incidental"), "device", "micro_batch"}
    return exit_code_of(error) == UserError.exit_code and at_fault not in of_the_machine


def _train(config: TrainConfig, resume: bool) -> None:
    """Train in one process of the run."""
    from diloco.errors import CheckpointError
    from diloco.training.loop import train

    try:
        train(config, resume=resume)
    except CheckpointError as error:  # not final: its message names a file to delete
        raise OSError(str(error)) from error


def _evaluate(job: Job) -> dict[str, Any]:
    """The results of a finished run, with the evaluations that are still asked for."""
    from diloco.data.prepare import resolve
    from diloco.training.records.finished import Parameters, evaluate_run
    from diloco.training.records.metrics import read_metrics
    from diloco.training.records.summary import SUMMARY_FILE, Summary

    evaluated: dict[str, dict[str, float | None]] = {}
    try:
        for name in get_args(Parameters):
            is_new = job.key(name) in job.evaluated
            if is_new or (name == "outer" and job.tasks):
                scores = evaluate_run(
                    job.directory,
                    parameters=name,
                    at_step=job.at_step,
                    tasks=job.tasks,
                    held_out=is_new,
                    prepared=resolve(job.config.data),  # another place than the one that the run was trained from
                )
                evaluated |= {job.key(name, task): values for task, values in scores["tasks"].items()}
                if is_new:
                    evaluated[job.key(name)] = {k: v for k, v in scores.items() if k.startswith("eval_")}
        summary = read_json(job.directory / SUMMARY_FILE, Summary, most_bytes=1 << 20)
        metrics = read_metrics(job.directory, 0)
    except Exception as error:
        if exit_code_of(error) is None:
            raise
        return {"failed": str(error), "is_final": False}
    outer_steps = [asdict(outer_step) for step in metrics for outer_step in step.outer_steps]
    losses = {str(step.step): step.eval_loss for step in metrics if step.eval_loss is not None}
    return {"summary": asdict(summary), "evaluated": evaluated, "outer_steps": outer_steps, "eval_losses": losses}
