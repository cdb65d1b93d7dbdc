"""Joining: over a slow network what has to be read is asked for several at a time; who is waited for at first."""

import asyncio
import threading
import time

import numpy as np
import pytest
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replicas import Replica, wait_for_entry

from diloco.errors import DilocoError, ExchangeError
from diloco.rendezvous.store import Store

LATENCY_SECONDS = 0.03


def test_a_joiner_does_not_wait_for_one_answer_after_another(tmp_path, monkeypatch):
    first = Replica(str(tmp_path / "run"), snapshot_rounds=1000)
    while first.exchange.state.num_outer < 48:
        first.step()
        time.sleep(0.001)
    first.finish()
    fast_get, waits, fruitful = Store.get, [], set()

    async def slow_get(self, name: str, **limits):
        """Wait as long as the first of those that ask at about the same time."""
        if not waits or waits[-1].done():
            waits.append(asyncio.create_task(asyncio.sleep(LATENCY_SECONDS)))
        wait = waits[-1]
        await asyncio.shield(wait)
        data = await fast_get(self, name, **limits)
        if data is not None:
            fruitful.add(wait)
        return data

    monkeypatch.setattr(Store, "get", slow_get)
    joiner = Replica(str(tmp_path / "run"), name="b")
    num_requests, num_waits = joiner.exchange.store.requests["get"], len(fruitful)
    for own, others in zip(joiner.outer(), first.outer(), strict=True):
        np.testing.assert_array_equal(own, others)
    joiner.vanish()
    assert num_requests >= 96, "48 entries and their payloads"
    assert num_waits < 0.4 * 96


def test_a_name_that_joins_twice_is_one_of_those_with_which_a_run_begins(tmp_path):
    sentences: dict[float, str] = {}

    def join(timeout_seconds: float) -> None:
        with pytest.raises(DilocoError) as error:
            Replica(str(tmp_path / "run"), name="a", num_replicas=2, timeout_seconds=timeout_seconds)
        sentences[timeout_seconds] = str(error.value)

    first = threading.Thread(target=join, args=[20.0])
    first.start()
    wait_for_entry(str(tmp_path / "run"), 1)
    join(2.0)
    first.join()
    replaced, missing = sentences[20.0], sentences[2.0]
    assert replaced.startswith("another process has joined the run as a, and goes on in the place of this one")
    assert missing.startswith("1 of 2 replicas did not arrive at ")


def test_a_replica_that_ends_before_its_first_step_is_not_counted(tmp_path):
    url, rules = str(tmp_path / "store"), {"quorum": "all", "num_replicas": 2, "timeout_seconds": 2.0}
    for name in ("first", "second"):
        with pytest.raises(ExchangeError, match="1 of 2 replicas did not arrive at"):
            Replica(url, name=name, **rules)


def test_a_companion_that_joins_before_the_farewell_of_one_that_gives_up_begins_with_it(tmp_path, monkeypatch):
    url, create, replicas = str(tmp_path / "run"), Store.create, list[Replica]()
    late = threading.Thread(target=lambda: replicas.append(Replica(url, name="b")))

    async def create_after_the_join(self, name: str, data, **limits):
        """Let the other's join land between the end of the wait and the entry that says so."""
        if name.startswith("log/") and b'"kind":"leave"' in data and not replicas:
            late.start()
            await asyncio.to_thread(wait_for_entry, url, 2)
        return await create(self, name, data, **limits)

    monkeypatch.setattr(Store, "create", create_after_the_join)
    replicas.append(Replica(url, name="a", num_replicas=2, timeout_seconds=2.0))
    late.join()
    assert [member.left for member in replicas[0].exchange.state.members] == [False, False]
    until(lambda: all(min(counted(replica)) >= 0 for replica in replicas), *replicas)
    for replica in replicas:
        replica.vanish()


def test_with_the_quorum_all_no_replica_that_comes_back_goes_on_alone(tmp_path):
    url, rules = str(tmp_path / "run"), {"quorum": "all", "num_replicas": 2}
    replicas = dict[str, Replica]()

    def join(name: str) -> None:
        replicas[name] = Replica(url, name=name, **rules)

    def join_together() -> None:
        threads = [threading.Thread(target=join, args=[name]) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    join_together()
    until(lambda: all(min(counted(replica)) >= 0 for replica in replicas.values()), *replicas.values())
    for replica in replicas.values():
        replica.exchange.leave()
    with pytest.raises(ExchangeError, match="1 of 2 replicas did not arrive at"):
        Replica(url, name="a", timeout_seconds=2.0, **rules)
    join_together()
    assert replicas["a"].exchange.state.present == {"a", "b"}
    for replica in replicas.values():
        replica.vanish()
