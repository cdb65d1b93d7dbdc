"""A replica's own payloads: uploaded, and remembered until they are counted."""

import asyncio

from diloco.files import sha256
from diloco.rendezvous import payloads
from diloco.rendezvous.contract import Form, Offer
from diloco.rendezvous.entries import LogError, Outer
from diloco.rendezvous.inbox import Inbox
from diloco.rendezvous.keys import Signer
from diloco.rendezvous.log import FOR_EVER, Log
from diloco.rendezvous.store import Store


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
        header = payloads.Header(
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
        head = payloads.sealed(header, self._signer)
        if header.num_shares == 1:
            await self._create(header.name, [head, *bodies])
        else:
            names = (payloads.name_of(self._own, offer.seq, share) for share in range(header.num_shares))
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
