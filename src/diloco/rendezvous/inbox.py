"""The other replicas' payloads: found by their names, downloaded, verified, and kept until they are counted."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.rendezvous import payloads
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import Contribution, LogError, Outer
from diloco.rendezvous.log import FOR_EVER
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.payload_cache import PayloadCache
from diloco.rendezvous.payloads import Header
from diloco.rendezvous.store import Store, TooLargeError
from diloco.rendezvous.verify import verified

_LOG = logging.getLogger("diloco")
_SLOWER = 16
"""A replica that is not active is asked so much less often."""


@dataclass(frozen=True)
class Arrived:
    """A payload that was here and sound."""

    contribution: Contribution
    base: str
    """The checksum of Θ_p in its header."""
    payload: Tensor | None = None
    """Flat uint8: an own one, which is kept until it is counted."""


class Inbox:
    """The newest payload of each replica for each fragment.

    Args:
        store: where they lie.
        form: of payloads.
        run: SHA-256 of entry 0.
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
        memory_bytes: int,
        poll_seconds: float,
        on_arrival: Callable[[], None],
    ) -> None:
        self.here: list[dict[int, Arrived]] = [{} for _ in form.sizes]
        """By fragment and replica."""
        self._store, self._form, self._run = store, form, run
        self._poll_seconds, self._on_arrival = poll_seconds, on_arrival
        self._cache = PayloadCache(memory_bytes)
        largest = max(map(form.codec.payload_bytes, form.sizes))
        self._most_bytes = largest + payloads.MOST_HEAD_BYTES
        self._scratch_N = torch.empty(max(form.sizes), dtype=torch.float32)
        self._verifying = asyncio.Lock()  # one at a time, in the scratch memory

    def put(self, header: Header, payload: Tensor | None = None) -> None:
        """Tell of a payload that can be counted; an own one comes with its bytes."""
        here = self.here[header.fragment]
        if (older := here.get(header.replica)) is not None:
            self._cache.drop(payloads.name_of(header.replica, older.contribution.seq))
        here[header.replica] = Arrived(payloads.contribution(header), header.base, payload)
        self._on_arrival()

    def forget(self, fragment: int, contributions: Iterable[Contribution]) -> None:
        """Give up the payloads that an outer entry has counted."""
        for counted in contributions:
            arrived = self.here[fragment].get(counted.replica)
            if arrived is not None and arrived.contribution.seq <= counted.seq:
                del self.here[fragment][counted.replica]
                self._cache.drop(payloads.name_of(counted.replica, arrived.contribution.seq))

    def wanted(self, state: RunState, own: int) -> tuple[int, ...]:
        """The fragments for whose next outer step another replica's payload of the open round is here."""
        return tuple(
            p
            for p, here in enumerate(self.here)
            if any(
                replica != own and arrived.contribution.base_round == state.fragments[p].round
                for replica, arrived in here.items()
            )
        )

    async def watch(self, replica: int, state: Callable[[], RunState]) -> None:
        """Take a replica's payloads one after another, until it has left and there are no more."""
        counted = max((log.last_seq.get(replica, -1) for log in state().fragments), default=-1)
        seq = max(0, counted + 1 - len(self.here))
        while True:
            public = state().members[replica].key
            name = payloads.name_of(replica, seq)
            try:
                data = await self._store.get(name, most_bytes=self._most_bytes, patience_seconds=FOR_EVER)
            except TooLargeError as error:
                _LOG.warning("%s: it is left out", error)
                seq += 1
                continue
            if data is not None or seq <= counted:
                seq += 1
            if data is not None:
                try:
                    header, _ = await self._opened(data, name, public, keep=True)
                except PayloadError as error:
                    _LOG.warning("%s: it is left out", error)
                else:
                    self.put(header)
            elif seq > counted:
                now = state()
                if now.members[replica].left or now.members[replica].fenced:
                    return
                await asyncio.sleep(self._poll_seconds * (1 if now.is_active(replica) else _SLOWER))

    async def of_entry(self, body: Outer, state: RunState) -> list[Tensor | None]:
        """The payloads that an outer entry counts, in its order; None for one that was deleted.

        Raises:
            LogError: as `payload`.
        """
        keys = [state.members[counted.replica].key for counted in body.contributions]
        return await asyncio.gather(*map(partial(self.payload, body.fragment), body.contributions, keys))

    async def payload(self, fragment: int, counted: Contribution, public: str) -> Tensor | None:
        """The payload of a contribution, from here or from the store; None if it was deleted.

        Raises:
            LogError: if what lies in the store is not what was counted.
        """
        arrived = self.here[fragment].get(counted.replica)
        name = payloads.name_of(counted.replica, counted.seq)
        if arrived is not None and arrived.contribution == counted:
            payload = self._cache.get(name) if arrived.payload is None else arrived.payload
            if payload is not None:
                return payload
        data = await self._store.get(name, most_bytes=self._most_bytes, patience_seconds=FOR_EVER)
        if data is None:
            return None
        try:
            header, payload = await self._opened(data, name, public)
        except PayloadError as error:
            raise LogError(f"the log counts a payload that is not sound: {error}") from None
        if header.fragment != fragment or payloads.contribution(header) != counted:
            raise LogError(f"the log counts {name} otherwise than it lies in the store")
        return payload

    async def _opened(
        self, data: "payloads.Buffer", name: str, public: str, *, keep: bool = False
    ) -> tuple[Header, Tensor]:
        """A payload after all checks, which run beside the loop; in the cache, if it is to be kept."""

        def work() -> tuple[Header, Tensor]:
            header, payload = self._checked(data, name, public)
            if keep:
                self._cache.keep(name, payload)
            return header, payload

        async with self._verifying:
            return await asyncio.to_thread(work)

    def _checked(self, data: "payloads.Buffer", name: str, public: str) -> tuple[Header, Tensor]:
        header, body = payloads.opened(data, name=name, run=self._run, public=public)
        form = self._form
        if header.fragment >= len(form.sizes):
            raise PayloadError(f"payload {name} is of fragment {header.fragment}, and there are {len(form.sizes)}")
        size = form.sizes[header.fragment]
        key = form.key(header.fragment, header.base_round, header.replica)
        scratch_N = self._scratch_N[:size]
        verified(header, body, codec=form.codec, num_elements=size, key=key, scratch_N=scratch_N)
        return header, payloads.body_tensor(body)
