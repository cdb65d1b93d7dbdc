"""Joining: over a slow network what has to be read is asked for several at a time; who is waited for at first."""

import asyncio
import re
import threading
import time

import numpy as np
import pytest
from tests.rendezvous.replicas import H, P, Replica, new_model, wait_for_entry

import diloco
from diloco.errors import DilocoError, ExchangeError
from diloco.rendezvous.log.entries import LogError
from diloco.rendezvous.log.keys import write_key
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
    join(1.0)
    first.join()
    replaced, missing = sentences[20.0], sentences[1.0]
    assert replaced.startswith("another process has joined the run as a, and goes on in the place of this one")
    assert missing.startswith("1 of 2 replicas did not arrive at ")


def test_a_run_with_rules_that_can_not_be_read_is_not_created(tmp_path):
    with pytest.raises(DilocoError, match=r"entry 0 of the log can't be read: .*num_slots"):
        Replica(str(tmp_path / "run"), num_slots=0)
    assert not (tmp_path / "run" / "log").exists()


def test_a_replica_that_ends_before_its_first_step_is_not_counted(tmp_path):
    url, rules = str(tmp_path / "store"), {"quorum": "all", "num_replicas": 2, "timeout_seconds": 0.5}
    for name in ("first", "second"):
        with pytest.raises(ExchangeError, match="1 of 2 replicas did not arrive at"):
            Replica(url, name=name, **rules)


def test_a_join_is_tried_once(tmp_path):
    first = Replica(str(tmp_path / "store"))
    exchange = diloco.StoreRendezvous(str(tmp_path / "store"), name="b")
    model = new_model()
    fragments = diloco.sequential(model, layers_per_fragment=1)
    for sync_every, expected in ((H + 1, "differs from the run in sync_every"), (H, "has joined already")):
        with pytest.raises(diloco.UserError, match=expected):
            diloco.StreamingDiLoCo(
                model,
                fragments=fragments,
                schedule=diloco.Schedule(sync_every=sync_every, num_fragments=P),
                rendezvous=exchange,
            )
    exchange.abort("the test is over")
    first.vanish()


def test_a_key_that_a_run_does_not_expect_is_refused_with_the_remedy(tmp_path):
    keys = {name: write_key(tmp_path / name) for name in ("creator", "other")}
    keyed, plain = str(tmp_path / "keyed"), str(tmp_path / "plain")
    first, second = Replica(keyed, key=str(tmp_path / "creator")), Replica(plain)
    for url, key, sentence in (
        (keyed, None, "the run asks for a key: set DILOCO_KEY to this replica's key file, which diloco keys new"),
        (keyed, "other", f"whoever created the run allows it by: diloco keys allow {keyed} {keys['other']}"),
        (plain, "other", "the run was created without keys, and this replica has one: leave DILOCO_KEY unset"),
    ):
        with pytest.raises(LogError, match=re.escape(sentence)):
            Replica(url, name="b", key=key and str(tmp_path / key))
    first.vanish()
    second.vanish()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_facts_that_are_not_json_are_refused(tmp_path, value):
    with pytest.raises(diloco.UserError, match="must hold finite numbers and strings") as refusal:
        diloco.StoreRendezvous(str(tmp_path / "store"), facts={"lr": value})
    assert refusal.value.fields == ("facts",)
