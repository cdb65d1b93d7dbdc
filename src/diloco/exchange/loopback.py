"""One replica alone (M = 1): nothing to send, nobody to wait for."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LoopbackExchange:
    """The exchange of a single replica: a variant of Lookahead, and a way to try the engine without a network."""

    replica: int = 0
    num_replicas: int = 1

    def start(
        self,
        payloads: Mapping[int, Tensor],
        fragment: int,
        round: int,
        phase: int = 0,
    ) -> "_Nothing":
        """Send nothing."""
        assert not payloads, "a replica alone has nobody to send to"
        return _Nothing()


class _Nothing:
    def wait(self) -> dict[int, Tensor]:
        """Nobody else's payload."""
        return {}
