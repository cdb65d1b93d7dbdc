"""The payloads of another replica, as a store shows them to one that was away, or that learns late of a leave."""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replay import replayed
from tests.rendezvous.replicas import Replica, theta0

import diloco
from diloco.rendezvous.contract import Form, Payload
from diloco.rendezvous.objects import PAYLOAD
from diloco.rendezvous.payloads import Inbox, Memory
from diloco.wire import codec
from diloco.wire.payload import MAGIC, Codec

P = 3


class Taken(Inbox):
    """An inbox that notes which payloads of replica 0 it takes, whatever is in them."""

    def __init__(self, names: set[str], state: "State", answer_seconds: float = 0.0) -> None:
        self.names: set[str] = names
        """The objects that the store holds."""
        self.asked: list[str] = []
        self.taken: list[str] = []

        async def payload(replica: int, seq: int, public: str) -> tuple[Any, None] | None:
            name = PAYLOAD.name(replica, seq)
            self.asked.append(name)
            answer = (name, None) if name in self.names else None
            await asyncio.sleep(answer_seconds)
            return answer

        form = Form(codec=codec("fp32"), sizes=(2,) * P, seed=0)
        objects: Any = SimpleNamespace(payload=payload, form=form)
        access: Any = SimpleNamespace(objects=objects, state=state, own=1, poll_seconds=0.001, longest_poll=float)
        super().__init__(access, memory_bytes=1 << 10, on_arrival=lambda: None)

    def put(self, header: Any, own: Any = ()) -> None:
        self.taken.append(header)


class State:
    """The part of a run's state that a watch looks at."""

    def __init__(self, *last_seq: int) -> None:
        self.last_seq = last_seq
        self.members = [SimpleNamespace(key="", left=False, fenced=False)]
        self.active = True

    def last_seqs(self, replica: int) -> tuple[int, ...]:
        return self.last_seq

    def is_active(self, replica: int) -> bool:
        return self.active


def names_of(*numbers: int) -> set[str]:
    return {PAYLOAD.name(0, number) for number in numbers}


async def until_taken(inbox: Taken, name: str) -> None:
    watch = asyncio.create_task(inbox.watch(0))
    async with asyncio.timeout(5):
        while name not in inbox.taken:
            await asyncio.sleep(0.001)
    watch.cancel()


@pytest.mark.parametrize(("last_seq", "active"), [((30, 31, 32), True), ((4, 31, 32), False)])
def test_payloads_that_were_deleted_while_a_replica_was_away_are_passed_over(last_seq, active):
    """Payload 5 was awaited; meanwhile the run went on to 33, and deleted what was counted."""

    async def watch() -> Taken:
        inbox = Taken(names_of(2, 3, 4), state := State(2, 3, 4))
        task = asyncio.create_task(until_taken(inbox, PAYLOAD.name(0, 33)))
        while PAYLOAD.name(0, 5) not in inbox.asked:
            await asyncio.sleep(0.001)
        inbox.names = names_of(31, 32, 33)
        state.last_seq, state.active = last_seq, active
        await task
        return inbox

    inbox = asyncio.run(watch())
    assert inbox.taken[-1:] == [PAYLOAD.name(0, 33)]
    assert len({*inbox.asked}) < 10, "nothing in between is asked for, nor what entries count that were read"
    assert not names_of(31, 32) & {*inbox.asked}


def test_a_payload_that_is_still_on_its_way_is_awaited_though_a_later_one_was_counted():
    async def watch() -> Taken:
        inbox = Taken(names_of(), State(2, 3, 6))
        task = asyncio.create_task(until_taken(inbox, PAYLOAD.name(0, 5)))
        while inbox.asked.count(PAYLOAD.name(0, 4)) < 3:
            await asyncio.sleep(0.001)
        inbox.names = names_of(4, 5)
        await task
        return inbox

    assert asyncio.run(watch()).taken == [PAYLOAD.name(0, number) for number in (4, 5)]


def test_the_last_payload_before_a_leave_is_taken():
    """The store has said that it is absent just before it came, and then the log says that its replica left."""

    async def watch() -> Taken:
        inbox = Taken(names_of(), state := State(-1, -1, -1), answer_seconds=0.05)
        task = asyncio.create_task(inbox.watch(0))
        await asyncio.sleep(0.02)
        inbox.names, state.members = names_of(0), [SimpleNamespace(key="", left=True, fenced=False)]
        await asyncio.wait_for(task, 5)
        return inbox

    assert asyncio.run(watch()).taken == [PAYLOAD.name(0, 0)]


def test_a_receiver_decodes_a_payload_once_and_the_sender_never_what_it_has_sent(tmp_path, monkeypatch):
    decode, counts = Codec.decode_into, Counter[bytes]()

    def counting(self: Codec, to_N: torch.Tensor, payload: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if payload[:3].numpy().tobytes() == MAGIC[:3]:  # else its header is not written yet
            counts[payload.numpy().tobytes()] += 1
        return decode(self, to_N, payload, *arguments, **options)

    monkeypatch.setattr(Codec, "decode_into", counting)
    a, b = (Replica(str(tmp_path), name=name, wire="fp32") for name in "ab")
    until(lambda: min(counted(a) + counted(b)) >= 2, a, b)
    a.vanish()
    b.vanish()
    assert len(counts) >= 2 * P and set(counts.values()) == {1}


def test_a_replica_that_does_not_average_on_a_cpu_keeps_no_values(tmp_path, monkeypatch):
    join = diloco.StoreRendezvous.join

    def join_as_on_a_gpu(self, facts: Any, form: Form, **options: Any) -> Any:
        return join(self, facts, replace(form, keep_values=False), **options)

    monkeypatch.setattr(diloco.StoreRendezvous, "join", join_as_on_a_gpu)
    a, b = (Replica(str(tmp_path), name=name, snapshot_rounds=1000) for name in "ab")
    until(lambda: min(counted(a) + counted(b)) >= 2, a, b)
    for replica in (a, b):
        replica.vanish()
        inbox = replica.exchange._seated.log_thread.inbox
        payloads = [payload for here in inbox.here for arrived in here.values() for payload in arrived.own]
        assert not any(payload.values is not None for payload in [*payloads, *inbox.memory._payloads.values()])
    run = replayed(tmp_path, theta0())
    for p, outer_p in enumerate(a.outer()):
        np.testing.assert_array_equal(outer_p, run.outer[p][a.rounds[p]])


def test_payloads_and_values_beyond_the_memory_are_given_up_the_oldest_first():
    memory, size = Memory(64, 64), 32
    kept = [Payload(torch.zeros(size, dtype=torch.uint8), torch.zeros(4)) for _ in range(5)]
    for number, payload in enumerate(kept):
        memory.keep(str(number), payload)
    assert [memory.get(str(number)) for number in range(5)] == [None, None, None, *kept[3:]]
    assert [payload.values is not None for payload in kept] == [False, True, True, True, True]
    memory.drop("4")
    assert memory.get("4") is None and kept[4].values is not None, "a decision may still use it"
    del kept[1:3], payload  # two decisions were taken
    memory.keep_values(Payload(torch.zeros(0), torch.zeros(8)))
    assert kept[-1].values is not None
    memory.keep("large", Payload(torch.zeros(65, dtype=torch.uint8), torch.zeros(17)))
    assert memory.get("large") is None and kept[-1].values is None


def test_a_look_that_is_far_away_comes_soon_once_the_training_thread_waits():
    async def watch() -> Taken:
        inbox = Taken(names_of(), State(-1, -1, -1))
        inbox._access.longest_poll = lambda: 30.0
        task = asyncio.create_task(until_taken(inbox, PAYLOAD.name(0, 0)))
        while len(inbox.asked) < 10:  # the next look is half a second away
            await asyncio.sleep(0.001)
        inbox.names, inbox._access.longest_poll = names_of(0), float
        await asyncio.wait_for(task, 0.25)
        return inbox

    assert asyncio.run(watch()).taken == [PAYLOAD.name(0, 0)]
