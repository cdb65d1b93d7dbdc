"""A replica's own payloads on their way to the store."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import torch

from diloco.rendezvous.contract import Form, Offer
from diloco.rendezvous.log.entries import LogError
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.objects import PAYLOAD
from diloco.rendezvous.payloads import Memory, Outbox
from diloco.wire import codec


def put(outbox: Outbox, seq: int, fragment: int) -> None:
    values_N = torch.ones(4)
    numbers = {"base_round": seq, "base": 0, "tokens": 8, "steps": 1, "position": 8, "step": seq, "loss": None}
    offer = Offer(replica=0, seq=seq, fragment=fragment, norms=(2.0,), overlap=0, **numbers)
    outbox.put(offer, (codec("fp32").encode(values_N, FORM.key(fragment, seq, 0)),), values_N)


async def is_there() -> None:
    """The run is in the store."""


def access_of(
    create: Callable[..., Awaitable[None]], check_mounted: Callable[[], Awaitable[None]] = is_there
) -> SimpleNamespace:
    objects = SimpleNamespace(store=SimpleNamespace(create=create), form=FORM, run="0" * 64)
    return SimpleNamespace(
        objects=objects, log=SimpleNamespace(check_mounted=check_mounted), signer=Signer(), own=0
    )


FORM = Form(codec=codec("fp32"), sizes=(4, 4), seed=0, second=None)


def test_an_older_upload_that_ends_later_does_not_replace_a_newer_one():
    """Uploads of fragments 0, 1 and 0 again; the first one's request hangs until the others' are over."""
    in_inbox: list[int] = []

    async def uploaded() -> Outbox:
        others_are_over = asyncio.Event()

        async def create(name: str, *_, **__) -> None:
            if name == PAYLOAD.name(0, 0):
                await others_are_over.wait()

        inbox = SimpleNamespace(put=lambda header, _: in_inbox.append(header.seq), memory=Memory(1 << 10, 1 << 10))
        outbox = Outbox(access_of(create), inbox)
        for seq, fragment in enumerate((0, 1, 0)):
            put(outbox, seq, fragment)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            work = tasks.create_task(outbox.run(tasks))
            while outbox.num_pending > 1:
                await asyncio.sleep(0.001)
            others_are_over.set()
            while outbox.num_pending:
                await asyncio.sleep(0.001)
            work.cancel()
        return outbox

    outbox = asyncio.run(uploaded())
    assert {p: sent.seq for p, sent in outbox.offers.items()} == {0: 2, 1: 1}
    assert sorted(in_inbox) == [1, 2]


def test_a_payload_in_a_directory_that_does_not_hold_the_run_any_more_is_not_offered():
    """As where a payload was written below a mount point while the store was not mounted."""

    async def refuse() -> None:
        raise LogError("the run is not in the store any more")

    async def created(*_, **__) -> None:
        return None

    inbox = SimpleNamespace(put=lambda *_: None)
    outbox = Outbox(access_of(created, refuse), inbox)
    put(outbox, 0, 0)

    async def upload() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            await outbox.run(tasks)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(upload())
    assert caught.group_contains(LogError, match="not in the store any more") and not outbox.offers
