"""The payloads that outer entries count: downloaded ahead, and checked against the entry.

Shapes: N elements of one fragment.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from diloco.errors import PayloadError
from diloco.rendezvous import payloads
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import Contribution, LogError
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.state import OuterRef
from diloco.rendezvous.store import Store
from diloco.rendezvous.verify import verified

_AHEAD = 3
"""Outer entries whose payloads are downloaded while those of another are used."""


@dataclass(frozen=True, kw_only=True)
class CountedPayloads:
    """The payloads of a run's outer entries."""

    store: Store
    form: Form
    state: RunState
    """After the last entry."""
    bases: Sequence[Mapping[int, str]]
    """For each fragment the checksum of Θ_p by round, as far as the log tells it."""
    present: frozenset[str]
    """The names of the payloads in the store."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each payload that was checked."""

    def are_present(self, ref: OuterRef) -> bool:
        """Whether no payload of an entry is retired."""
        return all(name_of(counted) in self.present for counted in ref.body.contributions)

    async def of(self, refs: Sequence[OuterRef]) -> AsyncIterator[tuple[OuterRef, dict[int, Tensor] | None]]:
        """Entries with their payloads by replica, each flat uint8; None for an entry whose payloads are retired.

        Raises:
            LogError: naming an entry, if a payload is missing that can't be retired yet, or is not what the entry
                says of it.
        """
        needed = {ref.number for log in self.state.fragments for ref in log.since}
        tasks: deque[tuple[OuterRef, asyncio.Task[dict[int, Tensor] | None]]] = deque()
        try:
            for ref in refs:
                tasks.append((ref, asyncio.create_task(self._of_entry(ref, ref.number in needed))))
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

    async def _of_entry(self, ref: OuterRef, is_needed: bool) -> dict[int, Tensor] | None:
        if not is_needed and not self.are_present(ref):
            return None
        parts = ref.body.contributions
        tensors = await asyncio.gather(*(self._checked(ref, part) for part in parts))
        return {part.replica: tensor for part, tensor in zip(parts, tensors, strict=True)}

    async def _checked(self, ref: OuterRef, counted: Contribution) -> Tensor:
        p, name, entry = ref.body.fragment, name_of(counted), f"entry {ref.number} of the log"
        num_elements = self.form.sizes[p]
        most = self.form.codec.payload_bytes(num_elements) + payloads.MOST_HEAD_BYTES
        data = await self.store.get(name, most_bytes=most)
        if data is None:
            raise LogError(f"{entry} counts {name}, which is not in the store")
        public = self.state.members[counted.replica].key
        try:
            header, body = payloads.opened(data, name=name, run=self.state.run, public=public)
            key = self.form.key(p, header.base_round, counted.replica)
            verified(header, body, codec=self.form.codec, num_elements=num_elements, key=key)
        except PayloadError as error:
            raise LogError(f"{entry} counts a payload that is not sound: {error}") from None
        if payloads.contribution(header) != counted:
            raise LogError(f"{entry} does not count {name} as it lies in the store")
        base = self.bases[p].get(counted.base_round)
        if base is not None and header.base != base:
            raise LogError(
                f"{entry} counts {name}, which was taken against other outer parameters than those after round "
                f"{counted.base_round}"
            )
        self.sizes.append(len(data))
        return payloads.body_tensor(body)


def name_of(counted: Contribution) -> str:
    """The name of a payload in the store."""
    return payloads.name_of(counted.replica, counted.seq)
