"""The contents of outer steps: own payloads go out, the others' come in, and shares are averaged.

A payload is looked for by its name, checked, and kept until an entry counts it.

The members of an entry stand in a circle, in an order that changes with each entry: share r is averaged by the
member at place r. A replica that waits too long computes the average itself. All copies have the same bytes; the
first one stored is used.
"""

import asyncio
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import PayloadError
from diloco.files import sha256
from diloco.rendezvous.contract import Content, Offer, Payload
from diloco.rendezvous.deciding import of_the_run, turns
from diloco.rendezvous.log.entries import Claim, Contribution, LogError, Outer
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import FOR_EVER, Log, source_of
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.rendezvous.objects import (
    AVERAGE,
    PAYLOAD,
    AbsentError,
    Fetched,
    Header,
    Objects,
    average_of,
    header_of,
)
from diloco.rendezvous.store import BadObjectError

_LOG = logging.getLogger("diloco")


@dataclass(frozen=True, kw_only=True)
class Access:
    """A replica's access to its run, which all that works beside its training thread shares."""

    objects: Objects
    log: Log
    own: int
    """This replica."""
    signer: Signer
    """The signer of what this replica writes."""
    poll_seconds: float
    """Time between two looks into the store."""
    longest_poll: Callable[[], float]
    """The longest time, in seconds, between two looks for the next payload of a replica that sends none."""
    newest: Callable[[], Awaitable[RunState]]
    """Reads the log to its end, and gives the state."""

    @property
    def state(self) -> RunState:
        """The state after all entries that were read."""
        return self.log.state


class Memory:
    """Bounds the memory of payloads, and that of their values; in each, the oldest is given up first.

    A payload that is given up is downloaded again; values that are given up are decoded again.

    Args:
        most_bytes: size of the payloads that are kept until they are counted.
        most_values_bytes: size of all values.
    """

    def __init__(self, most_bytes: int, most_values_bytes: int) -> None:
        self._most_bytes, self._most_values_bytes = most_bytes, most_values_bytes
        self._payloads: OrderedDict[str, Payload] = OrderedDict()
        self._with_values: list[weakref.ref[Payload]] = []  # others may still use them

    def keep(self, name: str, payload: Payload) -> None:
        """Keep a payload and its values."""
        self._payloads[name] = payload
        num_bytes = sum(kept.data.numel() for kept in self._payloads.values())
        while num_bytes > self._most_bytes:
            num_bytes -= self._payloads.popitem(last=False)[1].data.numel()
        self.keep_values(payload)

    def keep_values(self, payload: Payload) -> None:
        """Keep the values of a payload for as long as somebody keeps it."""
        payloads = dict.fromkeys(kept for ref in self._with_values if (kept := ref()) is not None)
        payloads[payload] = None
        num_bytes = sum(kept.values.nbytes for kept in payloads if kept.values is not None)
        for kept in payloads:
            if num_bytes > self._most_values_bytes and kept.values is not None:
                num_bytes -= kept.values.nbytes
                kept.values = None
        self._with_values = [weakref.ref(kept) for kept in payloads if kept.values is not None]

    def get(self, name: str) -> Payload | None:
        """A payload; None if it is not here any more."""
        return self._payloads.get(name)

    def drop(self, name: str) -> None:
        """Give up a payload that is not needed any more."""
        self._payloads.pop(name, None)


_SLOWER = 16
"""Factor by which a replica that is not active is asked less often."""


@dataclass(frozen=True)
class Arrived:
    """A payload that can be counted: sound, or cut into shares with a sound header."""

    header: Header
    contribution: Contribution
    """The payload in an outer entry."""
    own: tuple[Payload, ...] = ()
    """This replica's own payloads, one per share, which are kept until they are counted."""


class Inbox:
    """The newest payload of each replica for each fragment.

    Args:
        access: this replica's.
        memory_bytes: size of the others' payloads in memory, and of all values.
        on_arrival: called after one has arrived.
    """

    def __init__(self, access: Access, *, memory_bytes: int, on_arrival: Callable[[], None]) -> None:
        form = access.objects.form
        self.here: list[dict[int, Arrived]] = [{} for _ in form.sizes]
        """The payloads that are here, by fragment and replica."""
        self.memory = Memory(memory_bytes, memory_bytes if form.keep_values else 0)
        self._access, self._on_arrival = access, on_arrival
        self._left_out: set[str] = set()
        self._fetching: dict[str, asyncio.Task[Fetched | None]] = {}
        self._is_whole = form.num_shares == 1

    def put(self, header: Header, own: tuple[Payload, ...] = ()) -> None:
        """Take a payload that can be counted; an own one comes with its bytes."""
        here = self.here[header.fragment]
        if (older := here.get(header.replica)) is not None:
            self.memory.drop(older.header.name)
        here[header.replica] = Arrived(header, header.contribution(), own)
        self._on_arrival()

    def forget(self, fragment: int, contributions: Iterable[Contribution]) -> None:
        """Give up the payloads that an outer entry has counted."""
        for counted in contributions:
            arrived = self.here[fragment].get(counted.replica)
            if arrived is not None and arrived.contribution.seq <= counted.seq:
                del self.here[fragment][counted.replica]
                self.memory.drop(arrived.header.name)

    def of_the_run(self, fragment: int, base: str) -> dict[int, Contribution]:
        """The payloads taken against the run's Θ_p, whose digest here is `base`; a warning names each other one.

        Raises:
            DisagreementError: as `deciding.of_the_run`.
        """
        arrived = self.here[fragment]
        here = {replica: one.contribution for replica, one in arrived.items()}
        bases = {replica: one.header.base for replica, one in arrived.items()}
        sound = of_the_run(self._access.state, fragment, here, bases, self._access.own, base)
        for replica in here.keys() - sound.keys():
            name = PAYLOAD.name(replica, here[replica].seq)
            if name not in self._left_out:
                self._left_out.add(name)
                _LOG.warning(
                    "payload %s was taken against other outer parameters than the run's after round %d: it is "
                    "left out",
                    *(name, here[replica].base_round),
                )
        return sound

    def wanted(self) -> tuple[int, ...]:
        """The fragments for whose next outer step another replica's payload of the open round is here."""
        logs, own = self._access.state.fragments, self._access.own
        return tuple(
            p
            for p, here in enumerate(self.here)
            if any(m != own and arrived.contribution.base_round >= logs[p].newest for m, arrived in here.items())
        )

    async def watch(self, replica: int) -> None:
        """Take a replica's payloads one after another, until it has left and there are no more."""
        access, seq, num_misses = self._access, self._first_open(replica), 0
        while True:
            if self._is_whole and seq in access.state.last_seqs(replica):
                seq += 1  # an entry counts it already, and it is fetched for that
                continue
            before = access.state.members[replica]  # one that left before the answer uploads nothing more
            try:
                fetched = await self._fetch(replica, seq, before.key)
            except (PayloadError, BadObjectError) as error:
                _LOG.warning("%s: it is left out", error)
                seq += 1
                continue
            if fetched is not None:
                seq, num_misses = seq + 1, 0
                header, payload = fetched
                if payload is not None:
                    self.memory.keep(header.name, payload)
                self.put(header)
            elif (gone := _newest_gone(replica, seq, access.state)) >= seq:
                seq = max(gone + 1, self._first_open(replica))
            elif before.left or before.fenced:
                return
            else:
                await self._pause(replica, num_misses)
                num_misses += 1

    async def _pause(self, replica: int, num_misses: int) -> None:
        """Wait until the next look, but no longer than `longest_poll` says meanwhile: it may fall."""
        access, begin = self._access, time.monotonic()
        while True:
            await asyncio.sleep(access.poll_seconds)
            longest = access.longest_poll() if access.state.is_active(replica) else _SLOWER * access.poll_seconds
            seconds = min(access.poll_seconds * 2 ** min(num_misses, 16), longest)
            if time.monotonic() + access.poll_seconds / 2 > begin + seconds:
                return

    async def _fetch(self, replica: int, seq: int, public: str) -> Fetched | None:
        """A payload from the store, downloaded and decoded once for all that ask for it meanwhile."""
        name = PAYLOAD.name(replica, seq)
        if (task := self._fetching.get(name)) is None:
            task = asyncio.create_task(self._access.objects.payload(replica, seq, public))
            self._fetching[name] = task
            task.add_done_callback(lambda _: self._fetching.pop(name))
        return await asyncio.shield(task)

    async def _counted(self, ref: OuterRef, part: Contribution) -> Fetched | None:
        """A payload that an entry counts and that has not arrived; None if it was deleted."""
        public = self._access.state.members[part.replica].key
        return await self._access.objects.counted(ref, part, self._fetch(part.replica, part.seq, public))

    def _first_open(self, replica: int) -> int:
        """The first of a replica's payloads that the log may still count: one per fragment is on its way."""
        return max(0, max(self._access.state.last_seqs(replica)) + 1 - len(self.here))

    async def of_entry(self, ref: OuterRef) -> Content | None:
        """The payloads that an outer entry counts; None if one was deleted.

        Raises:
            LogError: if what lies in the store is not what was counted.
        """
        parts = ref.body.contributions
        payloads = await asyncio.gather(*(self._payload(ref, part) for part in parts))
        by_member = {part.replica: x for part, x in zip(parts, payloads, strict=True) if x is not None}
        if len(by_member) < len(parts):
            return None
        received = sum(payload.data.numel() for m, payload in by_member.items() if m != self._access.own)
        return Content(payloads=by_member, bytes_received=received)

    async def _payload(self, ref: OuterRef, part: Contribution) -> Payload | None:
        """The payload of a contribution, from here or from the store; None if it was deleted."""
        arrived = self.arrived(ref, part)
        if arrived is not None and arrived.own:
            return arrived.own[0]
        if arrived is not None and (payload := self.memory.get(arrived.header.name)) is not None:
            return payload
        if (fetched := await self._counted(ref, part)) is None:
            return None
        payload = fetched.payload
        assert payload is not None, "no fragment is cut"
        self.memory.keep_values(payload)
        return payload

    async def header(self, ref: OuterRef, part: Contribution) -> Header | None:
        """The header of a contribution, from here or from the store; None if it was deleted.

        Raises:
            LogError: if what lies in the store is not what was counted.
        """
        if (arrived := self.arrived(ref, part)) is not None:
            return arrived.header
        fetched = await self._counted(ref, part)
        return None if fetched is None else fetched.header

    def arrived(self, ref: OuterRef, part: Contribution) -> Arrived | None:
        """A contribution, if it is here."""
        arrived = self.here[ref.body.fragment].get(part.replica)
        return arrived if arrived is not None and arrived.contribution == part else None


def _newest_gone(replica: int, seq: int, state: RunState) -> int:
    """The newest of a replica's payloads that is absent for ever, if payload `seq` is absent; −1 if none is known.

    All up to the oldest that a fragment counted last may be deleted. Uploads end in any order, so that a later one
    may still be on its way, unless its replica is gone.
    """
    counted = state.last_seqs(replica)
    return min(counted) if state.is_active(replica) else max(min(counted), min(seq, max(counted)))


class Outbox:
    """The payloads of one replica.

    Args:
        access: the replica's.
        inbox: where own payloads lie beside the others'.
    """

    def __init__(self, access: Access, inbox: Inbox) -> None:
        self.offers: dict[int, Offer] = {}
        """The offers that are in the store and were not counted yet, by fragment."""
        self.num_pending = 0
        """Uploads that are not over."""
        self._access, self._inbox = access, inbox
        self._queue: asyncio.Queue[tuple[Offer, tuple[Tensor, ...], Tensor | None]] = asyncio.Queue()
        self._newest: dict[int, int] = {}
        """By fragment the newest offer that is in the store, by `Offer.seq`."""
        self._seqs: list[int] = []
        """For each number under which a payload was uploaded, `Offer.seq`; −1 if somebody else has taken it."""

    def put(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        """Take an outer gradient to upload, as `Seat.offer` has it; called in the loop."""
        self.num_pending += 1
        self._queue.put_nowait((offer, payloads, values_N))

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Upload outer gradients as they come, several at a time."""
        while True:
            tasks.create_task(self._upload(*await self._queue.get()))

    def counted(self, body: Outer) -> None:
        """Forget what an outer entry has counted."""
        if any(contribution.replica == self._access.own for contribution in body.contributions):
            self.offers.pop(body.fragment, None)

    def offer_of(self, number: int) -> int:
        """`Offer.seq` of the payload with a number in the store; −1 if this replica has not uploaded it."""
        return self._seqs[number] if 0 <= number < len(self._seqs) else -1

    async def _upload(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        """Upload an outer gradient under the next number that nobody has taken, and offer it."""
        bodies = [payload.numpy().data for payload in payloads]
        digests = await asyncio.to_thread(lambda: tuple(map(sha256, bodies)))
        while True:
            number = len(self._seqs)
            self._seqs.append(offer.seq)
            header = self._header(offer, number, bodies[0].nbytes, digests)
            if (taken := await self._created(header, bodies)) is None:
                break
            self._seqs[number] = -1
            _LOG.warning("%s was written by somebody else: the next number is taken", taken)
        await self._access.log.check_mounted()
        self.num_pending -= 1
        if offer.seq < self._newest.get(offer.fragment, 0):
            return  # after an outage, uploads end in any order
        self._newest[offer.fragment] = offer.seq
        self.offers[offer.fragment] = offer
        own = tuple(map(Payload, payloads))
        if header.num_shares == 1:
            own[0].values = values_N
            self._inbox.memory.keep_values(own[0])
        self._inbox.put(header, own)

    def _header(self, offer: Offer, number: int, num_bytes: int, digests: tuple[str, ...]) -> Header:
        form = self._access.objects.form
        claim = {name: getattr(offer, name) for name in Claim.__dataclass_fields__}
        return Header(
            **(claim | {"seq": number}),
            run=self._access.objects.run,
            fragment=offer.fragment,
            base=f"{offer.base:016x}",
            wire=form.codec.format,
            num_elements=form.sizes[offer.fragment],
            num_bytes=num_bytes,
            norms=offer.norms,
            sha256=digests,
        )

    async def _created(self, header: Header, bodies: Sequence[memoryview]) -> str | None:
        """Create the shares, and then the header, whose readers find them there; the only share is its body.

        Returns:
            None, or the name of an object that somebody else has written.
        """
        head = PAYLOAD.seal(header, self._access.signer)
        if header.num_shares == 1:
            return await self._create(header.name, [head, *bodies])
        shares = zip(map(header.share_name, range(header.num_shares)), bodies, strict=True)
        taken = await asyncio.gather(*(self._create(name, [body]) for name, body in shares))
        return next(filter(None, taken), None) or await self._create(header.name, [head])

    async def _create(self, name: str, buffers: "list[bytes | memoryview]") -> str | None:
        """Create an object; its name if somebody else has."""
        try:
            other = await self._access.objects.store.create(name, buffers, patience_seconds=FOR_EVER)
        except BadObjectError:
            return name
        return None if other is None else name


_POLLS_PER_TURN = 10
_LOOKS_AT_ONCE = 8
"""Averages of one outer entry that are looked for at once: they appear at about the same time."""


class _DeletedError(Exception):
    """A share was deleted, since a snapshot has made its outer entry needless."""


class Averager:
    """Makes and takes the averages of shares for one replica.

    Args:
        access: the replica's.
        inbox: where the headers of payloads lie, and own shares.
    """

    def __init__(self, access: Access, inbox: Inbox) -> None:
        self._access, self._objects, self._inbox = access, access.objects, inbox
        self._seconds = 0.0
        """Time that it took to make the last average."""

    async def of_entry(self, ref: OuterRef) -> Content | None:
        """The averages of an outer entry's shares; None if they were deleted.

        Raises:
            LogError: if an average, or what the entry counts, is not sound.
        """
        shares, looking = range(self._objects.form.num_shares), asyncio.Semaphore(_LOOKS_AT_ONCE)
        contents: list[Content] = []
        if all(ref.number != needed.number for needed in self._access.state.fragments[ref.body.fragment].since):
            for share in shares:  # snapshots stand for it: nobody makes its averages again
                if (content := await self._stored(ref, share)) is None:
                    return None
                contents.append(content)
        else:
            results = await asyncio.gather(*(self._share(ref, share, looking) for share in shares))
            contents += [content for content in results if content is not None]
            if len(contents) < len(results):
                return None
        return Content(
            averages=tuple(average for content in contents for average in content.averages),
            bytes_received=sum(content.bytes_received for content in contents),
            bytes_sent=sum(content.bytes_sent for content in contents),
        )

    async def _stored(self, ref: OuterRef, share: int) -> Content | None:
        """The average of a share in the store; None if it is not there."""
        fetched = await self._objects.average(self._access.state, ref, share)
        return None if fetched is None else self._content(fetched[1], fetched[1].data.numel())

    async def _share(self, ref: OuterRef, share: int, looking: asyncio.Semaphore) -> Content | None:
        """The average of one share, from the store, or made here when its turn comes; None if it was deleted."""
        if turn := self._turn(ref, share):
            content = await self._waited_for(ref, share, turn, looking)
            if content is not None:
                return content
        try:
            return await self._made(ref, share)
        except _DeletedError:
            return None

    async def _waited_for(
        self, ref: OuterRef, share: int, turn: int, looking: asyncio.Semaphore
    ) -> Content | None:
        """An average from the store; None if this replica's turn comes before it."""
        # In each interval as many begin as before it: few do needless work, and many dead ones cost little time.
        num_intervals, started = turn.bit_length(), time.monotonic()
        async with looking:
            while True:
                content = await self._stored(ref, share)
                seconds = _POLLS_PER_TURN * self._access.poll_seconds + 2 * self._seconds
                if content is not None or time.monotonic() >= started + num_intervals * seconds:
                    return content
                await asyncio.sleep(self._access.poll_seconds)

    def _turn(self, ref: OuterRef, share: int) -> int:
        """The number of replicas that try to make an average before this one."""
        members, own = [part.replica for part in ref.body.contributions], self._access.own
        if own not in members:
            return 2 * len(members)  # this one can't sign for the entry, and makes the average for itself alone
        order = turns(f"{self._objects.run} {ref.number}", members)
        return (order.index(own) - share) % len(order)

    async def _made(self, ref: OuterRef, share: int) -> Content:
        """Make an average, and upload it if this replica is a member of the entry."""
        started, parts = time.monotonic(), ref.body.contributions
        fetched = await asyncio.gather(*(self._contributed(ref, part, share) for part in parts))
        shares = {part.replica: one for part, one in zip(parts, fetched, strict=True) if one is not None}
        own, state, form = self._access.own, self._access.state, self._objects.form
        received = sum(payload.numel() for member, (_, payload) in shares.items() if member != own)
        made = await self._objects.work(average_of, state, form, ref.body, share, shares)
        self._seconds = time.monotonic() - started
        for reason in made.unsound.values():
            _LOG.warning("%s: it is left out", reason)
        average = Payload(made.payload, made.values)
        if all(part.replica != own for part in parts):
            return self._content(average, received)
        left_out = [part.replica for part in parts if part.replica not in shares or part.replica in made.unsound]
        header = header_of(state, form, ref, share, made, replica=own, left_out=left_out)
        buffers = [AVERAGE.seal(header, self._access.signer), made.payload.numpy().data]
        name = AVERAGE.name(ref.number, share)
        other = await self._objects.store.create(name, buffers, patience_seconds=FOR_EVER)
        if other is None:
            return self._content(average, received, made.payload.numel())
        _, stored = await self._objects.opened_average(other, state, ref, share)
        return self._content(stored, received + stored.data.numel())

    def _content(self, average: Payload, received: int, sent: int = 0) -> Content:
        """The content of one share, with the bytes that were received and sent for it."""
        self._inbox.memory.keep_values(average)
        return Content(averages=(average,), bytes_received=received, bytes_sent=sent)

    async def _contributed(self, ref: OuterRef, part: Contribution, share: int) -> tuple[Header, Tensor] | None:
        """A member's header and its payload of a share; None if no sound payload can be had: it is left out."""
        arrived = self._inbox.arrived(ref, part)
        if arrived is not None and arrived.own:
            return arrived.header, arrived.own[share].data
        header = await self._inbox.header(ref, part)
        if header is None:
            await self._check_needed(ref)
            raise LogError(f"{source_of(ref.number)} counts payloads that are not in the store")
        try:
            return header, await self._objects.share(header, share)
        except PayloadError as error:
            if isinstance(error, AbsentError):
                await self._check_needed(ref)
            _LOG.warning("%s: it is left out", error)
            return None

    async def _check_needed(self, ref: OuterRef) -> None:
        """Find out whether a share is absent because it was deleted.

        Raises:
            _DeletedError: if so.
        """
        if (await self._access.newest()).has_snapshot(ref.body.fragment, ref.body.round):
            raise _DeletedError
