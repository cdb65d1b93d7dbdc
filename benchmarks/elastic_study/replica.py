"""A replica whose inner steps do nothing, so that many fit one machine; and a store behind a slow network."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diloco
from diloco.fragments import Fragment
from diloco.rendezvous.contract import Decision, Form, Joined, Offer

sys.path.append(str(Path(__file__).parents[2]))

from tests.fault_proxy import FaultProxy
from tests.servers import Server, running_seaweedfs

__all__ = ["FaultProxy", "Replica", "Server", "Timed", "environment", "network", "running_seaweedfs"]
_CHANGED = 64
"""Elements of each fragment that an inner step changes."""


class Timed(diloco.StoreRendezvous):
    """A StoreRendezvous that notes when each payload was sent, and when each decision was known here."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.sends: list[dict[str, Any]] = []
        self.decisions: list[dict[str, Any]] = []
        self.num_replayed = 0
        """Outer steps that were taken in order to join."""

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join, and note how much is replayed."""
        joined = super().join(facts, form, sync_every=sync_every)
        self.num_replayed = joined.num_decisions
        return joined

    def offer(self, offer: Offer) -> None:
        """Note the time, and offer."""
        self.sends.append({"fragment": offer.fragment, "at": time.monotonic()})
        super().offer(offer)

    def decided(self, *, wait_for: int | None = None) -> Sequence[Decision]:
        """The decisions since the last call, noted."""
        decisions = super().decided(wait_for=wait_for)
        self.decisions += (
            {
                "fragment": decision.fragment,
                "round": decision.round,
                "at": time.monotonic(),
                "members": list(decision.cohort.members),
                "is_own": decision.is_own,
            }
            for decision in decisions
        )
        return decisions


class Replica:
    """A replica of P equal fragments.

    Args:
        url: of the run.
        elements: N of each fragment.
        num_fragments: P.
        sync_every: H.
        overlap_steps: τ.
        wire: the codec.
        settings: of its StoreRendezvous.
    """

    def __init__(
        self,
        url: str,
        *,
        elements: int,
        num_fragments: int,
        sync_every: int,
        overlap_steps: int = 0,
        wire: str = "e3m0",
        **settings: Any,
    ) -> None:
        self.model = nn.ParameterList(torch.zeros(elements) for _ in range(num_fragments))
        self.exchange = Timed(url, **settings)
        self.engine = diloco.StreamingDiLoCo(
            self.model,
            fragments=[Fragment((str(p),)) for p in range(num_fragments)],
            schedule=diloco.Schedule(
                sync_every=sync_every, num_fragments=num_fragments, overlap_steps=overlap_steps
            ),
            wire=wire,
            rendezvous=self.exchange,
        )

    def step(self, tokens: int = 1024) -> int:
        """One inner step, and the engine's; the number of outer steps that it took."""
        with torch.no_grad():
            for parameter in self.model:
                parameter[:_CHANGED] += 0.01 * (1 + self.exchange.replica)
        return len(self.engine.step(tokens=tokens))


@contextmanager
def network(
    server: Server, *, seed: int = 0, latency_seconds: float = 0.0, mbit_s: float = float("inf")
) -> Iterator[dict[str, str]]:
    """The environment of a replica that reaches a store through a network of its own."""
    with FaultProxy(server.port, seed=seed) as proxy:
        proxy.set(latency_seconds=latency_seconds, bytes_s=mbit_s * 1e6 / 8)
        yield server.through(proxy.url)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process's environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
