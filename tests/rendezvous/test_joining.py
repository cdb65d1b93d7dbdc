"""Joining over a slow network: what a joiner has to read, it asks for several at a time."""

import asyncio
import time

import numpy as np
from tests.rendezvous.replicas import Replica

from diloco.rendezvous.store import Store

LATENCY_SECONDS = 0.03


def test_a_joiner_does_not_wait_for_one_answer_after_another(tmp_path, monkeypatch):
    first = Replica(str(tmp_path / "run"), snapshot_rounds=1000)
    while first.exchange.state.num_outer < 48:
        first.step()
        time.sleep(0.001)
    first.finish()
    fast_get = Store.get

    async def slow_get(self, name: str, **limits):
        await asyncio.sleep(LATENCY_SECONDS)
        return await fast_get(self, name, **limits)

    monkeypatch.setattr(Store, "get", slow_get)
    start = time.perf_counter()
    joiner = Replica(str(tmp_path / "run"), name="b")
    num_requests, seconds = joiner.exchange.store.requests["get"], time.perf_counter() - start
    for own, others in zip(joiner.outer(), first.outer(), strict=True):
        np.testing.assert_array_equal(own, others)
    joiner.vanish()
    assert num_requests >= 96, "48 entries and their payloads"
    assert seconds < 0.4 * 96 * LATENCY_SECONDS
