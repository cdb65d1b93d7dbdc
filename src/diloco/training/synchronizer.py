"""The contract between the training loop and what keeps the replicas together: the engine, or Data-Parallel."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from diloco.outer.step import OuterStep


class Synchronizer(Protocol):
    """Exchanges with the other replicas after each inner step."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent by all shards of the replica, each destination counted."""
        ...

    @property
    def bytes_received(self) -> int:
        """Payload bytes from the other replicas that were merged."""
        ...

    @property
    def blocked_seconds(self) -> float:
        """Seconds in which training waited for the network."""
        ...

    def step(self, *, tokens: int | None = None) -> Sequence[OuterStep]:
        """Count an inner step on so many tokens, send and merge what is due; returns the outer steps taken."""
        ...

    def finish(self) -> Sequence[OuterStep]:
        """Receive and merge everything in flight; every replica calls it after the same step."""
        ...

    def logs(self) -> dict[str, float]:
        """Numbers for trackers, by name; every process of a replica must call it."""
        ...

    def begin_logs(self) -> Callable[[], dict[str, float]]:
        """Begin to compute `logs` as of now; the function that is returned reads them."""
        ...

    def counters(self) -> dict[str, float]:
        """The part of `logs` that any process and thread may ask for at any time."""
        ...

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, sharded as the model is."""
        ...

    def outer_in_place(self) -> AbstractContextManager[None]:
        """A context in which the model has Θ in the place of its own parameters."""
        ...

    def outer_hash(self) -> str:
        """SHA-256 over Θ, equal on all replicas after `finish()`; every process of the replica must call it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that resumes: plain values, and dicts of tensors by name, always of the same shapes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` gave; every replica must load the same step."""
        ...
