"""The mean training loss of all replicas, which travels beside the outer gradients: 8 bytes a sync."""

import struct
from dataclasses import dataclass

import torch

from diloco.exchange.transport import Channel, Pending, Tag, Transport
from diloco.schema import Count


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
