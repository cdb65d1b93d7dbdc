"""The hand-over of outer steps to the training thread."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.entries import LogError
from diloco.rendezvous.log.run import SnapshotRef
from diloco.rendezvous.log_thread import Delivery
from diloco.rendezvous.objects import Objects, seal_snapshot, snapshot_name
from diloco.wire import codec

N = 3
BUFFERS, DIGEST = seal_snapshot({"outer": torch.ones(N)})
"""A snapshot, which stands for those of all rounds."""


class OneObject:
    """A store that holds one object."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_reads = 0

    async def get(self, name: str, **limits: float) -> bytes | None:
        self.num_reads += name == self.name
        return b"".join(BUFFERS) if name == self.name else None


def state_with(*rounds: int) -> SimpleNamespace:
    refs = [SnapshotRef(round=last_round, number=30 + last_round, sha256=DIGEST) for last_round in rounds]
    return SimpleNamespace(fragments=[SimpleNamespace(snapshots=refs)])


def delivery_of(store: OneObject, state: SimpleNamespace, newest: SimpleNamespace) -> Delivery:
    async def read_to_the_end() -> SimpleNamespace:
        return newest

    objects = Objects(store=store, form=Form(codec=codec("fp32"), sizes=(N,), seed=0), run="0" * 64)
    return Delivery(SimpleNamespace(objects=objects, state=state, newest=read_to_the_end, own=0), None, None)


@pytest.mark.parametrize(("newest", "expected"), [(12, 12), (8, None)])
def test_a_snapshot_that_a_newer_one_has_replaced_is_not_missed(newest, expected):
    store = OneObject(snapshot_name(0, 12, DIGEST))
    delivery = delivery_of(store, state_with(4, 8), state_with(4, newest))
    ref = SimpleNamespace(number=20, body=SimpleNamespace(fragment=0, round=7))
    if expected is None:
        with pytest.raises(
            LogError, match=r"entry 38 of the log names snapshots/0/8-\w+, which is not in the store"
        ):
            asyncio.run(delivery._snapshot_after(ref))
    else:
        assert asyncio.run(delivery._snapshot_after(ref)).round == expected


@pytest.mark.parametrize("known", [(), (4,)])
def test_a_snapshot_that_was_read_of_too_late_is_taken_and_stands_for_several_outer_steps(known):
    store = OneObject(snapshot_name(0, 12, DIGEST))
    delivery = delivery_of(store, state_with(*known), state_with(8, 12))

    async def snapshots_after(*rounds: int) -> list[int]:
        refs = [SimpleNamespace(number=9, body=SimpleNamespace(fragment=0, round=r)) for r in rounds]
        return [(await delivery._snapshot_after(ref)).round for ref in refs]

    assert asyncio.run(snapshots_after(7, 8, 12)) == [12, 12, 12]
    assert store.num_reads == 1


def test_a_snapshot_is_asked_for_again_as_long_as_newer_ones_take_its_place():
    """A slow reader: the run has written two more, and deleted the one it asked for, three times."""
    delivery = delivery_of(OneObject(snapshot_name(0, 20, DIGEST)), state_with(4, 8), state_with())
    later = iter([state_with(8, 12), state_with(12, 16), state_with(16, 20)])

    async def newest() -> SimpleNamespace:
        return next(later)

    delivery._access.newest = newest
    ref = SimpleNamespace(number=9, body=SimpleNamespace(fragment=0, round=7))
    assert asyncio.run(delivery._snapshot_after(ref)).round == 20
