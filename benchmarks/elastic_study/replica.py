"""A replica whose inner steps do nothing, so that many fit one machine; and a store behind a slow network."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import diloco
from diloco.fragments import Fragment
from diloco.rendezvous.contract import Form, Joined, News, Offer

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
        self.num_replayed, seat = joined.num_decisions, joined.seat
        start, step = seat.offer, seat.step

        def noted_offer(offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
            self.sends.append({"fragment": offer.fragment, "at": time.monotonic()})
            start(offer, payloads, values_N)

        def noted_step(*arguments: Any, **keywords: Any) -> News:
            news = step(*arguments, **keywords)
            self.decisions += (
                {
                    "fragment": decision.fragment,
                    "round": decision.round,
                    "at": time.monotonic(),
                    "members": list(decision.cohort.members),
                    "is_own": self.replica in decision.cohort.members,
                }
                for decision in news.decisions
            )
            return news

        seat.offer, seat.step = noted_offer, noted_step
        return joined


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
        self._random = torch.Generator().manual_seed(sum(map(ord, str(settings.get("name")))))
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
            for parameter in self.model:  # no two replicas alike, in whatever codec
                parameter[:_CHANGED] += 0.01 * torch.randn(_CHANGED, generator=self._random)[: len(parameter)]
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
