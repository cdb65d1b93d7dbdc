"""The averages that outer entries were taken with, made again from the shares that they count.

Shapes: N elements of one fragment, S of a share.
"""

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.errors import PayloadError
from diloco.reduction.reduction import Average
from diloco.rendezvous import averages, payloads
from diloco.rendezvous.averages import AverageHeader
from diloco.rendezvous.counted import CountedPayloads
from diloco.rendezvous.entries import Contribution, LogError
from diloco.rendezvous.payloads import Header
from diloco.rendezvous.state import OuterRef
from diloco.rendezvous.store import TooLargeError
from diloco.rendezvous.verify import verified


class CountedShares(CountedPayloads):
    """The payloads of a run's outer entries where fragments are cut into shares."""

    def names_of(self, counted: Contribution) -> Sequence[str]:
        """The objects of one contribution: its header, and its shares."""
        shares = range(self.form.num_shares)
        of_shares = (payloads.name_of(counted.replica, counted.seq, share) for share in shares)
        return (*super().names_of(counted), *of_shares)

    def average(self, ref: OuterRef, several: Mapping[int, Tensor], to_N: Tensor) -> Average:
        """Δ_p of an entry, from the averages of its shares."""
        body, cohort = ref.body, self.state.cohort(ref.body.contributions)
        in_order = [several[share] for share in range(self.form.num_shares)]
        return averages.joined(self.form, body.fragment, body.round, cohort, in_order, to_N)

    async def _averaged(self, ref: OuterRef, headers: Sequence[tuple[Header, memoryview]]) -> dict[int, Tensor]:
        return {
            share: await self._share(ref, [h for h, _ in headers], share) for share in range(self.form.num_shares)
        }

    async def _share(self, ref: OuterRef, headers: Sequence[Header], share: int) -> Tensor:
        """The average of one share, made again, and compared with the one in the store, if it is there."""
        several = await asyncio.gather(*(self._contributed(header, share) for header in headers))
        sound = {h.replica: x for h, x in zip(headers, several, strict=True) if isinstance(x, Tensor)}
        unsound = {h.replica: x for h, x in zip(headers, several, strict=True) if not isinstance(x, Tensor)}
        stored = await self._stored(ref, share)
        # A replica that alone has made it, since all members died, has told nobody.
        left_out = tuple(unsound) if stored is None else stored[0].left_out
        name, entry = averages.name_of(ref.number, share), f"entry {ref.number} of the log"
        for replica, reason in unsound.items():
            if replica not in left_out:
                raise LogError(
                    f"{entry}: {name}, by replica {_author(stored)}, counts a share that is not sound: {reason}"
                )
            self.notes.append(f"{entry}: {name} leaves out replica {replica}: {reason}")
        for replica in sorted(set(left_out) & set(sound)):
            self.notes.append(
                f"{entry}: {name} leaves out replica {replica}, whose share is sound: either replica "
                f"{_author(stored)} could not read it, or it lies"
            )
        counted = {replica: payload for replica, payload in sound.items() if replica not in left_out}
        payload, _ = averages.average_of(self.state, self.form, ref.body, share, counted)
        if stored is not None and not stored[1].equal(payload):
            raise LogError(
                f"{entry}: {name} is not the average of what the entry counts: replica {_author(stored)} made it"
            )
        return payload

    async def _contributed(self, header: Header, share: int) -> Tensor | str:
        """A member's payload of a share, or why it is not sound."""
        name = payloads.name_of(header.replica, header.seq, share)
        try:
            data = await self.store.get(name, most_bytes=header.num_bytes)
            if data is None:
                return f"payload {name} is not in the store"
            payloads.check_share(header, share, data)
            payload = payloads.body_tensor(memoryview(data))
            verified(header, payload, form=self.form, share=share)
        except (PayloadError, TooLargeError) as error:
            return str(error)
        self.sizes.append(len(data))
        return payload

    async def _stored(self, ref: OuterRef, share: int) -> tuple[AverageHeader, Tensor] | None:
        """The average that the replicas have taken; None if it is not in the store."""
        name = averages.name_of(ref.number, share)
        data = await self.store.get(name, most_bytes=averages.most_bytes(self.form, ref.body.fragment))
        if data is None:
            return None
        try:
            return averages.opened(data, state=self.state, form=self.form, ref=ref, share=share)
        except PayloadError as error:
            raise LogError(f"entry {ref.number} of the log: {error}") from None


def _author(stored: tuple[AverageHeader, Tensor] | None) -> int:
    assert stored is not None, "without an average whoever is unsound is left out, and nobody else"
    return stored[0].replica
