"""A run's files while they grow: each look reads the lines that were appended, and bounded memory holds them.

Times and bytes of a run are those of its first replica on this machine, as in its summary.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Generic, Self, TypeVar

import torch

from diloco.errors import FileError, UserError
from diloco.rendezvous.log.run import LOSS_TAIL
from diloco.schedule import Schedule
from diloco.schema import decoded, read_json
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import engine_settings
from diloco.training.config.resolve import TextFacts, check_model
from diloco.training.records.metrics import OuterStepMetrics, StepMetrics, metrics_file
from diloco.training.records.runs import CONFIG_FILE, RunLock, lock_of, read_config, text_at_start
from diloco.training.records.summary import SUMMARY_FILE, Summary

MOST_BINS = 256
"""Points of a curve, at the most."""
_BYTES_A_LOOK = 4 << 20
"""The most that a look reads of one file; the next look reads on."""
_RECENT_STEPS = 50
LOSS_MEANING = f"mean of the last {100 // LOSS_TAIL} % of steps"
"""The definition of the training loss, which is named where it is shown."""
_SILENT_SECONDS = 60.0
_SILENT_STEPS = 20
"""Seconds, and steps, of which the longer time must pass before a run is called silent."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Consecutive items, added up."""

    last: int
    """The place of the last one, which is not added."""

    def plus(self, other: Self) -> Self:
        """These items and those of the next bin."""
        sums = {name: value + getattr(self, name) for name, value in vars(other).items()}
        return type(self)(**(sums | {"last": other.last}))


@dataclass(frozen=True, kw_only=True)
class Bin(_Sums):
    """Consecutive steps of a replica; their place is the number of tokens of all replicas after them."""

    num_steps: int
    new_tokens: int
    """Tokens of all replicas in these steps, as far as they are known."""
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


@dataclass(frozen=True, kw_only=True)
class OuterBin(_Sums):
    """Consecutive outer steps of a fragment; their place is the step after which they were sent."""

    norm: float
    """Sum of the norms of the mean outer gradients."""
    num_norms: int
    cosine: float
    """Sum of the mean cosines between the replicas' outer gradients."""
    num_cosines: int
    successive_cosine: float
    """Sum of the cosines between a mean outer gradient and the one before."""
    num_successive_cosines: int
    gain: float
    """Sum of the gains."""
    num_gains: int


_AnyBin = TypeVar("_AnyBin", bound=_Sums)


class Bins(Generic[_AnyBin]):
    """At most `MOST_BINS` bins of equal numbers of steps; the last one may hold fewer."""

    def __init__(self) -> None:
        self.bins: list[_AnyBin] = []
        self._size, self._num_in_last = 1, 1

    def add(self, one: _AnyBin) -> None:
        """Add a step, as a bin of its own."""
        if self._num_in_last < self._size:
            self.bins[-1] = self.bins[-1].plus(one)
            self._num_in_last += 1
        else:
            self.bins.append(one)
            self._num_in_last = 1
        if len(self.bins) > MOST_BINS:
            self._size *= 2
            pairs = zip_longest(self.bins[::2], self.bins[1::2])
            self.bins = [first if second is None else first.plus(second) for first, second in pairs]


@dataclass(frozen=True)
class Merge:
    """A fragment that a replica sent, and merged later."""

    fragment: int
    sent_step: int
    merged_step: int


class ReplicaSteps:
    """The steps of a replica: their sums and last values, and curves of at most `MOST_BINS` points."""

    def __init__(self) -> None:
        self._bins = Bins[Bin]()
        self._outer: dict[int, Bins[OuterBin]] = {}
        self._recent: deque[StepMetrics] = deque(maxlen=_RECENT_STEPS)
        self._last_losses: deque[float] = deque()
        self.evaluated: StepMetrics | None = None
        """The last step with a held-out loss."""
        self.num_steps = self.bytes_sent = self.bytes_received = 0
        self.seconds = self.blocked_seconds = 0.0
        self.merged: dict[int, int] = {}
        """For each fragment, the step after which the outer gradient merged last had been sent."""
        self.first_merges: list[Merge] = []
        """The first merges, `MOST_BINS` at the most."""

    def add(self, step: StepMetrics) -> None:
        """Add the step that follows."""
        self._recent.append(step)
        self._last_losses.append(step.loss)
        while len(self._last_losses) > max(1, step.step // LOSS_TAIL):
            self._last_losses.popleft()
        if step.eval_loss is not None:
            self.evaluated = step
        self.num_steps += 1
        self.bytes_sent += step.bytes_sent
        self.bytes_received += step.bytes_received
        self.seconds += step.step_seconds
        self.blocked_seconds += step.blocked_seconds
        for outer_step in step.outer_steps:
            self._merge(outer_step, step.step)
        self._bins.add(
            Bin(
                last=step.tokens,
                num_steps=1,
                new_tokens=step.new_tokens or 0,
                timed_seconds=0.0 if step.new_tokens is None else step.step_seconds,
                seconds=step.step_seconds,
                blocked_seconds=step.blocked_seconds,
                loss=step.loss,
                bytes_sent=step.bytes_sent,
                bytes_received=step.bytes_received,
                eval_loss=step.eval_loss or 0.0,
                num_evals=0 if step.eval_loss is None else 1,
            )
        )

    def _merge(self, outer: OuterStepMetrics, merged_step: int) -> None:
        """Count an outer step that was merged."""
        self.merged[outer.fragment] = outer.sent_step
        if len(self.first_merges) < MOST_BINS:
            self.first_merges.append(Merge(outer.fragment, outer.sent_step, merged_step))
        self._outer.setdefault(outer.fragment, Bins[OuterBin]()).add(
            OuterBin(
                last=outer.sent_step,
                norm=outer.outer_gradient_norm or 0.0,
                num_norms=0 if outer.outer_gradient_norm is None else 1,
                cosine=outer.cosine or 0.0,
                num_cosines=0 if outer.cosine is None else 1,
                successive_cosine=outer.successive_cosine or 0.0,
                num_successive_cosines=0 if outer.successive_cosine is None else 1,
                gain=outer.gain or 0.0,
                num_gains=0 if outer.gain is None else 1,
            )
        )

    @property
    def last(self) -> StepMetrics | None:
        """The last step."""
        return self._recent[-1] if self._recent else None

    @property
    def bins(self) -> list[Bin]:
        """All steps, in their order."""
        return self._bins.bins

    @property
    def outer_bins(self) -> dict[int, list[OuterBin]]:
        """All outer steps by fragment, in their order."""
        return {fragment: self._outer[fragment].bins for fragment in sorted(self._outer)}

    @property
    def loss(self) -> float:
        """Training loss: the mean over the last 5 % of the steps, at least over one."""
        return sum(self._last_losses) / len(self._last_losses)

    @property
    def compute_utilization(self) -> float:
        """The share of the time of all steps in which training did not wait for other replicas."""
        return 1 - self.blocked_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all replicas at this one's mean pace; None as long as no step's tokens are known."""
        seconds = sum(one.timed_seconds for one in self.bins)
        return sum(one.new_tokens for one in self.bins) / seconds if seconds else None

    def seconds_for(self, num_tokens: int) -> float | None:
        """The time that tokens of all replicas take at this one's pace in the last steps, if it is known."""
        timed = [step for step in self._recent if step.new_tokens is not None]
        timed = timed[1:] or timed  # a process's first step takes longer
        seconds = sum(step.step_seconds for step in timed)
        pace = sum(step.new_tokens or 0 for step in timed) / seconds if seconds else None
        return num_tokens / pace if pace else None


class ReplicaTail:
    """A replica's metrics file while it grows.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.steps = ReplicaSteps()
        """The steps that were read."""
        self.changed = 0.0
        """Time at which the file was written last, in seconds since the epoch."""
        self.is_behind = False
        """True if there is more to read than a look takes."""

    def look(self) -> None:
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
            source = f"{self._path}, line {self.steps.num_steps + 1},"
            self.steps.add(decoded(line, StepMetrics, source=source))
            self._offset += len(line) + 1

    def read(self) -> ReplicaSteps:
        """All steps of the file as it is now; raises as `look`."""
        self.look()
        while self.is_behind:
            self.look()
        return self.steps


class RunTail:
    """A run's directory while it grows, from before the run's first step to after its last.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: TrainConfig | None = None
        """The run's config; None before the run has begun."""
        self.text: TextFacts | None = None
        """The facts of the text that the run was started on; None before the run has begun."""
        self.summary: Summary | None = None
        """The run's summary; None before it is finished."""
        self.trouble = ""
        """The reason why the last look could not read the directory."""
        self._tails: dict[int, ReplicaTail] = {}
        self._schedule: Schedule | None = None
        self._stamp: tuple[int, int] | None = None
        self._lock = RunLock(is_held=None)

    def again(self) -> None:
        """Look at the directory; an error becomes `trouble`."""
        self.trouble = ""
        try:
            self._look()
        except UserError as error:
            self.trouble = str(error)
        except OSError as error:
            self.trouble = f"{self.directory} can't be read: {error.strerror or error}"

    def read(self) -> None:
        """Read the whole run as it is now.

        Raises:
            UserError: if the directory holds no run, or one that has taken no step.
            FileError: if one of its files is damaged.
        """
        self._look()
        while self.is_behind:
            self._look()
        if self.config is None:
            read_config(self.directory)
        if self.last is None:
            raise UserError(f"{self.directory} has no metrics of any step yet")

    def _look(self) -> None:
        """Read what the files have gained."""
        stamp = _stamp(self.directory / CONFIG_FILE)
        if stamp != self._stamp:
            self.config, self.text, self._tails, self.summary = None, None, {}, None
            self._schedule, self._stamp = None, None
            if stamp is not None:
                config = read_config(self.directory)
                text = text_at_start(self.directory)
                self._schedule, self.config, self.text, self._stamp = _schedule_of(config), config, text, stamp
        if self.config is None:
            return
        self._lock = lock_of(self.directory)  # before the summary, which is written before the lock is dropped
        summary = self.directory / SUMMARY_FILE
        self.summary = read_json(summary, Summary, most_bytes=1 << 20) if summary.exists() else None
        for replica in range(self.config.num_local_replicas):
            if replica not in self._tails and metrics_file(self.directory, replica).exists():
                self._tails[replica] = ReplicaTail(metrics_file(self.directory, replica))
        for tail in self._tails.values():
            tail.look()

    @property
    def replicas(self) -> dict[int, ReplicaSteps]:
        """The replicas that have taken a step on this machine, by number."""
        return {m: self._tails[m].steps for m in sorted(self._tails) if self._tails[m].steps.last}

    @property
    def first(self) -> ReplicaSteps:
        """The first of `replicas`, of which there must be one: the run's times and bytes are this replica's."""
        return next(iter(self.replicas.values()))

    @property
    def last(self) -> StepMetrics | None:
        """The newest step of any replica."""
        steps = [one.last for one in self.replicas.values() if one.last]
        return max(steps, key=lambda step: step.step, default=None)

    @property
    def loss(self) -> float | None:
        """Training loss, the mean over all replicas of a finished run, and over those on this machine before."""
        if self.summary is not None and self.summary.training_loss is not None:
            return self.summary.training_loss
        return _mean([one.loss for one in self.replicas.values()])

    @property
    def compute_utilization(self) -> float | None:
        """Compute utilization, the mean over the same replicas."""
        if self.summary is not None:
            return self.summary.compute_utilization
        return _mean([one.compute_utilization for one in self.replicas.values()])

    @property
    def eval_loss(self) -> float | None:
        """The run's held-out loss, or the last one, the mean over the replicas' shares of the text."""
        if self.summary is not None:
            return self.summary.eval_loss
        evaluated = [one.evaluated.eval_loss for one in self.replicas.values() if one.evaluated]
        return _mean([loss for loss in evaluated if loss is not None])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all replicas at the first one's mean pace, by its metrics; without those by the summary."""
        speed = self.first.tokens_per_second if self.replicas else None
        return speed or (self.summary.tokens_per_second or None if self.summary is not None else None)

    @property
    def is_behind(self) -> bool:
        """True if there is more to read than a look takes."""
        return not self.trouble and any(tail.is_behind for tail in self._tails.values())

    @property
    def part(self) -> float:
        """The share of the run that is over."""
        if self.summary is not None:
            return 1.0
        return min(1.0, self.last.tokens / self.config.num_tokens) if self.config and self.last else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time to the last step; None if it is not known."""
        if self.config is None or self.last is None or self.summary is not None:
            return None
        return self.first.seconds_for(max(0, self.config.num_tokens - self.last.tokens))

    @property
    def standing(self) -> str:
        """The state of the run in a few words."""
        if self.trouble:
            return self.trouble
        if self.config is None:
            return "not begun"
        if self.summary is not None:
            return "finished"
        if self.is_stopped:
            return "stopped"
        if self.last is None:
            return "begun, no step yet"
        if not self._is_silent:
            return "running"
        return "all steps are taken" if self.is_over else f"silent for {self._age_seconds:.0f} s"

    @property
    def _age_seconds(self) -> float:
        """Time since the last step."""
        return time.time() - max(tail.changed for tail in self._tails.values() if tail.steps.last)

    @property
    def _is_silent(self) -> bool:
        """True if steps take longer than they did, by far."""
        last = self.last
        return last is not None and self._age_seconds > max(_SILENT_SECONDS, _SILENT_STEPS * last.step_seconds)

    @property
    def is_stopped(self) -> bool:
        """True if the run has ended before its end: no process holds its lock."""
        return self.config is not None and self.summary is None and self._lock.is_held is False

    @property
    def is_over(self) -> bool:
        """True if nothing more is to come: the run is finished or stopped.

        A machine without replica 0 has neither summary nor lock: there it is over some time after the last step.
        """
        is_over_here = self._lock.is_held is None and self.part == 1 and self._is_silent
        return not self.trouble and (self.summary is not None or self.is_stopped or is_over_here)

    @property
    def ending(self) -> str:
        """The end of a stopped run and the command to go on with, as far as that is known; else empty."""
        how = self._lock.how if self.is_stopped else ""
        return "; ".join(filter(None, (how, self._lock.hint))) if how else ""

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
        for replica, tail in sorted(self._tails.items()):
            step = tail.steps.last.step if tail.steps.last else 0
            sent = {
                p: self._schedule.send_step(p, count)
                for p in range(self._schedule.num_fragments)
                if (count := self._schedule.num_sent(p, step))
            }
            flights[replica] = {p: at for p, at in sent.items() if tail.steps.merged.get(p, 0) < at}
        return flights


def _schedule_of(config: TrainConfig) -> Schedule | None:
    """The steps at which a run's fragments are sent; None for Data-Parallel.

    Raises:
        UserError: for settings that the engine refuses, or a model that no machine can hold.
    """
    if config.method == "data_parallel":
        return None
    check_model(config.model, here=False)
    with torch.device("meta"):
        model = config.model.build(seed=config.seed)
    return engine_settings(config.diloco, model, seed=config.seed).schedule


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when a file is written anew; None if it is not there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
