"""A replica's work beside its training thread: follow the log, decide, hand decisions over.

All of it runs in one asyncio loop. The training thread sets plain values here, and takes decisions from a queue.
"""

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from diloco.errors import DilocoError, ExchangeError, UserError, listed
from diloco.rendezvous.contract import (
    MOST_DECISIONS_PER_FRAGMENT,
    Content,
    Decision,
    Form,
    Offer,
    StoredSnapshot,
)
from diloco.rendezvous.deciding import Decider, Pace
from diloco.rendezvous.log.entries import Body, Close, Entry, Leave, LogError, Outer, Snapshot
from diloco.rendezvous.log.index import write_index
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import FOR_EVER, Log, LostEntryError, source_of
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.rendezvous.objects import Objects, seal_snapshot, snapshot_name
from diloco.rendezvous.payloads import Access, Averager, Inbox, Outbox
from diloco.rendezvous.prices import longest_poll
from diloco.rendezvous.store import Store

_POLLS_PER_LOOK = 60
"""Polls between two looks at the newest entry that is known: in a bucket, two requests per minute."""
_AHEAD = 4
"""Outer entries whose content is downloaded at once."""
ContentOf = Callable[[OuterRef], Coroutine[Any, Any, Content | None]]
"""Makes or downloads the content of an outer entry; None if it was deleted."""


class _Entry(NamedTuple):
    """An outer entry to hand over."""

    author: int
    """The replica that wrote it; −1 if it was read before this one joined."""
    ref: OuterRef
    num_shifts: int
    """As in `Decision`."""
    oldest_base: int
    """As in `Decision`."""


class Delivery:
    """Hands outer steps over for one replica.

    Args:
        access: the replica's.
        inbox: where payloads lie until they are counted.
        content_of: the way to an outer step's content.
    """

    def __init__(self, access: Access, inbox: Inbox, content_of: ContentOf) -> None:
        self.decisions: deque[Decision] = deque()
        """The decisions for the training thread, in the log's order."""
        self.news = threading.Condition()
        """The condition that is notified when a decision is ready."""
        self._access, self._inbox, self._content_of = access, inbox, content_of
        self._queue: asyncio.Queue[_Entry] = asyncio.Queue()
        self._num_ahead = 0
        self._snapshots: dict[int, StoredSnapshot] = {}
        """By fragment, the one that stands for several outer steps."""

    @property
    def is_done(self) -> bool:
        """True if all that was put here is handed over."""
        return self._num_ahead == 0

    def put(self, author: int, ref: OuterRef) -> None:
        """Take an outer entry and its author, −1 if it was read before this replica joined; called in the loop."""
        state = self._access.state  # after this entry, unless it was read before the join
        log = state.fragments[ref.body.fragment]
        oldest_base = log.oldest_base(state.rules.max_stale) if author >= 0 else 0
        self._num_ahead += 1
        self._queue.put_nowait(_Entry(author, ref, state.num_shifts(log.since)[ref.number], oldest_base))

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Hand outer steps over until cancelled.

        Raises:
            LogError: if the content of an outer step is not what its entry counts.
        """
        ahead: deque[tuple[_Entry, asyncio.Task[Content | None]]] = deque()
        while True:
            while not ahead or (len(ahead) < _AHEAD and not self._queue.empty()):
                entry = await self._queue.get()
                ahead.append((entry, tasks.create_task(self._content_of(entry.ref))))
            entry, task = ahead.popleft()
            while len(self.decisions) >= MOST_DECISIONS_PER_FRAGMENT * len(self._access.objects.form.sizes):
                await asyncio.sleep(self._access.poll_seconds)  # until the training thread has taken some
            decision = await self._decision(entry, await task)
            self._inbox.forget(decision.fragment, entry.ref.body.contributions)
            with self.news:
                self.decisions.append(decision)
                self._num_ahead -= 1
                self.news.notify_all()

    async def _decision(self, entry: "_Entry", content: Content | None) -> Decision:
        author, ref = entry.author, entry.ref
        body, parts = ref.body, ref.body.contributions
        if content is None:
            whole = await self._snapshot_after(ref)
            own_seq = self._own_seq_until(body.fragment, whole.round)
        else:
            whole, own_seq = content, next((c.seq for c in parts if c.replica == self._access.own), -1)
            self._snapshots.pop(body.fragment, None)
        state = self._access.state
        with_snapshot = author == self._access.own and state.rules.is_kept(body.round - 1)
        return replace(
            Decision.of(ref, state, whole),
            num_shifts=entry.num_shifts,
            oldest_base=entry.oldest_base,
            own_seq=own_seq,
            with_snapshot=with_snapshot,
        )

    def _own_seq_until(self, fragment: int, round: int) -> int:
        """The newest of this replica's offers that the rounds up to one have counted; −1 if they counted none.

        At most one offer of a fragment is not decided: older ones than the newest that was counted do not matter.
        """
        state, own = self._access.state, self._access.own
        log, slot = state.fragments[fragment], state.members[own].slot
        return log.last_seq.get(own, -1) if log.last_round.get(slot, 0) <= round else -1

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
        p, state = ref.body.fragment, self._access.state
        while True:
            error = LogError(f"{source_of(ref.number)} counts payloads that are not in the store")
            if (refs := state.fragments[p].snapshots) and refs[-1].round >= ref.body.round:
                try:
                    return await self._access.objects.snapshot(p, refs[-1])
                except LogError as missing:
                    error = missing
            newest = await self._access.newest()
            if newest.fragments[p].snapshots == state.fragments[p].snapshots:
                raise error
            state = newest


_T = TypeVar("_T")


class Background:
    """A loop that runs from `start` to `stop`, in the process that started it; what forks from that has none.

    Raises:
        UserError: by what is asked of it in a fork, where nobody would do it.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._work: list[Future[Any]] = []
        self._awaited = set[Future[Any]]()
        """The futures that threads wait for."""
        self._is_over = False

    def start(self) -> None:
        """Start the thread."""
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._thread.start()
        atexit.register(self.stop)

    def _check_process(self, work: "Coroutine[Any, Any, Any] | None" = None) -> None:
        if self._process == os.getpid():
            return
        if work is not None:
            work.close()  # else Python warns that nobody awaits it
        raise UserError(
            f"this process was forked from process {self._process}, which alone has the thread "
            f"{self._thread.name!r}: make a Follower, Publisher or StoreRendezvous in the process that uses it"
        )

    def run(self, work: "Coroutine[Any, Any, Any]") -> None:
        """Start work that goes on until it ends or the loop does."""
        self._check_process(work)
        self._work.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: "Callable[..., object]", *arguments: object) -> None:
        """Call a function in the loop, soon."""
        self._check_process()
        self._loop.call_soon_threadsafe(function, *arguments)

    def wait(self, work: "Coroutine[Any, Any, _T]", seconds: float, name: str) -> _T:
        """The result of work in the loop.

        Args:
            work: a coroutine.
            seconds: bound of the wait.
            name: of the other side, for the error.

        Raises:
            ExchangeError: if there is no result within that time.
        """
        self._check_process(work)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._awaited.add(future)
        if self._is_over:
            future.cancel()
        try:
            return future.result(seconds)
        except FutureTimeoutError:
            raise ExchangeError(f"{name} gave no answer within {seconds:g} s") from None
        finally:
            future.cancel()  # also where Ctrl-C ends the wait
            self._awaited.discard(future)

    def stop(self) -> None:
        """Cancel all work and end the thread, bounded in time; else the end of the process does."""
        atexit.unregister(self.stop)
        if not self._thread.is_alive():
            return
        for work in self._work:
            work.cancel()
        # What was cancelled gets a moment to end.
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.05, self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _serve(self) -> None:
        """Run the loop until `stop`, and close it."""
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            ends = self._loop.create_task(asyncio.wait(tasks, timeout=1.0))
            ends.add_done_callback(lambda _: self._loop.stop())
            self._loop.run_forever()
        self._is_over = True
        for future in [*self._awaited]:  # of work that came too late, or needs longer to end
            future.cancel()
        self._loop.close()


class SnapshotQueue:
    """The snapshots that a replica uploads one after another, of each fragment the newest that waits.

    Args:
        store: where they go.
        log: the run's.
    """

    def __init__(self, store: Store, log: Log) -> None:
        self._store, self._log = store, log
        self._waiting: dict[int, tuple[int, Mapping[str, Tensor]]] = {}
        self._has_more = asyncio.Event()

    def put(self, fragment: int, last_round: int, vectors: Mapping[str, Tensor]) -> None:
        """Take a fragment's vectors after a round; called in the loop."""
        self._waiting[fragment] = last_round, vectors
        self._has_more.set()

    async def run(self, append: Callable[[Snapshot], None]) -> None:
        """Upload snapshots as they come, and append an entry for each, until cancelled."""
        while True:
            await self._has_more.wait()
            fragment = next(iter(self._waiting))
            last_round, vectors = self._waiting.pop(fragment)
            if not self._waiting:
                self._has_more.clear()
            buffers, digest = await asyncio.to_thread(seal_snapshot, vectors)
            name = snapshot_name(fragment, last_round, digest)
            await self._store.create(name, buffers, patience_seconds=FOR_EVER)
            await self._log.check_mounted()
            append(Snapshot(fragment=fragment, round=last_round, sha256=digest))


class LogThread:
    """Follows the log for one replica.

    Args:
        store: the run's.
        log: read up to this replica's join.
        own: its number.
        form: of payloads.
        signer: of its entries and payloads.
        pace: its timing.
    """

    def __init__(self, store: Store, log: Log, own: int, form: Form, signer: Signer, pace: Pace) -> None:
        self.step = 0
        self.overlap_seconds = 0.0
        """τ in seconds, by the last own offer and this replica's pace; 0 while the training thread waits."""
        self.draining_since: float | None = None
        """Time at which the training thread took the last of its `step` inner steps; None while it takes more."""
        self.taken_rounds: Sequence[tuple[int, int]] = ((-1, 0),) * len(form.sizes)
        """For each fragment the newest round that the training thread has taken, and Θ_p's digest after it."""
        self.wanted: Sequence[int] = ()
        """Fragments whose open round has another's payload."""
        self.are_offers_counted = False
        """True once the training thread offers nothing more, and its offers were counted."""
        self.failure: str | None = None
        """The reason why this replica can't go on."""
        self._store, self._log, self._own = store, log, own
        self._signer, self._pace = signer, pace
        self._changed = asyncio.Event()
        log.patience_seconds = FOR_EVER
        access = Access(
            objects=Objects(store=store, form=form, run=log.state.run),
            log=log,
            own=own,
            signer=signer,
            poll_seconds=pace.poll_seconds,
            longest_poll=self._longest_poll,
            newest=self._newest,
        )
        self.inbox = Inbox(access, memory_bytes=pace.memory_bytes, on_arrival=self._on_arrival)
        self.outbox, self.averager = Outbox(access, self.inbox), Averager(access, self.inbox)
        content_of = self.inbox.of_entry if form.second is None else self.averager.of_entry
        self.delivery = Delivery(access, self.inbox, content_of)
        self.decisions, self.news = self.delivery.decisions, self.delivery.news
        """The decisions for the training thread, and the condition that is notified of them, or of a failure."""
        self._outers = deque[OuterRef]()
        """The outer entries from the first on that the training thread has not taken."""
        self._num_reads = 0
        self._to_append: deque[Body] = deque()
        self.snapshots = SnapshotQueue(store, log)
        """The snapshots to upload, each with its entry, unless a newer one comes before its turn."""
        self._watched: set[int] = set()
        self._decider = Decider(own, pace)
        self._closes_at: float | None = None
        """Time at which this replica closes the run, even if others have not left; None before it ends the run."""
        self._has_early_leaver = False
        """True once, at the end of the run, another replica was counted after it had left: it may offer more."""
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def state(self) -> RunState:
        """The state that the log makes, as far as it was read."""
        return self._log.state

    @property
    def closed(self) -> Sequence[str]:
        """`RunState.closed`, once all decisions are handed over; empty before."""
        closed = self.state.closed  # read first: from now on nothing is put into the delivery, if there are any
        return closed if closed and self.delivery.is_done else ()

    def new_decisions(self) -> list[Decision]:
        """The decisions since the last call, in the log's order; called by the training thread."""
        taken = [self.decisions.popleft() for _ in range(len(self.decisions))]
        return [replace(decision, own_seq=self.outbox.offer_of(decision.own_seq)) for decision in taken]

    def not_taken(self) -> tuple[RunState, list[OuterRef]]:
        """The state, and the outer entries up to it that the training thread has not taken."""
        state = self.state  # read first: the loop goes on
        return state, state.outers_after([num_taken for num_taken, _ in self.taken_rounds], list(self._outers))

    def refusal(self, offer: Offer) -> str:
        """The reason why no outer step counts an own offer any more."""
        state, p = self.state, offer.fragment
        arrived = self.inbox.here[p].get(self._own)
        if arrived is None or self.outbox.offer_of(arrived.contribution.seq) != offer.seq:
            event = "the run was closed" if state.closed else f"more than {state.rules.max_stale} outer steps came"
            return f"{event} before its payload was in the store"
        own = arrived.contribution
        return state.refusal_of_norm(p, own.norm) or state.refusal(p, own) or ""

    def awaited(self, fragment: int) -> tuple[str, float]:
        """The other side of the training thread's wait, in words, and the time at which it ends anyway, or ∞.

        Args:
            fragment: whose outer step is waited for; −1 for the run's end.
        """
        state = self.state
        others = [replica for replica in state.active if replica != self._own]
        if fragment < 0 and self._closes_at is not None:
            names = _names(state, others) or "others that have left"
            return f"{names} before this replica closes the run", self._closes_at
        if fragment < 0 or fragment not in self.outbox.offers:
            is_uploading = fragment >= 0 and self.outbox.num_pending
            traffic = "the upload of an outer gradient to" if is_uploading else "outer steps from"
            return f"{traffic} {self._store.url}", FOR_EVER
        here = self.inbox.here[fragment]
        names = _names(state, [replica for replica in others if replica not in here]) or "others"
        decides_alone = self.draining_since is not None and state.rules.quorum == "majority"
        until = (self.draining_since or 0.0) + self._pace.drain_seconds if decides_alone else FOR_EVER
        return f"the outer gradient of fragment {fragment} from {names}", until

    async def run(self, replay: Sequence[OuterRef]) -> None:
        """Follow the log until `failure` or cancellation, beginning with outer entries that were read already."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for ref in replay:
                    self._outers.append(ref)
                    self.delivery.put(-1, ref)
                self._tasks.create_task(self.delivery.run(self._tasks))
                self._tasks.create_task(self._drive())
                self._tasks.create_task(self.snapshots.run(self.append))
                await self.outbox.run(self._tasks)
        except BaseExceptionGroup as group:
            self._fail(group.exceptions[0])

    def append(self, body: Body) -> None:
        """Write an entry when it is its turn; called in the loop."""
        self._to_append.append(body)
        self._changed.set()

    async def leave(self, *, finished: bool) -> None:
        """Wait until own payloads are in the store, and write the entry that says so, unless the run is closed."""
        while self.outbox.num_pending and not self.has_ended:
            await asyncio.sleep(self._pace.poll_seconds)
        self.append(Leave(finished=finished))
        while not (self.state.members[self._own].left or self.has_ended):
            await asyncio.sleep(self._pace.poll_seconds)
        if self.failure is not None:
            raise ExchangeError(self.failure)

    async def close(self, step_seconds: float, timeout_seconds: float) -> None:
        """Leave, since the run's token budget is spent, and close the run, unless another replica does.

        If own offers are not counted half-way through their patience, it leaves before: from there on a number as
        quorum does not bind. Before it closes the run it waits for active replicas, and for others that left so,
        as long as `patience` inner steps take; with the quorum "all", and at the most, half of the time that a
        decision may take.

        Args:
            step_seconds: the time of an inner step.
            timeout_seconds: the longest time that a decision may take.
        """
        last = time.monotonic() + self._pace.drain_seconds / 2
        while not (
            self.are_offers_counted or self.has_ended or (time.monotonic() > last and not self.state.finished)
        ):
            await asyncio.sleep(self._pace.poll_seconds)
        await self.leave(finished=True)
        while not self.are_offers_counted:
            await asyncio.sleep(self._pace.poll_seconds)
        seconds = timeout_seconds / 2
        if self.state.rules.quorum != "all":
            seconds = min(seconds, max(self._pace.close_seconds, self._pace.patience * step_seconds))
        self._closes_at = time.monotonic() + seconds

    async def close_if_last(self) -> None:
        """Leave, and close the run if all others have left: of several that leave at once, the last by the log."""
        await self.leave(finished=False)
        if not self.state.present:
            self._closes_at = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """True if this replica writes nothing more: it has failed, or the run is closed."""
        return self.failure is not None or bool(self.state.closed)

    async def _drive(self) -> None:
        """Read the log, write to it, and wait for something to change."""
        self._watch_members()
        last_look = time.monotonic()
        while True:
            self._changed.clear()
            async for number, entry in self._log.read(at_once=1):
                self.state.check_goes_on(self._own, entry)
                self._heed(number, entry)
            self._num_reads += 1
            if time.monotonic() > last_look + _POLLS_PER_LOOK * self._pace.poll_seconds:
                await self._log.check_there()
                last_look = time.monotonic()
            if await self._write():
                continue
            try:
                async with asyncio.timeout(self._pace.poll_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _longest_poll(self) -> float:
        """The time between two looks for a payload that does not come: an eighth of τ.

        A replica asks for one of each other: at 0.5 s a thousand of them would pay most of their bill for that.
        """
        return longest_poll(self._pace.poll_seconds, self.overlap_seconds)

    async def _newest(self) -> RunState:
        """The state after all entries that are in the log now."""
        enough = self._num_reads + 2  # the next reading to end may have begun before
        while self._num_reads < enough:
            self._changed.set()
            await asyncio.sleep(self._pace.poll_seconds / 4)
        return self.state

    def _heed(self, number: int, entry: Entry) -> None:
        """Act on an entry that is in the log now."""
        if isinstance(entry.body, Outer):
            ref = self.state.fragments[entry.body.fragment].since[-1]
            while self._outers and (body := self._outers[0].body).round <= self.taken_rounds[body.fragment][0]:
                self._outers.popleft()
            self._outers.append(ref)
            self.delivery.put(entry.author, ref)
            self.outbox.counted(entry.body)
            others = {c.replica for c in entry.body.contributions} - {self._own} if self.state.finished else ()
            self._has_early_leaver |= any(self.state.members[other].left for other in others)
        if self.state.closed:
            with self.news:
                self.news.notify_all()
        self._watch_members()
        self._on_arrival()

    def _watch_members(self) -> None:
        """Look for the payloads of every replica that may send some; a bridge decides nothing, and needs none."""
        assert self._tasks is not None, "the log thread runs"
        state = self.state
        for replica, member in enumerate(() if state.is_bridge(self._own) else state.members):
            is_gone = member.left or member.fenced or state.is_bridge(replica)
            if replica != self._own and replica not in self._watched and not is_gone:
                self._watched.add(replica)
                self._tasks.create_task(self.inbox.watch(replica))

    def _on_arrival(self) -> None:
        self.wanted = self.inbox.wanted()
        self._changed.set()

    async def _write(self) -> bool:
        """Write one entry, if there is one to write; true if the log has a new entry."""
        if self.state.closed:
            return False
        queued = self._to_append[0] if self._to_append else None  # more may come meanwhile
        if (body := queued or self._decision() or self._end()) is None:
            return False
        try:
            (number, entry), is_own = await self._log.append(body, author=self._own)
        except LogError as error:
            if queued is None or isinstance(queued, Leave) or isinstance(error, LostEntryError):
                raise
            self._to_append.popleft()  # a snapshot that a newer one has made needless
            return False
        if not is_own:
            self.state.check_goes_on(self._own, entry)
        self._heed(number, entry)
        if queued is not None and is_own:
            self._to_append.popleft()
            if isinstance(body, Snapshot) and body.fragment == 0 and self._tasks is not None:
                work = write_index(self._store, self._signer, self.state, author=self._own)
                self._tasks.create_task(work)
        return True

    def _decision(self) -> Outer | None:
        """The outer entry that this replica may write now."""
        for p, offer in self.outbox.offers.items():
            taken, base = self.taken_rounds[p]
            if taken != self.state.fragments[p].round:
                continue  # the training thread has not taken the last outer step yet
            here = self.inbox.of_the_run(p, f"{base:016x}")
            if parts := self._decider.parts(self.state, offer, here, self.step, self.draining_since):
                return Outer(fragment=p, round=taken + 1, before=f"{base:016x}", contributions=parts)
        return None

    def _end(self) -> Close | None:
        """The entry that closes the run, if this replica may write it now: it names its own Θ."""
        if self._closes_at is None or (self._may_count_more() and time.monotonic() < self._closes_at):
            return None
        if self.state.members[self._own].fenced:
            return None  # the replica that has taken its place can
        taken_rounds = self.taken_rounds
        if [taken for taken, _ in taken_rounds] != [log.round for log in self.state.fragments]:
            return None  # the training thread has not taken the last outer steps yet
        return Close(outer=tuple(f"{base:016x}" for _, base in taken_rounds))

    def _may_count_more(self) -> bool:
        """True if replicas are active, or one that has left before its payloads were counted may have more."""
        state, all_here = self.state, enumerate(self.inbox.here)
        if state.active or not isinstance(state.rules.quorum, int):
            return bool(state.active)
        return self._has_early_leaver or any(
            state.refusal(p, arrived.contribution) is None for p, here in all_here for arrived in here.values()
        )

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            return
        expected = isinstance(error, DilocoError)
        with self.news:
            self.failure = str(error) if expected else f"{type(error).__name__}: {error}"
            self.news.notify_all()
        if not expected:
            raise error


def _names(state: RunState, replicas: Sequence[int]) -> str:
    return listed([state.members[replica].name for replica in replicas], 5)
