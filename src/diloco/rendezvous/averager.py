"""The averages of shares: made by the members of an outer entry in turn, and taken from the store by all.

The members stand in a circle, in an order that changes with each entry: share r is averaged by the member at place
r. Who waits for it in vain makes it itself: the bytes are the same, and the first in the store is everybody's.

Shapes: S elements of a share.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.rendezvous.contract import Content, Form
from diloco.rendezvous.log.entries import Contribution, LogError
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import FOR_EVER
from diloco.rendezvous.log.run import OuterRef, RunState, turns
from diloco.rendezvous.objects import (
    Header,
    average_name,
    average_of,
    body_tensor,
    check_share,
    header_of,
    most_average_bytes,
    open_average,
    payload_name,
    seal_average,
    verified,
)
from diloco.rendezvous.payloads import Inbox
from diloco.rendezvous.store import Buffer, Store, TooLargeError

_LOG = logging.getLogger("diloco")
_POLLS_A_TURN = 10
_LOOKS_AT_ONCE = 8
"""Averages of one outer entry that are looked for at once: they appear at about the same time."""


class _Average(NamedTuple):
    """The average of one share."""

    payload: Tensor
    bytes_received: int
    bytes_sent: int


def _content(several: Sequence[_Average]) -> Content:
    """The averages of all shares, with the bytes that they took."""
    return Content(
        averages=tuple(average.payload for average in several),
        bytes_received=sum(average.bytes_received for average in several),
        bytes_sent=sum(average.bytes_sent for average in several),
    )


class _DeletedError(Exception):
    """A share was deleted, since a snapshot has made its outer entry needless."""


class Averager:
    """Makes and takes averages for one replica.

    Args:
        store: where they lie.
        signer: of those that are made here.
        form: of the run's payloads.
        inbox: where the headers of payloads lie, and own shares.
        own: this replica.
        poll_seconds: time between two looks for an average.
        newest: reads the log to its end, and gives the state.
    """

    def __init__(
        self,
        store: Store,
        signer: Signer,
        form: Form,
        inbox: Inbox,
        *,
        own: int,
        poll_seconds: float,
        newest: Callable[[], Awaitable[RunState]],
    ) -> None:
        self._store, self._signer, self._form, self._inbox = store, signer, form, inbox
        self._own, self._poll_seconds, self._newest = own, poll_seconds, newest
        self._seconds = 0.0
        """Time that it took to make the last average."""
        self._scratch_S = torch.empty(max(map(form.share_size, range(len(form.sizes)))))
        self._computing = asyncio.Lock()  # one at a time, in the scratch memory

    async def of_entry(self, ref: OuterRef, state: RunState) -> Content | None:
        """The averages of an outer entry's shares; None if they were deleted.

        Raises:
            LogError: if an average, or what the entry counts, is not sound.
        """
        shares, looking = range(self._form.num_shares), asyncio.Semaphore(_LOOKS_AT_ONCE)
        if all(ref.number != needed.number for needed in state.fragments[ref.body.fragment].since):
            return await self._old(ref, state)
        results = await asyncio.gather(*(self._share(ref, share, state, looking) for share in shares))
        several = [average for average in results if average is not None]
        if len(several) < len(results):
            return None
        return _content(several)

    async def _old(self, ref: OuterRef, state: RunState) -> Content | None:
        """The averages of an entry that snapshots stand for, while they are there; nobody makes them again."""
        taken = []
        for share in range(self._form.num_shares):
            name, most = average_name(ref.number, share), most_average_bytes(self._form, ref.body.fragment)
            if (data := await self._store.get(name, most_bytes=most, patience_seconds=FOR_EVER)) is None:
                return None
            taken.append(await self._taken(data, ref, share, state))
        return _content(taken)

    async def _share(
        self, ref: OuterRef, share: int, state: RunState, looking: asyncio.Semaphore
    ) -> _Average | None:
        """The average of one share, from the store, or made here when its turn comes; None if it was deleted."""
        if turn := self._turn(ref, share, state):
            data = await self._waited_for(ref, share, turn, looking)
            if data is not None:
                return await self._taken(data, ref, share, state)
        try:
            return await self._made(ref, share, state)
        except _DeletedError:
            return None

    async def _waited_for(
        self, ref: OuterRef, share: int, turn: int, looking: asyncio.Semaphore
    ) -> "Buffer | None":
        """The object of an average; None if this replica's turn comes before it."""
        name, most_bytes = average_name(ref.number, share), most_average_bytes(self._form, ref.body.fragment)
        # In each interval as many begin as before it: few do needless work, and many dead ones cost little time.
        num_intervals, started = turn.bit_length(), time.monotonic()
        async with looking:
            while True:
                data = await self._store.get(name, most_bytes=most_bytes, patience_seconds=FOR_EVER)
                seconds = _POLLS_A_TURN * self._poll_seconds + 2 * self._seconds
                if data is not None or time.monotonic() >= started + num_intervals * seconds:
                    return data
                await asyncio.sleep(self._poll_seconds)

    def _turn(self, ref: OuterRef, share: int, state: RunState) -> int:
        """The number of replicas that try to make an average before this one."""
        members = [counted.replica for counted in ref.body.contributions]
        if self._own not in members:
            return 2 * len(members)  # it can't sign for the entry, and makes the average for itself
        order = turns(f"{state.run} {ref.number}", members)
        return (order.index(self._own) - share) % len(order)

    async def _made(self, ref: OuterRef, share: int, state: RunState) -> _Average:
        """Make an average, and upload it if this replica is a member of the entry."""
        started, parts = time.monotonic(), ref.body.contributions
        several = await asyncio.gather(*(self._contributed(ref, counted, share, state) for counted in parts))
        payload_of = {c.replica: payload for c, payload in zip(parts, several, strict=True) if payload is not None}
        received = sum(x.numel() for member, x in payload_of.items() if member != self._own)
        async with self._computing:
            payload, norm = await asyncio.to_thread(average_of, state, self._form, ref.body, share, payload_of)
        self._seconds = time.monotonic() - started
        left_out = [counted.replica for counted in parts if counted.replica not in payload_of]
        if self._own not in (counted.replica for counted in parts):
            return _Average(payload, received, 0)
        header = header_of(state, self._form, ref, share, payload, norm=norm, replica=self._own, left_out=left_out)
        name, head = average_name(ref.number, share), seal_average(header, self._signer)
        other = await self._store.create(name, [head, payload.numpy().data], patience_seconds=FOR_EVER)
        if other is not None:
            taken = await self._taken(other, ref, share, state)
            return taken._replace(bytes_received=received + taken.bytes_received)
        return _Average(payload, received, payload.numel())

    async def _taken(self, data: Buffer, ref: OuterRef, share: int, state: RunState) -> _Average:
        """An average from the store, after all checks."""
        try:
            _, payload = await asyncio.to_thread(
                open_average, data, state=state, form=self._form, ref=ref, share=share
            )
        except PayloadError as error:
            raise LogError(f"entry {ref.number} of the log: {error}") from None
        return _Average(payload, payload.numel(), 0)

    async def _contributed(
        self, ref: OuterRef, counted: Contribution, share: int, state: RunState
    ) -> Tensor | None:
        """A member's payload of a share; None if it is not sound: then the average leaves it out."""
        p = ref.body.fragment
        arrived = self._inbox.arrived(p, counted)
        if arrived is not None and arrived.payloads:
            return arrived.payloads[share]
        header = await self._inbox.header(p, counted, state.members[counted.replica].key)
        if header is None:
            await self._check_needed(ref)
            raise LogError(f"entry {ref.number} of the log counts payloads that are not in the store")
        name = payload_name(counted.replica, counted.seq, share)
        try:
            data = await self._store.get(name, most_bytes=header.num_bytes, patience_seconds=FOR_EVER)
            if data is None:
                await self._check_needed(ref)
                raise PayloadError(f"payload {name} is not in the store")
            async with self._computing:
                return await asyncio.to_thread(self._checked, header, share, data)
        except (PayloadError, TooLargeError) as error:
            _LOG.warning("%s: it is left out", error)
            return None

    def _checked(self, header: Header, share: int, data: Buffer) -> Tensor:
        check_share(header, share, data)
        payload = body_tensor(memoryview(data))
        verified(header, payload, form=self._form, share=share, scratch_N=self._scratch_S)
        return payload

    async def _check_needed(self, ref: OuterRef) -> None:
        """Find out whether a share is absent because it was deleted.

        Raises:
            _DeletedError: if so.
        """
        if (await self._newest()).has_snapshot(ref.body.fragment, ref.body.round):
            raise _DeletedError
