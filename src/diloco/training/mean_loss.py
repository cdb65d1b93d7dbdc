"""The mean training loss of all replicas, which travels beside the outer gradients: 8 bytes a sync."""

import struct

import torch

from diloco.exchange.transport import Channel, Pending, Tag, Transport


class MeanLoss:
    """The losses since the last sync, averaged over the replicas.

    A replica's loss is sent right behind the payloads of a sync, and read when these are merged: it has come then,
    or comes at once.

    Args:
        transport: the exchange of the payloads.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._total, self._num_losses = 0.0, 0
        self._sent: dict[int, tuple[float, Pending]] = {}

    def add(self, loss: float) -> None:
        """Count the loss of a step."""
        self._total, self._num_losses = self._total + loss, self._num_losses + 1

    def send(self, step: int) -> None:
        """Start to exchange the mean of the losses since the last call; every replica calls it after this step."""
        own, self._total, self._num_losses = self._total / self._num_losses, 0.0, 0
        message = torch.frombuffer(bytearray(struct.pack("<d", own)), dtype=torch.uint8)
        others = {m: message for m in range(self._transport.num_replicas) if m != self._transport.replica}
        self._sent[step] = own, self._transport.start(others, Tag(Channel.LOSS, round=step, step=step))

    def receive(self, step: int) -> float | None:
        """The mean over all replicas of what was sent last up to a step; None if nothing was since the last call.

        Raises:
            ExchangeError: if a replica's does not come.
        """
        mean = None
        for sent in [sent for sent in self._sent if sent <= step]:
            own, pending = self._sent.pop(sent)
            theirs = [struct.unpack("<d", message.numpy().tobytes())[0] for message in pending.wait().values()]
            mean = (own + sum(theirs)) / (1 + len(theirs))
        return mean
