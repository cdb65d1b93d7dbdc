"""A replica's metrics while they are written: each look reads what was appended, and bounded memory holds it."""

import os
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from diloco.errors import FileError
from diloco.schema import decoded
from diloco.training.metrics import StepMetrics

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
