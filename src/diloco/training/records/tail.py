"""Runs whose files grow while they are read."""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from diloco.errors import FileError, UserError
from diloco.schedule import Schedule
from diloco.schema import decoded, read_json
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import engine_settings
from diloco.training.config.resolve import check_model
from diloco.training.records.metrics import StepMetrics, metrics_file
from diloco.training.records.runs import CONFIG_FILE, read_config
from diloco.training.records.summary import SUMMARY_FILE, Summary

MOST_BINS = 256
"""Points of a curve, at the most."""


_BYTES_A_LOOK = 4 << 20
"""The most that a look reads of one file; the next look reads on."""


_RECENT_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Consecutive steps of a replica, added up."""

    num_steps: int
    tokens: int
    """Tokens of all replicas after the last of these steps."""
    new_tokens: int
    """Tokens of all replicas in these steps; those of the first line are not known."""
    timed_seconds: float
    """Time of the steps whose `new_tokens` are known."""
    seconds: float
    blocked_seconds: float
    loss: float
    """Sum of the losses of the steps."""
    bytes_sent: int
    bytes_received: int
    eval_loss: float
    """Sum of the held-out losses of the evaluations."""
    num_evals: int

    def plus(self, other: "Bin") -> "Bin":
        """These steps and those of the next bin."""
        sums = {name: value + getattr(self, name) for name, value in vars(other).items()}
        return Bin(**(sums | {"tokens": other.tokens}))


class ReplicaFollower:
    """A replica's metrics: curves of at most `MOST_BINS` points, and the last steps.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset, self._num_lines, self._steps_a_bin = inode, 0, 0, 1
        self.bins: list[Bin] = []
        self.recent: deque[StepMetrics] = deque(maxlen=_RECENT_STEPS)
        self.loss = 0.0
        """Exponential mean of the training loss over some ten steps."""
        self.evaluated: StepMetrics | None = None
        """The last step with a held-out loss."""
        self.bytes_sent = self.bytes_received = 0
        self.seconds = self.blocked_seconds = 0.0
        self.merged: dict[int, int] = {}
        """For each fragment, the step after which what was merged last had been sent."""
        self.changed = 0.0
        """Time at which the file was written last, in seconds since the epoch."""
        self.is_behind = False
        """Whether there is more to read than a look takes."""

    @property
    def last(self) -> StepMetrics | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all replicas at this one's pace, in the last steps; None before the second step."""
        seconds = (
            sum(step.step_seconds for step in self.recent) - self.recent[0].step_seconds if self.recent else 0.0
        )
        return (self.recent[-1].tokens - self.recent[0].tokens) / seconds if seconds > 0 else None

    def again(self) -> None:
        """Read the complete lines that were appended; all, if a resume has written the file anew.

        Raises:
            FileError: if the file can't be read, or a line is damaged.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin(status.st_ino)
                self.changed = status.st_mtime
                file.seek(self._offset)
                content = file.read(_BYTES_A_LOOK)
                self.is_behind = len(content) == _BYTES_A_LOOK
        except FileNotFoundError:
            self._begin(None)
            return
        except OSError as error:
            raise FileError(f"{self._path} can't be read: {error.strerror or error}") from error
        end = content.rfind(b"\n") + 1
        if not end and len(content) == _BYTES_A_LOOK:
            raise FileError(f"{self._path} can't be read: it has a line of more than {_BYTES_A_LOOK:,} bytes")
        for line in content[:end].split(b"\n")[:-1]:
            self._add(decoded(line, StepMetrics, source=f"{self._path}, line {self._num_lines + 1},"))
            self._offset += len(line) + 1
            self._num_lines += 1

    def _add(self, step: StepMetrics) -> None:
        before = self.last
        self.loss = 0.9 * self.loss + 0.1 * step.loss if before else step.loss
        self.recent.append(step)
        if step.eval_loss is not None:
            self.evaluated = step
        self.bytes_sent += step.bytes_sent
        self.bytes_received += step.bytes_received
        self.seconds += step.step_seconds
        self.blocked_seconds += step.blocked_seconds
        for outer_step in step.outer_steps:
            self.merged[outer_step.fragment] = outer_step.sent_step
        one = Bin(
            num_steps=1,
            tokens=step.tokens,
            new_tokens=step.tokens - before.tokens if before else 0,
            timed_seconds=step.step_seconds if before else 0.0,
            seconds=step.step_seconds,
            blocked_seconds=step.blocked_seconds,
            loss=step.loss,
            bytes_sent=step.bytes_sent,
            bytes_received=step.bytes_received,
            eval_loss=step.eval_loss or 0.0,
            num_evals=0 if step.eval_loss is None else 1,
        )
        if self.bins and self.bins[-1].num_steps < self._steps_a_bin:
            self.bins[-1] = self.bins[-1].plus(one)
        else:
            self.bins.append(one)
        if len(self.bins) > MOST_BINS:
            self._steps_a_bin *= 2
            pairs = zip_longest(self.bins[::2], self.bins[1::2])
            self.bins = [first if second is None else first.plus(second) for first, second in pairs]


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
