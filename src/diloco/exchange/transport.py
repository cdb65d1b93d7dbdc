"""How the bytes of one fragment reach the other replicas: the contract of every transport.

Numbers live above this contract, sockets below it. A transport moves flat uint8 tensors and knows nothing of what
they mean.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, by replica, each as long as the one sent to it. Bounded in time.

        Raises:
            ExchangeError: naming the fragment, the round and the replicas that are missing.
        """
        ...


class Exchange(Protocol):
    """A way from every replica to every other."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        ...

    @property
    def num_replicas(self) -> int:
        """M."""
        ...

    def start(self, payloads: Mapping[int, Tensor], fragment: int, round: int, phase: int = 0) -> Pending:
        """Start sending each other replica its payload, and receiving one from each; returns at once.

        Every replica starts the same (fragment, round, phase), once, with payloads of the same lengths.

        Args:
            payloads: a flat uint8 tensor for each other replica; must not change until the exchange is over.
            fragment: index of the fragment, from 0; −1 is for messages about the run itself.
            round: how often the fragment has been sent, from 1.
            phase: which leg of an exchange that has several.
        """
        ...


ABOUT_THE_RUN = -1
