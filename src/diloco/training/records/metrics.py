"""The metrics of each step of a replica: `metrics-{replica}.jsonl`, and the same curves for trackers."""

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from diloco.errors import FileError
from diloco.exchange.transport import Channel, Pending, Tag, Transport
from diloco.files import write_atomically, writing
from diloco.integrations.trackers import Tracker
from diloco.outer.step import OuterStep
from diloco.schema import Count, Seconds, decoded, read_bytes


@dataclass(frozen=True, kw_only=True)
class OuterStepMetrics:
    """One outer step of one replica."""

    fragment: Count
    """The fragment that was merged."""
    round: Count
    """The fragment's round, from 1."""
    sent_step: Count
    """The step after which the outer gradient was sent."""
    blocked_seconds: Seconds
    """Time in which training waited for it."""
    outer_gradient_norm: float | None
    """Norm of the mean outer gradient."""
    cosine: float | None
    """Mean cosine between the replicas' outer gradients; None if there is no pair."""
    successive_cosine: float | None = None
    """ρ, the cosine of this mean outer gradient and the one before; None for the first since a start or resume."""
    gain: float | None = None
    """The part of the outer step along the mean outer gradient, in that gradient: η (1 + μ/(1 − μρ))."""
    layer_cosine: Mapping[str, float | None] = field(default_factory=dict)
    """The same for each block, if it is logged."""
    contributors: Mapping[str, float] = field(default_factory=dict)
    """With a rendezvous, the replicas that were in it by name, and their weights, the largest of which is 1."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One inner step of one replica."""

    step: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    """t, from 1."""
    tokens: Count
    """Tokens that all replicas together have trained on so far."""
    new_tokens: Count | None = None
    """Tokens of all since the step before; None in a process's first step where replicas come and go."""
    loss: float
    """Cross-entropy of this replica's batch, nats per token."""
    learning_rate: float
    """Learning rate of the inner optimizer."""
    grad_norm: float
    """Gradient norm before clipping."""
    step_seconds: Annotated[float, msgspec.Meta(ge=1e-9, le=1e12)]
    """Time of the whole step, sync included."""
    blocked_seconds: Seconds
    """Time in which training waited for the network, a part of `step_seconds`."""
    bytes_sent: Count
    """Payload bytes sent in this step, each destination counted."""
    bytes_received: Count
    """Payload bytes that were merged in this step."""
    outer_steps: tuple[OuterStepMetrics, ...] = ()
    """The outer steps taken."""
    mean_loss: float | None = None
    """Mean loss of all replicas between two syncs, nats per token, where the second of them was merged."""
    engine: Mapping[str, float] = field(default_factory=dict)
    """The engine's `logs()`, once a round: when fragment 0 was merged."""
    model_flops_utilization: float | None = None
    """The model's operations over those that the GPU can do in `step_seconds`, if its speed is known (MFU)."""
    peak_memory_bytes: Count | None = None
    """The most memory of the GPU that tensors of this process have taken so far."""
    eval_loss: float | None = None
    """Held-out loss of the outer parameters, nats per token, if it was measured after this step."""


def describe(
    outer_step: OuterStep, *, log_layer_cosine: bool, names: Callable[[int], str] = str
) -> OuterStepMetrics:
    """The fragment, round, norm, cosines, gain and contributors of an outer step, by the names of the replicas."""
    blocks, cohort = outer_step.spans if log_layer_cosine else (), outer_step.cohort
    return OuterStepMetrics(
        fragment=outer_step.sync.fragment,
        round=outer_step.sync.round,
        sent_step=outer_step.sync.step,
        blocked_seconds=outer_step.blocked_seconds,
        outer_gradient_norm=outer_step.norm(),
        cosine=outer_step.mean_cosine(),
        successive_cosine=outer_step.successive_cosine(),
        gain=outer_step.gain(),
        layer_cosine={block: outer_step.mean_cosine(block) for block in blocks},
        contributors={names(m): w for m, w in zip(cohort.members, cohort.weights, strict=True)} if cohort else {},
    )


def read_metrics(run: Path, replica: int) -> list[StepMetrics]:
    """The steps of a replica's metrics, but for a last line that is incomplete; none if there is no file.

    Raises:
        FileError: if a line is damaged.
    """
    path = metrics_file(run, replica)
    return [
        decoded(line, StepMetrics, source=f"{path}, line {number},") for number, line in enumerate(_lines(path), 1)
    ]


def metrics_file(run: Path, replica: int) -> Path:
    """The file of a replica's metrics."""
    return run / f"metrics-{replica}.jsonl"


class MetricsLog:
    """Appends a line for each step to a replica's metrics; the line survives the process from then on.

    Args:
        run: the run's directory.
        replica: the replica's number.
        after_step: the last step to keep; lines after it, of a run that was interrupted, are dropped.
        trackers: where the curves go, too; closed with this log.

    Raises:
        FileError: if the metrics of an earlier part of the run are damaged.
        FileWriteError: if they can't be written.
    """

    def __init__(
        self,
        run: Path,
        replica: int,
        *,
        after_step: int,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._path = path = metrics_file(run, replica)
        steps = zip(_lines(path), read_metrics(run, replica), strict=True)
        write_atomically(path, [line.encode() for line, metrics in steps if metrics.step <= after_step])
        with writing(path):
            self._file = path.open("a", buffering=1, encoding="utf-8")
        self._trackers = trackers

    def write(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step."""
        values = asdict(metrics)
        written = {k: v for k, v in values.items() if v not in (None, (), {})}
        for outer_step in values["outer_steps"]:
            for name in ("successive_cosine", "gain", "layer_cosine", "contributors"):
                if outer_step[name] in (None, {}):
                    del outer_step[name]
        with writing(self._path):
            self._file.write(json.dumps(written) + "\n")
        apart = "step", "new_tokens"
        curves = {k: v for k, v in values.items() if isinstance(v, float | int) and k not in apart}
        if metrics.new_tokens is not None:
            curves["tokens_per_second"] = metrics.new_tokens / metrics.step_seconds
        curves |= {f"engine/{name}": value for name, value in metrics.engine.items()}
        for outer_step in metrics.outer_steps:
            for name in ("outer_gradient_norm", "cosine", "successive_cosine", "gain"):
                if (value := getattr(outer_step, name)) is not None:
                    curves[f"{name}/fragment_{outer_step.fragment}"] = value
        for tracker in self._trackers:
            tracker.log(curves, metrics.step)

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out what is buffered, and close the files."""
        with writing(self._path):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


_MOST_BYTES = 1 << 32
"""Size of the largest file that is read: some million steps."""


def _lines(path: Path) -> list[str]:
    """The complete lines of a file whose last line may be incomplete."""
    if not path.exists():
        return []
    content = read_bytes(path, most_bytes=_MOST_BYTES)
    try:
        text = content.decode()
    except ValueError as error:
        raise FileError(f"{path} can't be read: {error}") from error
    return [line + "\n" for line in text.split("\n")[:-1]]


@dataclass(frozen=True)
class MeanLossState:
    """The losses of one replica that a resume goes on with."""

    total: float
    """The sum of the losses since the last send."""
    num_losses: Count
    """Their number."""
    sent: tuple[tuple[Count, float], ...]
    """Step and own mean of the sends that some replica has not merged."""


class MeanLoss:
    """The losses since the last sync, averaged over the replicas.

    A replica's loss is sent right behind the payloads of a sync, and read when these are merged: it has come then,
    or comes at once.

    Args:
        transport: the exchange of the payloads.
        max_overlap: the largest τ of all replicas.
    """

    def __init__(self, transport: Transport, *, max_overlap: int) -> None:
        self._transport, self._max_overlap = transport, max_overlap
        self._total, self._num_losses = 0.0, 0
        self._own: dict[int, float] = {}
        self._in_flight: dict[int, tuple[float, Pending]] = {}

    def add(self, loss: float) -> None:
        """Count the loss of a step."""
        self._total, self._num_losses = self._total + loss, self._num_losses + 1

    def send(self, step: int) -> None:
        """Start to exchange the mean of the losses since the last call; every replica calls it after this step."""
        own, self._total, self._num_losses = self._total / self._num_losses, 0.0, 0
        self._own = dict(self.state(step).sent)
        self._start(step, own)

    def receive(self, step: int) -> float | None:
        """The mean over all replicas of what was sent last up to a step; None if nothing was since the last call.

        Raises:
            ExchangeError: if a replica's does not come.
        """
        mean = None
        for sent in [sent for sent in self._in_flight if sent <= step]:
            own, pending = self._in_flight.pop(sent)
            theirs = [struct.unpack("<d", message.numpy().tobytes())[0] for message in pending.wait().values()]
            mean = (own + sum(theirs)) / (1 + len(theirs))
        return mean

    def state(self, step: int) -> MeanLossState:
        """The state after a step, with what a slower replica still needs, like the payloads."""
        sent = tuple((sent, own) for sent, own in self._own.items() if sent > step - self._max_overlap)
        return MeanLossState(self._total, self._num_losses, sent)

    def restore(self, state: MeanLossState) -> None:
        """Take up a state, and send again what was in flight; every replica restores the same step."""
        self._total, self._num_losses = state.total, state.num_losses
        for step, own in state.sent:
            self._start(step, own)

    def _start(self, step: int, own: float) -> None:
        message = torch.frombuffer(bytearray(struct.pack("<d", own)), dtype=torch.uint8)
        others = {m: message for m in range(self._transport.num_replicas) if m != self._transport.replica}
        self._own[step] = own
        self._in_flight[step] = own, self._transport.start(others, Tag(Channel.LOSS, round=step, step=step))
