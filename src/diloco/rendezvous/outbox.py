"""A replica's own payloads: uploaded, and remembered until they are counted."""

import asyncio

from diloco.rendezvous import payloads
from diloco.rendezvous.contract import Form, Offer
from diloco.rendezvous.entries import LogError, Outer
from diloco.rendezvous.inbox import Inbox
from diloco.rendezvous.keys import Signer
from diloco.rendezvous.log import FOR_EVER
from diloco.rendezvous.store import Store


class Outbox:
    """The payloads of one replica.

    Args:
        store: where they go.
        signer: of their headers.
        form: of payloads.
        run: SHA-256 of entry 0.
        own: the replica.
        start: where in its slot of the text it began, in tokens.
        inbox: where own payloads lie beside the others'.
    """

    def __init__(
        self, store: Store, signer: Signer, form: Form, *, run: str, own: int, start: int, inbox: Inbox
    ) -> None:
        self.offers: dict[int, Offer] = {}
        """Those that are in the store and were not counted yet, by fragment."""
        self.num_pending = 0
        """Uploads that are not over."""
        self._store, self._signer, self._form, self._inbox = store, signer, form, inbox
        self._run, self._own, self._start = run, own, start
        self._queue: asyncio.Queue[Offer] = asyncio.Queue()

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
        body = offer.payload.numpy().data
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
            norm=offer.norm,
            num_bytes=body.nbytes,
            sha256=await asyncio.to_thread(payloads.digest, body),
        )
        head = payloads.sealed(header, self._signer)
        other = await self._store.create(header.name, [head, body], patience_seconds=FOR_EVER)
        if other is not None:
            raise LogError(f"{header.name} was written by another process: two runs share one place of the store")
        self.num_pending -= 1
        self.offers[offer.fragment] = offer
        self._inbox.put(header, offer.payload)
