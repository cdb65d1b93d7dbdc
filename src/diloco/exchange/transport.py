"""The contract of every transport: flat uint8 tensors to and from each other replica.

Numbers live above this contract, sockets below it. A transport knows nothing of the meaning of its bytes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Channel(IntEnum):
    """The kinds of traffic between replicas; no two share a tag."""

    CONTROL = 0
    """Settings and other messages about the run."""
    PAYLOAD = 1
    """Outer gradients and their averages."""
    PROBE = 2
    """Measurements of the link."""
    LOSS = 3
    """Training losses, for logs."""


class Tag(NamedTuple):
    """The name of one exchange; every replica starts each tag once."""

    channel: Channel
    fragment: int = 0
    """Index of the fragment, from 0."""
    round: int = 0
    """The number of this use of the fragment, or of the channel, from 1."""
    phase: int = 0
    """The leg of an exchange that has several, 0 or 1."""
    shard: int = 0
    """The replica's process that sends, from 0."""
    step: int = 0
    """The inner step after which a payload is sent, for messages; 0 where there is none."""

    def __str__(self) -> str:
        if self.channel is Channel.PAYLOAD:
            return f"fragment {self.fragment}, round {self.round}"
        names = {Channel.CONTROL: "comparing settings", Channel.PROBE: "measuring the link"}
        return names.get(self.channel, "averaging the loss")


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, by replica, each as long as the one sent to it. Bounded in time.

        Raises:
            ExchangeError: naming the exchange and the replicas that are missing.
        """
        ...


class Transport(Protocol):
    """A way from every replica to every other, for a fixed set of replicas; hashable, one object a way."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        ...

    @property
    def num_replicas(self) -> int:
        """M."""
        ...

    @property
    def ordered(self) -> bool:
        """True if messages are matched by their order, so that all must be started by one thread."""
        ...

    @property
    def device(self) -> torch.device:
        """The device whose memory payloads are sent from; others are copied to it."""
        ...

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Start sending each other replica its payload, and receiving one from each; returns at once.

        Args:
            payloads: a flat uint8 tensor for each other replica; must not change until the exchange is over.
                Every replica starts the same tag with payloads of the same lengths.
            tag: the name of the exchange.
        """
        ...

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as this one knows."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the others that this replica has failed, so that they need not wait for it; bounded in time."""
        ...

    def finishing(self, step: int) -> AbstractContextManager[None]:
        """A context in which the replica waits for the others to reach its last step.

        Whoever waits meanwhile for something that is sent after a later step can stop: it never comes.
        """
        ...
