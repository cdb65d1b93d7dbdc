"""Trackers of experiments behind one interface: TensorBoard, Weights & Biases, and MLflow.

Each replica is a run of the tracker, and all replicas of a training run are one group there. A library is imported
when its tracker is made. Nothing is sent anywhere but by the library's own settings: WANDB_MODE=offline keeps
Weights & Biases on disk; MLflow writes to a database in the run's directory unless MLFLOW_TRACKING_URI is set.
"""

import fcntl
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from diloco.errors import UserError
from diloco.files import make_directory, require, requiring, write_atomically, writing

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Hyperparameters = Mapping[str, str | int | float | bool]


class Tracker(Protocol):
    """A place where the numbers of one replica are kept, step by step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep numbers by name; steps do not decrease."""
        ...

    def close(self) -> None:
        """Write out everything; nothing is logged after that."""
        ...


def tracker(
    name: TrackerName, *, run: str, replica: int, hparams: Hyperparameters, directory: Path, after_step: int = 0
) -> Tracker:
    """Open a tracker for one replica.

    Args:
        name: tensorboard, wandb or mlflow.
        run: the name of the training run, the same for all replicas: the group of its replicas.
        replica: from 0.
        hparams: the run's settings.
        directory: where the tracker keeps its files, and the id by which a resume finds its run again.
        after_step: the step that the replica goes on from; 0 begins a new run of the tracker.

    Raises:
        UserError: if the library is not installed, or refuses to start.
    """
    classes: dict[str, Callable[..., Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
    }
    if name not in classes:
        raise UserError(f"there is no tracker {name!r}: take {', '.join(classes)}", "trackers")
    return classes[name](run, replica, hparams, directory, after_step)


def check_installed(name: TrackerName) -> None:
    """Refuse a tracker whose library is not installed.

    Raises:
        UserError: naming the extra that installs it.
    """
    modules = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
    for module in modules.get(name, ()):
        require(module, extra=name)


class TensorBoard:
    """Curves in `directory/tensorboard/replica-{replica}`."""

    def __init__(
        self, run: str, replica: int, hparams: Hyperparameters, directory: Path, after_step: int = 0
    ) -> None:
        with requiring("tensorboard", extra="train"):
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams as summaries_of

        where = directory / "tensorboard" / f"replica-{replica}"
        self._where = where
        with writing(where):
            self._curves = SummaryWriter(str(where), purge_step=after_step + 1)
        if hparams and not after_step:
            # Not by add_hparams, which begins another directory.
            for summary in summaries_of(dict(hparams), {}):
                self._curves._get_file_writer().add_summary(summary)  # pyrefly: ignore[missing-attribute]

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        with writing(self._where):
            for name, value in values.items():
                self._curves.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out the curves."""
        with writing(self._where):
            self._curves.close()


class WeightsAndBiases:
    """A run of the group `run` in the project WANDB_PROJECT, or else "diloco"."""

    def __init__(
        self, run: str, replica: int, hparams: Hyperparameters, directory: Path, after_step: int = 0
    ) -> None:
        check_installed("wandb")
        import wandb

        id_file = directory / "trackers" / f"wandb-replica-{replica}"
        make_directory(id_file.parent)  # wandb writes elsewhere if the directory is missing
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "diloco"),
                group=run,
                name=f"{run}-replica-{replica}",
                id=_kept_id(id_file) if after_step else None,
                resume="allow",
                reinit="create_new",
                dir=directory,
                config={**hparams, "replica": replica},
                settings=wandb.Settings(console="off", finish_timeout=_SECONDS_TO_FINISH),
            )
        except wandb.Error as error:
            raise UserError(
                f"wandb can't start ({error}): log in with `wandb login`, or set WANDB_MODE=offline",
                "trackers",
            ) from error
        _keep_id(id_file, self._run.id)
        self._is_lost = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a step; steps that an earlier part of the run has sent already are left out."""
        self._ask(self._run.log, dict(values), step=step)

    def close(self) -> None:
        """Wait for the upload, 10 minutes at the most; what is left stays on disk for `wandb sync`."""
        self._ask(self._run.finish)

    def _ask(self, request: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Make a request of wandb's own process, whose end is no end of training."""
        if self._is_lost:
            return
        try:
            request(*arguments, **options)
        except Exception as error:  # of any class
            self._is_lost = True
            warnings.warn(f"wandb has lost the rest of the curves: {_first_line(error)}", stacklevel=3)


class MLflow:
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, or else "diloco", with the tag `diloco.run`.

    Without MLFLOW_TRACKING_URI the replicas of a machine share the database `directory/mlflow.db`.
    """

    def __init__(
        self, run: str, replica: int, hparams: Hyperparameters, directory: Path, after_step: int = 0
    ) -> None:
        check_installed("mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        id_file = directory / "trackers" / f"mlflow-replica-{replica}"
        kept_id = _kept_id(id_file) if after_step else None
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(directory / 'mlflow.db').resolve()}"
        make_directory(id_file.parent)
        with (id_file.parent / "mlflow.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes can't make the tables of one database
            try:
                self._client = MlflowClient(tracking_uri=uri)
                if kept_id is None:
                    name, tags = f"{run}-replica-{replica}", {"diloco.run": run, "diloco.replica": str(replica)}
                    made = self._client.create_run(self._experiment(directory), tags=tags, run_name=name)
                    self._id: str = made.info.run_id
                    params = [Param(name, str(value)) for name, value in hparams.items()]
                    for first in range(0, len(params), _MOST_AT_ONCE):
                        self._client.log_batch(self._id, params=params[first : first + _MOST_AT_ONCE])
                else:
                    self._id = kept_id
                    self._client.update_run(kept_id, status="RUNNING")
            except Exception as error:
                # Not with the address, which may hold a password.
                raise UserError(
                    f"mlflow can't start ({_first_line(error)}): set MLFLOW_TRACKING_URI", "trackers"
                ) from error
        _keep_id(id_file, self._id)
        self._queue: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._writer = threading.Thread(target=self._write, name="mlflow", daemon=True)
        self._writer.start()

    def _experiment(self, directory: Path) -> str:
        """The id of the experiment, which another replica may be making now."""
        name, artifacts = os.environ.get("MLFLOW_EXPERIMENT_NAME", "diloco"), None
        if "MLFLOW_TRACKING_URI" not in os.environ:
            artifacts = (directory / "mlflow-artifacts").resolve().as_uri()
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return experiment.experiment_id
        try:
            return self._client.create_experiment(name, artifact_location=artifacts)
        except Exception:
            if (experiment := self._client.get_experiment_by_name(name)) is None:
                raise
            return experiment.experiment_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a step."""
        now = int(time.time() * 1000)
        self._queue.put([self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """Wait until what is queued has been written, 10 minutes at the most, and end the run."""
        self._queue.put(None)
        self._writer.join(_SECONDS_TO_FINISH)
        # Training is over, and its results are worth more than its curves.
        if self._writer.is_alive():
            warnings.warn("mlflow has lost the end of the curves: its server does not answer", stacklevel=2)
        elif self._error is not None:
            warnings.warn(f"mlflow has lost a part of the curves: {_first_line(self._error)}", stacklevel=2)

    def _write(self) -> None:
        """Write what is queued, many steps in a request, until `close`."""
        is_over = False
        while not is_over:
            metrics = list[Any]()
            while not metrics or (len(metrics) < _MOST_METRICS_AT_ONCE and not self._queue.empty()):
                if is_over := (step := self._queue.get()) is None:
                    break
                metrics += step
            try:
                self._client.log_batch(self._id, metrics=metrics)
                if is_over:
                    self._client.set_terminated(self._id)
            except Exception as error:  # of any class; what comes later may arrive
                self._error = error


_SECONDS_TO_FINISH = 600.0
_MOST_AT_ONCE = 100
_MOST_METRICS_AT_ONCE = 500


def _kept_id(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _keep_id(path: Path, id: str) -> None:
    write_atomically(path, [id.encode()])


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
