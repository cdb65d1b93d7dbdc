"""A run's directory that is looked at again and again, from before its first step to after its last."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from diloco.errors import UserError
from diloco.schedule import Schedule
from diloco.schema import read_json
from diloco.training.config import TrainConfig
from diloco.training.engine_settings import engine_settings
from diloco.training.metrics import StepMetrics, metrics_file
from diloco.training.metrics_follower import ReplicaFollower
from diloco.training.runs import CONFIG_FILE, read_config
from diloco.training.sizes import check_model
from diloco.training.summary import SUMMARY_FILE, Summary

_SILENT_SECONDS = 60.0
_SILENT_STEPS = 20
"""Seconds, and steps, of which the longer time must pass before a run is called silent."""


class RunFollower:
    """A run, which may begin later.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: TrainConfig | None = None
        """The run's config; None before the run has begun."""
        self.replicas: dict[int, ReplicaFollower] = {}
        """The replicas whose metrics are on this machine, by number."""
        self.summary: Summary | None = None
        """The run's summary; None before it is finished."""
        self.trouble = ""
        """The reason why the last look could not read the directory."""
        self._schedule: Schedule | None = None
        self._stamp: tuple[int, int] | None = None

    def again(self) -> None:
        """Look at the directory; what can't be read becomes `trouble`."""
        self.trouble = ""
        try:
            self._look()
        except UserError as error:
            self.trouble = str(error)
        except OSError as error:
            self.trouble = f"{self.directory} can't be read: {error.strerror or error}"

    def _look(self) -> None:
        stamp = _stamp(self.directory / CONFIG_FILE)
        if stamp != self._stamp:
            self.config, self.replicas, self.summary, self._schedule, self._stamp = None, {}, None, None, None
            if stamp is not None:
                config = read_config(self.directory)
                self._schedule, self.config, self._stamp = schedule_of(config), config, stamp
        if self.config is None:
            return
        summary = self.directory / SUMMARY_FILE
        self.summary = read_json(summary, Summary, most_bytes=1 << 20) if summary.exists() else None
        for replica in range(self.config.num_local_replicas):
            path = metrics_file(self.directory, replica)
            if replica not in self.replicas and path.exists():
                self.replicas[replica] = ReplicaFollower(path)
        for follower in self.replicas.values():
            follower.again()

    @property
    def started(self) -> list[ReplicaFollower]:
        """The replicas that have taken a step, by number."""
        return [self.replicas[replica] for replica in sorted(self.replicas) if self.replicas[replica].last]

    @property
    def last(self) -> StepMetrics | None:
        """The newest step of any replica."""
        return max((one.last for one in self.started if one.last), key=lambda step: step.step, default=None)

    @property
    def loss(self) -> float | None:
        """Training loss, the mean over the replicas."""
        return _mean([one.loss for one in self.started])

    @property
    def eval_loss(self) -> float | None:
        """The run's held-out loss, or the last one, the mean over the replicas' shares of the text."""
        if self.summary is not None:
            return self.summary.eval_loss
        return _mean(
            [loss for one in self.started if one.evaluated and (loss := one.evaluated.eval_loss) is not None]
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all replicas, at their mean pace in the last steps."""
        return _mean([speed for one in self.started if (speed := one.tokens_per_second) is not None])

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than a look takes."""
        return not self.trouble and any(one.is_behind for one in self.replicas.values())

    @property
    def part(self) -> float:
        """The share of the run that is over."""
        if self.summary is not None:
            return 1.0
        return min(1.0, self.last.tokens / self.config.num_tokens) if self.config and self.last else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time to the last step; None if it is not known."""
        speed = self.tokens_per_second
        if self.config is None or self.last is None or self.summary is not None or not speed:
            return None
        return max(0, self.config.num_tokens - self.last.tokens) / speed

    @property
    def standing(self) -> str:
        """The state of the run in a few words."""
        if self.trouble:
            return self.trouble
        if self.config is None:
            return "not begun"
        if self.summary is not None:
            return "finished"
        if self.last is None:
            return "begun, no step yet"
        age = time.time() - max(one.changed for one in self.started)
        is_silent = age > max(_SILENT_SECONDS, _SILENT_STEPS * self.last.step_seconds)
        return f"silent for {age:.0f} s" if is_silent else "running"

    def in_flight(self) -> dict[int, dict[int, int]]:
        """For each replica the fragments that it has sent and not merged since, with the steps of sending.

        It is empty where replicas come and go: they send when others do, and their metrics don't say what.
        """
        config = self.config
        if self._schedule is None or self.summary is not None or config is None:
            return {}
        if config.num_replicas == 1 or config.rendezvous is not None:
            return {}
        flights = {}
        for replica, follower in sorted(self.replicas.items()):
            step = follower.last.step if follower.last else 0
            sent = {
                p: self._schedule.send_step(p, count)
                for p in range(self._schedule.num_fragments)
                if (count := self._schedule.num_sent(p, step))
            }
            flights[replica] = {p: at for p, at in sent.items() if follower.merged.get(p, 0) < at}
        return flights


def schedule_of(config: TrainConfig) -> Schedule | None:
    """The steps at which a run's fragments are sent; None for Data-Parallel.

    Raises:
        UserError: for settings that the engine refuses, or a model that no machine can hold.
    """
    if config.method == "data_parallel":
        return None
    check_model(config.model, here=False)
    with torch.device("meta"):
        model = config.model.build(seed=config.seed)
    return engine_settings(config, model).schedule


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when a file is written anew; None if it is not there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
