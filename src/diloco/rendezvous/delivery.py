"""Outer steps on their way from the log to the training thread: in the log's order, once their content is here."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable

from diloco.rendezvous.archive import newest_snapshot
from diloco.rendezvous.contract import Content, Decision, Form, StoredSnapshot
from diloco.rendezvous.entries import LogError
from diloco.rendezvous.inbox import Inbox
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.state import OuterRef
from diloco.rendezvous.store import Store

MOST_DECISIONS_A_FRAGMENT = 2
"""Decisions with content that wait for the training thread, which may be evaluating, or stopped."""
_AHEAD = 4
"""Outer entries whose content is downloaded at once."""

ContentOf = Callable[[OuterRef, RunState], Awaitable[Content | None]]
"""Makes or downloads the content of an outer entry; None if it was deleted."""


class Delivery:
    """Hands outer steps over for one replica.

    Args:
        store: the run's.
        form: of payloads.
        inbox: where payloads lie until they are counted.
        own: this replica.
        content_of: the way to an outer step's content.
        state: gives the state after all entries that were read.
        newest: reads the log to its end, and gives the state.
        poll_seconds: time between two looks at what the training thread has taken.
    """

    def __init__(
        self,
        store: Store,
        form: Form,
        inbox: Inbox,
        *,
        own: int,
        content_of: ContentOf,
        state: Callable[[], RunState],
        newest: Callable[[], Awaitable[RunState]],
        poll_seconds: float,
    ) -> None:
        self.decisions: deque[Decision] = deque()
        """The decisions for the training thread, in the log's order."""
        self.news = threading.Condition()
        """The condition that is notified when a decision is ready."""
        self._store, self._form, self._inbox, self._own = store, form, inbox, own
        self._content_of, self._state, self._newest = content_of, state, newest
        self._poll_seconds = poll_seconds
        self._queue: asyncio.Queue[tuple[int, OuterRef]] = asyncio.Queue()
        self._snapshots: dict[int, StoredSnapshot] = {}
        """By fragment, the one that stands for several outer steps."""

    def put(self, author: int, ref: OuterRef) -> None:
        """Take an outer entry and its author, −1 if it was read before this replica joined; called in the loop."""
        self._queue.put_nowait((author, ref))

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Deliver for ever.

        Raises:
            LogError: if the content of an outer step is not what its entry counts.
        """
        ahead: deque[tuple[int, OuterRef, asyncio.Task[Content | None]]] = deque()
        while True:
            while not ahead or (len(ahead) < _AHEAD and not self._queue.empty()):
                author, ref = await self._queue.get()
                ahead.append((author, ref, tasks.create_task(self._content(ref))))
            author, ref, task = ahead.popleft()
            while len(self.decisions) >= MOST_DECISIONS_A_FRAGMENT * len(self._form.sizes):
                await asyncio.sleep(self._poll_seconds)  # until the training thread has taken some
            decision = await self._decision(author, ref, await task)
            self._inbox.forget(ref.body.fragment, ref.body.contributions)
            with self.news:
                self.decisions.append(decision)
                self.news.notify_all()

    async def _content(self, ref: OuterRef) -> Content | None:
        return await self._content_of(ref, self._state())

    async def _decision(self, author: int, ref: OuterRef, content: Content | None) -> Decision:
        state, body, parts = self._state(), ref.body, ref.body.contributions
        if content is not None:
            self._snapshots.pop(body.fragment, None)
        return Decision(
            number=ref.number,
            fragment=body.fragment,
            round=body.round,
            before=int(body.before, 16),
            cohort=state.cohort(parts),
            content=await self._snapshot_after(ref) if content is None else content,
            base_rounds={c.replica: c.base_round for c in parts},
            is_own=any(c.replica == self._own for c in parts),
            with_snapshot=author == self._own and state.rules.is_kept(body.round - 1),
        )

    async def _snapshot_after(self, ref: OuterRef) -> StoredSnapshot:
        """The snapshot that stands for an outer step whose content was deleted, since it is long ago."""
        p, least = ref.body.fragment, ref.body.round
        if (stored := self._snapshots.get(p)) is not None and stored.round >= least:
            return stored
        stored = await self._newest_snapshot(ref)
        self._snapshots[p] = stored
        return stored

    async def _newest_snapshot(self, ref: OuterRef) -> StoredSnapshot:
        """A fragment's newest snapshot; while it is read, newer ones may take its place, and it is deleted."""
        p, state = ref.body.fragment, self._state()
        while True:
            error = LogError(f"entry {ref.number} of the log counts payloads that are not in the store")
            try:
                stored = await newest_snapshot(self._store, state, p, self._form.sizes[p])
                if stored is not None and stored.round >= ref.body.round:
                    return stored
            except LogError as missing:
                error = missing
            newest = await self._newest()
            if newest.fragments[p].snapshots == state.fragments[p].snapshots:
                raise error
            state = newest
