"""The transport of one replica alone (M = 1): nothing to send, nobody to wait for."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.exchange.transport import Tag


@dataclass(frozen=True, eq=False)
class LoopbackExchange:
    """The exchange of a single replica: a variant of Lookahead, and a way to try the engine without a network."""

    replica: int = 0
    num_replicas: int = 1
    ordered: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    failure: str | None = None

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> "_Nothing":
        """Send nothing."""
        assert not payloads, "a replica alone has nobody to send to"
        return _Nothing()

    def abort(self, reason: str) -> None:
        """Tell nobody."""

    def finishing(self, step: int) -> AbstractContextManager[None]:
        """A context that waits for nobody."""
        return nullcontext()


class _Nothing:
    def wait(self) -> dict[int, Tensor]:
        """The payloads of nobody."""
        return {}
