"""The other replicas' payloads: found by their names, downloaded, verified, and kept until they are counted."""

import asyncio
import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.files import sha256
from diloco.rendezvous.contract import Content, Form, Offer
from diloco.rendezvous.log.entries import Contribution, LogError, Outer
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import FOR_EVER, Log
from diloco.rendezvous.log.run import OuterRef, RunState, of_the_run
from diloco.rendezvous.objects import (
    MOST_HEAD_BYTES,
    Header,
    body_tensor,
    check_header,
    contribution,
    open_payload,
    payload_name,
    seal_payload,
    verified,
)
from diloco.rendezvous.store import Store, TooLargeError

_LOG = logging.getLogger("diloco")

if TYPE_CHECKING:
    from typing_extensions import Buffer


DISK_OVER_MEMORY = 16
"""Largest size of the payloads in files, as a multiple of the memory."""


class PayloadCache:
    """Payloads by name. Those that it gives up can be downloaded again.

    Args:
        memory_bytes: size of the payloads in memory. As much as 16 times more lies in files without a name in the
            temporary directory, mapped into memory, which the system reads when they are used.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes, self._disk_bytes = memory_bytes, DISK_OVER_MEMORY * memory_bytes
        self._memory: OrderedDict[str, Tensor] = OrderedDict()
        self._disk: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, name: str, payload: Tensor) -> None:
        """Keep a payload, a flat uint8 tensor; called by one thread at a time, since it may write files."""
        with self._lock:
            self._memory[name] = payload
        while _bytes(self._memory) > self._memory_bytes:
            with self._lock:
                oldest = next(iter(self._memory), None)
                moved = None if oldest is None else self._memory[oldest]
            if oldest is None or moved is None:
                return
            mapped = self._written(moved) if moved.numel() <= self._disk_bytes else None
            with self._lock:
                if self._memory.pop(oldest, None) is not None and mapped is not None:
                    self._disk[oldest] = mapped
                while _bytes(self._disk) > self._disk_bytes:
                    self._disk.popitem(last=False)

    def get(self, name: str) -> Tensor | None:
        """A payload; None if it is not here any more."""
        with self._lock:
            for place in (self._memory, self._disk):
                if name in place:
                    place.move_to_end(name)
                    return place[name]
        return None

    def drop(self, name: str) -> None:
        """Forget a payload; absent ones are fine."""
        with self._lock:
            self._memory.pop(name, None)
            self._disk.pop(name, None)

    @staticmethod
    def _written(payload: Tensor) -> Tensor | None:
        """The payload in a file that disappears with the tensor; None if there is no space for it."""
        try:
            with tempfile.TemporaryFile(prefix="diloco-payload-") as file:
                file.write(payload.numpy().data)
                file.flush()
                return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(payload.numel(),)))
        except OSError as error:
            _LOG.warning(
                "a payload can't be kept in %s, and will be downloaded again: %s", tempfile.gettempdir(), error
            )
            return None


def _bytes(payloads: OrderedDict[str, Tensor]) -> int:
    return sum(payload.numel() for payload in list(payloads.values()))


_SLOWER = 16
"""Factor by which a replica that is not active is asked less often."""


@dataclass(frozen=True)
class Arrived:
    """A payload that can be counted: sound, or cut into shares with a sound header."""

    header: Header
    contribution: Contribution
    """The payload's place in an outer entry."""
    payloads: tuple[Tensor, ...] = ()
    """One a share, flat uint8: own ones, which are kept until they are counted."""


class Inbox:
    """The newest payload of each replica for each fragment.

    Args:
        store: where they lie.
        form: of payloads.
        run: SHA-256 of entry 0.
        own: this replica.
        memory_bytes: size of the payloads that are kept in memory.
        poll_seconds: time between two looks for a payload.
        on_arrival: called after one has arrived.
    """

    def __init__(
        self,
        store: Store,
        form: Form,
        run: str,
        *,
        own: int,
        memory_bytes: int,
        poll_seconds: float,
        on_arrival: Callable[[], None],
    ) -> None:
        self.here: list[dict[int, Arrived]] = [{} for _ in form.sizes]
        """The payloads that are here, by fragment and replica."""
        self._store, self._form, self._run, self._own = store, form, run, own
        self._poll_seconds, self._on_arrival = poll_seconds, on_arrival
        self._cache = PayloadCache(memory_bytes)
        # Shares are objects of their own, which nobody needs before an entry counts them.
        self._is_whole = form.num_shares == 1
        largest = max(map(form.share_bytes, range(len(form.sizes)))) if self._is_whole else 0
        self._most_bytes = largest + MOST_HEAD_BYTES
        self._scratch_N = torch.empty(max(form.sizes), dtype=torch.float32)
        self._verifying = asyncio.Lock()  # one at a time, in the scratch memory
        self._left_out: set[str] = set()

    def put(self, header: Header, own: tuple[Tensor, ...] = ()) -> None:
        """Tell of a payload that can be counted; an own one comes with its bytes."""
        here = self.here[header.fragment]
        if (older := here.get(header.replica)) is not None:
            self._cache.drop(older.header.name)
        here[header.replica] = Arrived(header, contribution(header), own)
        self._on_arrival()

    def forget(self, fragment: int, contributions: Iterable[Contribution]) -> None:
        """Give up the payloads that an outer entry has counted."""
        for counted in contributions:
            arrived = self.here[fragment].get(counted.replica)
            if arrived is not None and arrived.contribution.seq <= counted.seq:
                del self.here[fragment][counted.replica]
                self._cache.drop(arrived.header.name)

    def of_the_run(self, state: RunState, fragment: int, base: str) -> dict[int, Contribution]:
        """The payloads that were taken against the run's Θ_p, which `base` is here; others are told once.

        Raises:
            DisagreementError: as `decide.of_the_run`.
        """
        arrived = self.here[fragment]
        here = {replica: one.contribution for replica, one in arrived.items()}
        bases = {replica: one.header.base for replica, one in arrived.items()}
        sound = of_the_run(state, fragment, here, bases, self._own, base)
        for replica in here.keys() - sound.keys():
            name = payload_name(replica, here[replica].seq)
            if name not in self._left_out:
                self._left_out.add(name)
                _LOG.warning(
                    "payload %s was taken against other outer parameters than the run's after round %d: it is "
                    "left out",
                    *(name, here[replica].base_round),
                )
        return sound

    def wanted(self, state: RunState) -> tuple[int, ...]:
        """The fragments for whose next outer step another replica's payload of the open round is here."""
        return tuple(
            p
            for p, here in enumerate(self.here)
            if any(
                replica != self._own and arrived.contribution.base_round == state.fragments[p].round
                for replica, arrived in here.items()
            )
        )

    async def watch(self, replica: int, state: Callable[[], RunState]) -> None:
        """Take a replica's payloads one after another, until it has left and there are no more."""
        seq = self._first_open(replica, state())
        while True:
            before = state().members[replica]  # who has left before an answer uploads nothing after it
            name = payload_name(replica, seq)
            try:
                data = await self._store.get(name, most_bytes=self._most_bytes, patience_seconds=FOR_EVER)
            except TooLargeError as error:
                _LOG.warning("%s: it is left out", error)
                seq += 1
                continue
            if data is not None:
                seq += 1
                try:
                    header, _ = await self._opened(data, name, before.key, keep=True)
                except PayloadError as error:
                    _LOG.warning("%s: it is left out", error)
                else:
                    self.put(header)
            elif (gone := _newest_gone(replica, seq, state())) >= seq:
                seq = max(gone + 1, self._first_open(replica, state()))
            elif before.left or before.fenced:
                return
            else:
                await asyncio.sleep(self._poll_seconds * (1 if state().is_active(replica) else _SLOWER))

    def _first_open(self, replica: int, state: RunState) -> int:
        """The first of a replica's payloads that the log may still count: one a fragment is on its way."""
        return max(0, _newest_counted(replica, state) + 1 - len(self.here))

    async def of_entry(self, ref: OuterRef, state: RunState) -> Content | None:
        """The payloads that an outer entry counts; None if one was deleted.

        Raises:
            LogError: if what lies in the store is not what was counted.
        """
        parts = ref.body.contributions
        keys = (state.members[counted.replica].key for counted in parts)
        tensors = await asyncio.gather(*map(partial(self._payload, ref.body.fragment), parts, keys))
        payload_of = {c.replica: x for c, x in zip(parts, tensors, strict=True) if x is not None}
        if len(payload_of) < len(parts):
            return None
        return Content(
            payloads=payload_of, bytes_received=sum(x.numel() for m, x in payload_of.items() if m != self._own)
        )

    async def _payload(self, fragment: int, counted: Contribution, public: str) -> Tensor | None:
        """The payload of a contribution, from here or from the store; None if it was deleted."""
        arrived = self.arrived(fragment, counted)
        if arrived is not None and arrived.payloads:
            return arrived.payloads[0]
        if arrived is not None and (payload := self._cache.get(arrived.header.name)) is not None:
            return payload
        taken = await self._taken(fragment, counted, public)
        return None if taken is None else taken[1]

    async def header(self, fragment: int, counted: Contribution, public: str) -> Header | None:
        """The header of a contribution, from here or from the store; None if it was deleted.

        Raises:
            LogError: if what lies in the store is not what was counted.
        """
        if (arrived := self.arrived(fragment, counted)) is not None:
            return arrived.header
        taken = await self._taken(fragment, counted, public)
        return None if taken is None else taken[0]

    def arrived(self, fragment: int, counted: Contribution) -> Arrived | None:
        """A contribution, if it is here."""
        arrived = self.here[fragment].get(counted.replica)
        return arrived if arrived is not None and arrived.contribution == counted else None

    async def _taken(self, fragment: int, counted: Contribution, public: str) -> tuple[Header, Tensor] | None:
        """A contribution from the store; None if it was deleted."""
        name = payload_name(counted.replica, counted.seq)
        data = await self._store.get(name, most_bytes=self._most_bytes, patience_seconds=FOR_EVER)
        if data is None:
            return None
        try:
            header, payload = await self._opened(data, name, public)
        except PayloadError as error:
            raise LogError(f"the log counts a payload that is not sound: {error}") from None
        if header.fragment != fragment or contribution(header) != counted:
            raise LogError(f"the log counts {name} otherwise than it lies in the store")
        return header, payload

    async def _opened(
        self, data: "Buffer", name: str, public: str, *, keep: bool = False
    ) -> tuple[Header, Tensor]:
        """A payload after all checks, which run beside the loop; in the cache, if it is to be kept."""

        def work() -> tuple[Header, Tensor]:
            header, payload = self._checked(data, name, public)
            if keep and self._is_whole:
                self._cache.keep(name, payload)
            return header, payload

        async with self._verifying:
            return await asyncio.to_thread(work)

    def _checked(self, data: "Buffer", name: str, public: str) -> tuple[Header, Tensor]:
        header, body = open_payload(data, name=name, run=self._run, public=public)
        form, payload = self._form, body_tensor(body)
        if header.fragment >= len(form.sizes):
            raise PayloadError(f"payload {name} is of fragment {header.fragment}, and there are {len(form.sizes)}")
        check_header(header, form=form, fragment=header.fragment, replica=header.replica)
        if self._is_whole:
            verified(header, payload, form=form, scratch_N=self._scratch_N)
        return header, payload


def _newest_counted(replica: int, state: RunState) -> int:
    return max((log.last_seq.get(replica, -1) for log in state.fragments), default=-1)


def _newest_gone(replica: int, seq: int, state: RunState) -> int:
    """The newest of a replica's payloads that is absent for ever, if payload `seq` is absent; −1 if none is known.

    All up to the oldest that a fragment counted last may be deleted. Uploads end in any order, so that a later one
    may still be on its way, unless its replica is gone.
    """
    oldest = min((log.last_seq.get(replica, -1) for log in state.fragments), default=-1)
    if state.is_active(replica):
        return oldest
    return max(oldest, min(seq, _newest_counted(replica, state)))


class Outbox:
    """The payloads of one replica.

    Args:
        store: where they go.
        signer: of their headers.
        form: of payloads.
        log: the run's, up to the join.
        own: the replica.
        inbox: where own payloads lie beside the others'.
    """

    def __init__(self, store: Store, signer: Signer, form: Form, log: Log, *, own: int, inbox: Inbox) -> None:
        self.offers: dict[int, Offer] = {}
        """The offers that are in the store and were not counted yet, by fragment."""
        self.num_pending = 0
        """Uploads that are not over."""
        self._store, self._signer, self._form, self._inbox = store, signer, form, inbox
        self._log, self._own = log, own
        self._run, self._start = log.state.run, log.state.members[own].start
        self._queue: asyncio.Queue[Offer] = asyncio.Queue()
        self._newest: dict[int, int] = {}
        """Number of the newest payload of each fragment that is in the store."""

    def put(self, offer: Offer) -> None:
        """Take an outer gradient to upload; called in the loop."""
        self.num_pending += 1
        self._queue.put_nowait(offer)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Upload what comes, several at a time."""
        while True:
            tasks.create_task(self._upload(await self._queue.get()))

    def counted(self, body: Outer) -> None:
        """Forget what an outer entry has counted."""
        if any(contribution.replica == self._own for contribution in body.contributions):
            self.offers.pop(body.fragment, None)

    async def _upload(self, offer: Offer) -> None:
        """Upload the shares, and then the header, so that whoever sees it can read them; one share is its body."""
        bodies = [payload.numpy().data for payload in offer.payloads]
        header = Header(
            run=self._run,
            replica=self._own,
            seq=offer.seq,
            fragment=offer.fragment,
            base_round=offer.base_round,
            base=f"{offer.base:016x}",
            tokens=offer.tokens,
            steps=offer.steps,
            position=self._start + offer.position,
            wire=self._form.codec.format,
            num_elements=self._form.sizes[offer.fragment],
            num_bytes=bodies[0].nbytes,
            norms=offer.norms,
            sha256=await asyncio.to_thread(lambda: tuple(map(sha256, bodies))),
        )
        head = seal_payload(header, self._signer)
        if header.num_shares == 1:
            await self._create(header.name, [head, *bodies])
        else:
            names = (payload_name(self._own, offer.seq, share) for share in range(header.num_shares))
            await asyncio.gather(*(self._create(name, [body]) for name, body in zip(names, bodies, strict=True)))
            await self._create(header.name, [head])
        await self._log.check_there()  # what was written below a mount point is gone when the mount is back
        self.num_pending -= 1
        if offer.seq < self._newest.get(offer.fragment, 0):
            return  # after an outage, uploads end in any order
        self._newest[offer.fragment] = offer.seq
        self.offers[offer.fragment] = offer
        self._inbox.put(header, offer.payloads)

    async def _create(self, name: str, buffers: "list[bytes | memoryview]") -> None:
        if await self._store.create(name, buffers, patience_seconds=FOR_EVER) is not None:
            raise LogError(f"{name} was written by another process: two runs share one place of the store")
