"""The hand-over of outer steps to the training thread."""

import asyncio
from types import SimpleNamespace

import pytest

from diloco.rendezvous import snapshots
from diloco.rendezvous.delivery import Delivery
from diloco.rendezvous.entries import LogError


class OneObject:
    """A store that holds one object."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def get(self, name: str, **limits: float) -> bytes | None:
        return b"Theta" if name == self.name else None


def state_with(*rounds: int) -> SimpleNamespace:
    refs = [SimpleNamespace(round=last_round, sha256=(f"{last_round:064x}",)) for last_round in rounds]
    return SimpleNamespace(fragments=[SimpleNamespace(snapshots=refs)])


@pytest.mark.parametrize(("newest", "expected"), [(12, 12), (8, None)])
def test_a_snapshot_that_a_newer_one_has_replaced_is_not_missed(newest, expected):
    async def read_to_the_end() -> SimpleNamespace:
        return state_with(4, newest)

    delivery = Delivery(
        OneObject(snapshots.name_of(0, 12, f"{12:064x}")),
        SimpleNamespace(sizes=[3]),
        None,
        own=0,
        content_of=None,
        state=lambda: state_with(4, 8),
        newest=read_to_the_end,
        poll_seconds=0.01,
    )
    ref = SimpleNamespace(number=20, body=SimpleNamespace(fragment=0, round=7))
    if expected is None:
        with pytest.raises(LogError, match=r"snapshots/0/8-0+8 is not in the store, though the log names it"):
            asyncio.run(delivery._snapshot_after(ref))
    else:
        assert asyncio.run(delivery._snapshot_after(ref)).round == expected
