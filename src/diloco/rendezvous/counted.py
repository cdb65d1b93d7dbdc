"""The payloads that outer entries count, and the averages of their shares: downloaded ahead, and checked.

Shapes: N elements of one fragment.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from diloco.errors import PayloadError
from diloco.reduction.reduction import Average, add_up
from diloco.rendezvous import payloads
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import Contribution, LogError
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.payloads import Header
from diloco.rendezvous.signed import MOST_HEAD_BYTES
from diloco.rendezvous.state import OuterRef
from diloco.rendezvous.store import Store
from diloco.rendezvous.verify import check_header, verified

_AHEAD = 3
"""Outer entries whose payloads are downloaded while those of another are used."""


@dataclass(frozen=True, kw_only=True)
class CountedPayloads:
    """The payloads of a run's outer entries."""

    store: Store
    form: Form
    state: RunState
    """The state after the last entry."""
    bases: Sequence[Mapping[int, str]]
    """For each fragment the digest of Θ_p by round, as far as the log tells it."""
    present: frozenset[str]
    """The names of the payloads in the store."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each payload that was checked."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what looks strange, and is possible."""

    @cached_property
    def _needed(self) -> frozenset[int]:
        """Entries whose payloads can't be retired yet."""
        return frozenset(ref.number for log in self.state.fragments for ref in log.since)

    def is_retired(self, ref: OuterRef) -> bool:
        """Whether a payload of an entry was deleted, since a snapshot had made it needless."""
        names = (name for counted in ref.body.contributions for name in self.names_of(counted))
        return ref.number not in self._needed and not self.present.issuperset(names)

    def names_of(self, counted: Contribution) -> Sequence[str]:
        """The objects of one contribution."""
        return (payloads.name_of(counted.replica, counted.seq),)

    async def of(self, refs: Sequence[OuterRef]) -> AsyncIterator[tuple[OuterRef, dict[int, Tensor] | None]]:
        """Entries with what is averaged; None for an entry whose payloads are retired.

        The payloads by replica, or those of the averages by share, flat uint8.

        Raises:
            LogError: naming an entry, if a payload is missing that can't be retired yet, or is not what the entry
                says of it.
        """
        tasks: deque[tuple[OuterRef, asyncio.Task[dict[int, Tensor] | None]]] = deque()
        try:
            for ref in refs:
                tasks.append((ref, asyncio.create_task(self._of_entry(ref))))
                if len(tasks) > _AHEAD:
                    ready, task = tasks.popleft()
                    yield ready, await task
            while tasks:
                ready, task = tasks.popleft()
                yield ready, await task
        finally:
            for _, task in tasks:
                task.cancel()
            await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    def average(self, ref: OuterRef, several: Mapping[int, Tensor], to_N: Tensor) -> Average:
        """Δ_p of an entry, from what `of` gave; the total is written to `to_N`."""
        body, form = ref.body, self.form
        keys = [form.key(body.fragment, c.base_round, c.replica) for c in body.contributions]
        return add_up(form.codec, several, to_N, keys, self.state.cohort(body.contributions))

    async def _of_entry(self, ref: OuterRef) -> dict[int, Tensor] | None:
        if self.is_retired(ref):
            return None
        parts = ref.body.contributions
        headers = await asyncio.gather(*(self._header(ref, part) for part in parts))
        return await self._averaged(ref, headers)

    async def _averaged(self, ref: OuterRef, headers: Sequence[tuple[Header, memoryview]]) -> dict[int, Tensor]:
        """The payloads or averages of an entry, from the objects that it names."""
        payload_of = {}
        for header, body in headers:
            payload_of[header.replica] = payloads.body_tensor(body)
            try:
                verified(header, payload_of[header.replica], form=self.form)
            except PayloadError as error:
                raise LogError(f"{_entry(ref)} counts a payload that is not sound: {error}") from None
        return payload_of

    async def _header(self, ref: OuterRef, counted: Contribution) -> tuple[Header, memoryview]:
        """The header and the body of an object that an entry names."""
        p, name = ref.body.fragment, payloads.name_of(counted.replica, counted.seq)
        most = MOST_HEAD_BYTES + (self.form.share_bytes(p) if self.form.num_shares == 1 else 0)
        data = await self.store.get(name, most_bytes=most)
        if data is None:
            raise LogError(f"{_entry(ref)} counts {name}, which is not in the store")
        public = self.state.members[counted.replica].key
        try:
            header, body = payloads.opened(data, name=name, run=self.state.run, public=public)
            check_header(header, form=self.form, fragment=p, replica=counted.replica)
        except PayloadError as error:
            raise LogError(f"{_entry(ref)} counts a payload that is not sound: {error}") from None
        if payloads.contribution(header) != counted:
            raise LogError(f"{_entry(ref)} does not count {name} as it lies in the store")
        base = self.bases[p].get(counted.base_round)
        if base is not None and header.base != base:
            raise LogError(
                f"{_entry(ref)} counts {name}, which was taken against other outer parameters than those after "
                f"round {counted.base_round}"
            )
        self.sizes.append(len(data))
        return header, body


def _entry(ref: OuterRef) -> str:
    return f"entry {ref.number} of the log"
