"""The replay of a run from its log alone: every entry, payload and outer step is checked, and Θ is what comes out.

It shares with a live run the reader of the log, the state machine, the fetching of objects, the codecs and the
outer rule; not the thread that follows a log, nor the engine.

Shapes: N elements of one fragment.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diloco.errors import PayloadError, UserError
from diloco.files import memory_bytes
from diloco.outer.averages import reduction_of
from diloco.outer.digest import outer_digest, parameters_hash
from diloco.outer.rule import RULE, FragmentState, OuterRule, Span
from diloco.outer.rules import rule_of_facts
from diloco.outer.step import SHIFT
from diloco.rendezvous.contract import Content, Decision, Form, Payload
from diloco.rendezvous.log.entries import Contribution, Create, LogError, Outer, Snapshot
from diloco.rendezvous.log.index import INDEX, MOST_INDEX_BYTES, index_source, newest_state, open_index
from diloco.rendezvous.log.log import Log, first_entry, is_entry, open_run, source_of
from diloco.rendezvous.log.run import OuterRef, RunState, SnapshotRef
from diloco.rendezvous.objects import (
    AVERAGE,
    PAYLOAD,
    AbsentError,
    Fetched,
    Header,
    Objects,
    average_of,
    checked_values,
    decided_average,
    snapshot_name,
)
from diloco.rendezvous.payloads import Memory
from diloco.rendezvous.store import Store, StoreError
from diloco.schedule import Sync
from diloco.wire import codec

_PLACE = "shape, fragment and place of parameter "
INITIAL = "initial parameters (SHA-256)"
"""The fact that proves the initial parameters equal."""


@dataclass(frozen=True)
class Place(Span):
    """A parameter, its fragment, and its place there."""

    fragment: int


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The model and the outer step as entry 0 describes them."""

    form: Form
    outer: OuterRule | None
    """The outer rule; None for one that is not diloco's own."""
    outer_name: str
    """The name of the rule's class."""
    places: Mapping[str, Place]
    """The places by parameter name."""
    initial_sha256: str
    """SHA-256 of the initial parameters."""

    @classmethod
    def of(cls, create: Create) -> "RunFacts":
        """The facts of an entry 0.

        Raises:
            LogError: if an engine of diloco would not have written them.
        """
        facts = create.facts
        try:
            places = {
                name.removeprefix(_PLACE): Place(tuple(map(int, shape)), int(start), int(fragment))
                for name, (shape, fragment, start) in (
                    item for item in facts.items() if item[0].startswith(_PLACE)
                )
            }
            sizes = _sizes(places.values(), create.rules.num_fragments)
            wire = codec(facts["wire"])
            second = reduction_of(facts["combine"], wire).second
            form = Form(codec=wire, sizes=sizes, seed=int(facts["seed"]), second=second)
            form = form.cut(create.rules.num_shares)
            name = str(facts["outer rule"])
            own = {fact.removeprefix(RULE): value for fact, value in facts.items() if fact.startswith(RULE)}
            rule = rule_of_facts(name, own)
            return cls(form=form, outer=rule, outer_name=name, places=places, initial_sha256=str(facts[INITIAL]))
        except LogError:
            raise
        except KeyError as error:
            raise LogError(f"entry 0 of the log does not describe a run: it lacks {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise LogError(f"entry 0 of the log does not describe a run: {error}") from None

    def check_memory(self) -> None:
        """Refuse parameters that this machine's memory can't hold, before anything of them is allocated.

        Raises:
            UserError: with the bytes that they take.
        """
        num_bytes, memory = 4 * sum(self.form.sizes), memory_bytes()
        if num_bytes > memory:
            raise UserError(
                f"the run's parameters, as entry 0 of the log describes them, take {num_bytes:,} bytes, and this "
                f"machine has {memory:,} bytes of memory",
                "run",
            )

    def flat(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Each fragment's flat FP32 vector (N), from the run's initial parameters by name; others are ignored.

        Raises:
            LogError: if entry 0 gives one another shape.
            UserError: if they are not those with which the run began.
        """
        missing = [name for name in self.places if name not in parameters]
        if missing:
            raise UserError(f"initial: the run's parameter {missing[0]} is not among these parameters", "initial")
        own = {name: parameters[name].detach().float().cpu() for name in self.places}
        if parameters_hash(own) != self.initial_sha256:
            raise UserError(
                "initial: these are not the parameters with which the run began: their SHA-256 is another",
                "initial",
            )
        vectors = [torch.empty(size, dtype=torch.float32, device="cpu") for size in self.form.sizes]
        for name, place in self.places.items():
            if own[name].shape != place.shape:
                raise LogError(f"entry 0 of the log describes {name:.80} in another shape than it has")
            place.of(vectors[place.fragment]).copy_(own[name].reshape(-1))
        return vectors

    def named(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of the fragments' flat vectors by parameter name."""
        return {name: place.of(vectors[place.fragment]).view(place.shape) for name, place in self.places.items()}

    def spans(self, fragment: int) -> dict[str, Span]:
        """The places of a fragment's parameters, in their order."""
        own = ((name, place) for name, place in self.places.items() if place.fragment == fragment)
        return dict(sorted(own, key=lambda item: (item[1].start, item[1].stop)))


def _sizes(places: Iterable[Place], num_fragments: int) -> tuple[int, ...]:
    """N of each fragment, if the places lie one after another."""
    sizes = [0] * num_fragments
    for place in sorted(places, key=lambda place: (place.fragment, place.start, place.stop)):
        is_in_order = 0 <= place.fragment < num_fragments and place.start == sizes[place.fragment]
        if not is_in_order or min(place.shape, default=0) < 0:
            raise ValueError("the places of its parameters leave holes, or overlap")
        sizes[place.fragment] = place.stop
    return tuple(sizes)


_AHEAD = 3
"""Outer entries whose payloads are downloaded while those of another are used."""
_VALUES_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The contents of a run's outer entries, as the store holds them now."""

    objects: Objects
    state: RunState
    """The state after the last entry."""
    bases: Sequence[Mapping[int, str]]
    """For each fragment the digest of Θ_p by round, as far as the log tells it."""
    present: frozenset[str]
    """The names of the payloads in the store."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each payload that was checked; 0 for the header of one that is cut into shares."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what is strange, and still valid."""
    memory: Memory = field(default_factory=lambda: Memory(0, _VALUES_BYTES))
    """The bound of the values that are kept for the average; others are decoded again."""

    @cached_property
    def _needed(self) -> frozenset[int]:
        """Entries whose payloads can't be retired yet."""
        return frozenset(ref.number for ref in self.state.since)

    def is_retired(self, ref: OuterRef) -> bool:
        """True if a payload of an entry was deleted, since a snapshot had made it needless."""
        names = [PAYLOAD.name(part.replica, part.seq) for part in ref.body.contributions]
        if (num_shares := self.objects.form.num_shares) > 1:
            names += [f"{name}-{share}" for name in names for share in range(num_shares)]
        return ref.number not in self._needed and not self.present.issuperset(names)

    async def contents(self, refs: Sequence[OuterRef]) -> AsyncIterator[tuple[OuterRef, Content | None]]:
        """Entries with their contents; None for an entry whose payloads are retired.

        Raises:
            LogError: naming an entry, if a payload is missing that can't be retired yet, or is not what the entry
                says of it.
        """
        tasks: deque[tuple[OuterRef, asyncio.Task[Content | None]]] = deque()
        try:
            for ref in refs:
                tasks.append((ref, asyncio.create_task(self._content(ref))))
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

    async def _content(self, ref: OuterRef) -> Content | None:
        """The payloads of an entry, or the averages of its shares, made again."""
        if self.is_retired(ref):
            return None
        try:
            fetched = await asyncio.gather(*(self._contribution(ref, part) for part in ref.body.contributions))
            if self.objects.form.second is None:
                payloads = {header.replica: payload for header, payload in fetched if payload is not None}
                return Content(payloads=payloads, bytes_received=0)
            headers, shares = [header for header, _ in fetched], range(self.objects.form.num_shares)
            averages = [await self._average(ref, headers, share) for share in shares]
            return Content(averages=tuple(averages), bytes_received=0)
        except _RetiredError:
            self.notes.append(f"{source_of(ref.number)}: a payload was retired during the check: check again")
            return None

    async def _is_needless(self, ref: OuterRef) -> bool:
        """True if the run has gone on since, and may have deleted what an entry counts."""
        newest = await Log(self.objects.store, self.state).read_all()
        return all(ref.number != needed.number for needed in newest.since)

    async def _contribution(self, ref: OuterRef, counted: Contribution) -> Fetched:
        """The header of a contribution, and its payload unless its shares are objects."""
        p, entry, name = ref.body.fragment, source_of(ref.number), PAYLOAD.name(counted.replica, counted.seq)
        public = self.state.members[counted.replica].key
        fetching = self.objects.payload(counted.replica, counted.seq, public)
        if (fetched := await self.objects.counted(ref, counted, fetching)) is None:
            if name in self.present or await self._is_needless(ref):
                raise _RetiredError
            raise LogError(f"{entry} counts {name}, which is not in the store")
        header, payload = fetched
        base = self.bases[p].get(counted.base_round)
        if base is not None and header.base != base:
            raise LogError(
                f"{entry} counts {name}, which was taken against other outer parameters than those after round "
                f"{counted.base_round}"
            )
        self.sizes.append(0 if payload is None else payload.data.numel())
        if payload is not None:
            self.memory.keep_values(payload)
        return fetched

    async def _average(self, ref: OuterRef, headers: Sequence[Header], share: int) -> Payload:
        """The average of one share, made again, and compared with the one in the store, if it is there."""
        fetched = await asyncio.gather(*(self._share(ref, header, share) for header in headers))
        here = {h.replica: (h, x) for h, x in zip(headers, fetched, strict=True) if isinstance(x, Tensor)}
        unsound = {h.replica: x for h, x in zip(headers, fetched, strict=True) if not isinstance(x, Tensor)}
        stored = await self.objects.average(self.state, ref, share)
        # A replica that alone has made it, since all members died, has told nobody.
        author, left_out = (None, set[int]()) if stored is None else (stored[0].replica, {*stored[0].left_out})
        counted = {replica: one for replica, one in here.items() if replica not in left_out}
        made = await self.objects.work(average_of, self.state, self.objects.form, ref.body, share, counted)
        unsound |= made.unsound
        entry, name = source_of(ref.number), AVERAGE.name(ref.number, share)
        for replica, reason in unsound.items():
            if author is not None and replica not in left_out:
                raise LogError(f"{entry}: {name}, by replica {author}, counts a share that is not sound: {reason}")
            self.notes.append(f"{entry}: {name} leaves out replica {replica}: {reason}")
        for replica in sorted(left_out & here.keys()):
            reason = self._reason_to_leave_out(*here[replica], share, author)
            self.notes.append(f"{entry}: {name}, by replica {author}, leaves out replica {replica}{reason}")
        if stored is not None and not stored[1].data.equal(made.payload):
            raise LogError(
                f"{entry}: {name} is not the average of what the entry counts: replica {author} made it"
            )
        return Payload(made.payload, made.values)

    def _reason_to_leave_out(self, header: Header, payload: Tensor, share: int, author: int | None) -> str:
        """The reason why the author of an average may leave out a share that is in the store."""
        try:
            checked_values(header, payload, self.objects.form, share)
        except PayloadError as error:
            return f": {error}"
        return f", whose share is sound: replica {author} could not read it, or it lies"

    async def _share(self, ref: OuterRef, header: Header, share: int) -> Tensor | str:
        """A member's payload of a share, or why it can't be had."""
        try:
            payload = await self.objects.share(header, share)
        except PayloadError as error:
            if isinstance(error, AbsentError) and await self._is_needless(ref):
                raise _RetiredError from None
            return str(error)
        self.sizes.append(payload.numel())
        return payload


class _RetiredError(Exception):
    """A payload was deleted since the log was read, as the replicas of a run that goes on do."""


Initial = Callable[[Mapping[str, Any]], Mapping[str, Tensor] | None]
"""Makes the initial parameters by name from entry 0's facts; None if it can't."""


@dataclass(kw_only=True)
class Checked:
    """Counts of what was checked and found right."""

    entries: int = 0
    closed_by: int | None = None
    """The entry that closes the run; None if none does."""
    rounds: int = 0
    """Outer entries whose payloads were checked."""
    steps: int = 0
    """Outer steps that were taken again, and gave the bits that the log names."""
    payloads: int = 0
    payload_bytes: int = 0
    averages: int = 0
    """Averages of shares that were made again."""
    retired: int = 0
    """Payloads that were deleted after a snapshot had made them needless."""
    snapshots: int = 0
    indexes: int = 0


class Replay:
    """A run, replayed from its store; nothing is written.

    Args:
        store: the run's.
        initial: makes the initial parameters.
        outer: the outer rule, if it is not diloco's own.
        from_snapshot: begin at the newest index and snapshots; by default at entry 0.
    """

    def __init__(
        self,
        store: Store,
        *,
        initial: Initial = lambda facts: None,
        outer: OuterRule | None = None,
        from_snapshot: bool = False,
    ) -> None:
        self.checked = Checked()
        """The counts so far: after an error, up to it."""
        self.notes: list[str] = []
        """Sentences on what could not be checked."""
        self.state: RunState
        """The state after the last entry."""
        self.facts: Mapping[str, Any] = {}
        """The facts of entry 0."""
        self._store, self._initial, self._outer, self._from_snapshot = store, initial, outer, from_snapshot
        self._objects: Objects
        self._run_facts: RunFacts
        self._outers: list[OuterRef] = []
        self._bases: list[dict[int, str]] = []  # for each fragment the digest of Θ_p by round
        self._vectors: dict[int, dict[str, Tensor]] = {}  # by fragment: Θ_p and the rule's slots, where known
        self._rounds: dict[int, int] = {}  # the round of these
        self._snapshots: list[dict[int, SnapshotRef]] = []  # for each fragment those not compared yet, by round
        self._scratch: Tensor

    async def run(self) -> None:
        """Read the log, and take its outer steps again, in order.

        Raises:
            UserError: if the store holds no run, the initial parameters are others, or the memory is too small.
            LogError: for the first violation, naming the entry.
            StoreError: if the store can't be read.
        """
        create, first = await first_entry(self._store)
        self.facts, self._run_facts = create.facts, RunFacts.of(create)
        self._run_facts.check_memory()
        self._outer = self._outer or self._run_facts.outer
        self.checked.entries = 1
        self._objects = Objects(store=self._store, form=self._run_facts.form, run=first.run, patience_seconds=60.0)
        await self._read_log(first)
        counted = Counted(
            objects=self._objects,
            state=self.state,
            bases=self._bases,
            notes=self.notes,
            present=frozenset(name for name, _ in await self._store.list("payloads")),
        )
        await self._find_snapshots()
        await self._start(counted)
        outers = [ref for ref in self._outers if not self._from_snapshot or self._is_after_start(ref)]
        num_shifts = self.state.num_shifts(self._outers)
        self._scratch = torch.empty(max(self._run_facts.form.sizes), dtype=torch.float32, device="cpu")
        async for ref, content in counted.contents(outers):
            self.checked.payloads, self.checked.payload_bytes = len(counted.sizes), sum(counted.sizes)
            if content is None:
                self.checked.retired += len(ref.body.contributions)
            else:
                self.checked.averages += len(content.averages)
                decision = replace(Decision.of(ref, self.state, content), num_shifts=num_shifts[ref.number])
                self._check_round(decision, content)
                await self._check_snapshot(ref.body.fragment)
        self._check_end()
        if not self._from_snapshot:
            await self._compare_digests()

    def checksum(self, fragment: int, last_round: int) -> str | None:
        """The digest of Θ_p after a round, in hexadecimal; None where it is not known."""
        if last_round == self._rounds.get(fragment):
            return f"{outer_digest(self._vectors[fragment]['outer']):016x}"
        return self._bases[fragment].get(last_round)

    @property
    def is_whole(self) -> bool:
        """True if Θ after the last entry is known."""
        return all(self._rounds.get(p) == log.round for p, log in enumerate(self.state.fragments))

    def parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, after the last entry.

        Raises:
            UserError: if it is not known: there was no snapshot, and no initial parameters.
            StoreError: if the run has gone on meanwhile, and deleted what was to be read.
        """
        fragments = range(len(self._run_facts.form.sizes))
        if unknown := [p for p in fragments if p not in self._vectors]:
            raise UserError(
                f"the outer parameters of fragment {unknown[0]} can't be made from the log: it has no snapshot "
                "of them yet, so give the run's initial parameters",
                "initial",
            )
        if not self.is_whole:
            raise self._deleted("payloads of the newest outer steps")
        return self._run_facts.named([self._vectors[p]["outer"] for p in fragments])

    async def _read_log(self, first: RunState) -> None:
        """Read and check all entries, and in a whole replay all indexes."""
        stored = {name for name, _ in await self._store.list("index")}
        self.state = await newest_state(self._store, first) if self._from_snapshot else first
        self._outers = [*self.state.since]
        self._bases = [log.bases for log in self.state.fragments]
        self._snapshots = [{ref.round: ref for ref in log.snapshots} for log in self.state.fragments]
        log = Log(self._store, self.state)
        async for _, entry in log.read():
            self.state = log.state
            self.checked.entries += 1
            if isinstance(entry.body, Outer):
                self._outers.append(self.state.fragments[entry.body.fragment].since[-1])
            if isinstance(entry.body, Snapshot):
                ref = self.state.fragments[entry.body.fragment].snapshots[-1]
                self._snapshots[entry.body.fragment][ref.round] = ref
            if not self._from_snapshot and INDEX.name(self.state.number) in stored:
                await self._check_index(self.state)
        for ref in self._outers:
            self._bases[ref.body.fragment][ref.body.round - 1] = ref.body.before
        for p, base in enumerate(self.state.closed):
            self._bases[p][self.state.fragments[p].round] = base
            self.checked.closed_by = self.state.number - 1
        await log.check_no_gap()
        if foreign := [name for name, _ in await self._store.list("log") if not is_entry(name)]:
            self.notes.append(f"{', '.join(foreign)}: diloco has not written them, and nobody reads them")

    async def _find_snapshots(self) -> None:
        """Drop the snapshots that were retired: they are not in the store, and need not be."""
        names = {name for name, _ in await self._store.list("snapshots")}
        for p, refs in enumerate(self._snapshots):
            named = {snapshot_name(p, ref.round, ref.sha256): ref for ref in refs.values()}
            needed = self.state.fragments[p].snapshots
            self._snapshots[p] = {ref.round: ref for name, ref in named.items() if name in names or ref in needed}
            names -= named.keys()
        if names and not self._from_snapshot:
            # As where a run ended after the upload.
            self.notes.append(f"no entry names {', '.join(sorted(names))}, so that nobody reads it")

    async def _check_index(self, state: RunState) -> None:
        data = await self._store.get(INDEX.name(state.number), most_bytes=MOST_INDEX_BYTES)
        if data is None:
            return  # it was retired a moment ago
        opened, source = open_index(data, state.number), index_source(state.number)
        INDEX.check(opened, state.members[opened.header.author].key, source)
        if opened.header.state != state:
            raise LogError(f"{source} does not say what the entries 0 to {state.number - 1} say: delete it")
        self.checked.indexes += 1

    async def _start(self, counted: Counted) -> None:
        """Find the round after which each fragment's outer steps can be repeated, and Θ_p after it."""
        parameters = self._initial(self.facts)
        initial = None if parameters is None else self._run_facts.flat(parameters)
        for p, log in enumerate(self.state.fragments if self._outer is not None else ()):
            refs = (ref for ref in self._outers if ref.body.fragment == p and counted.is_retired(ref))
            last_gone = max((ref.body.round for ref in refs), default=0)
            known = [ref for ref in log.snapshots if ref.round >= last_gone]
            if initial is not None and not last_gone and not (self._from_snapshot and known):
                await self._start_at(p, 0, {"outer": initial[p]})
            elif known:
                ref = known[-1] if self._from_snapshot else known[0]
                vectors = await self._snapshot(p, ref)
                self._compare_base(p, ref.round, f"the snapshot of entry {ref.number} of the log", vectors)
                await self._start_at(p, ref.round, vectors)
        self._note(initial is None)

    async def _start_at(self, p: int, last_round: int, vectors: Mapping[str, Tensor]) -> None:
        assert self._outer is not None, "where it is None, no Θ is known"
        zeros = {slot: torch.zeros_like(vectors["outer"]) for slot in self._outer.slots}
        self._vectors[p] = zeros | {kind: vector.clone() for kind, vector in vectors.items()}
        self._rounds[p] = last_round

    def _note(self, without_initial: bool) -> None:
        """Say what can't be checked."""
        if self._outer is None:
            self.notes.append(
                f"the outer steps were not repeated: their rule, {self._run_facts.outer_name}, is not diloco's own"
            )
        elif unknown := [p for p, log in enumerate(self.state.fragments) if p not in self._vectors and log.round]:
            self.notes.append(
                "the outer parameters were not checked before the first snapshot, since the initial parameters "
                f"are not here: those of {_fragments(unknown)} not at all"
            )
        elif without_initial and not self._from_snapshot and any(self._rounds.values()):
            self.notes.append(
                "the outer parameters were checked from the oldest snapshots on, since the initial parameters "
                "are not here"
            )

    def _is_after_start(self, ref: OuterRef) -> bool:
        return ref.body.round > self._rounds.get(ref.body.fragment, 0)

    def _check_round(self, decision: Decision, content: Content) -> None:
        """Take one outer step again, if Θ_p is known."""
        p, form = decision.fragment, self._run_facts.form
        self.checked.rounds += 1
        if self._rounds.get(p) != decision.round - 1:
            return
        self._compare_base(p, decision.round - 1, source_of(decision.number), self._vectors[p])
        assert self._outer is not None, "where it is None, no Θ is known"
        average = decided_average(form, decision, content, self._scratch[: form.sizes[p]])
        fragment = FragmentState(self._vectors[p].__getitem__, self._run_facts.spans(p))
        sync = Sync(p, decision.round_of_rule, 0)
        (SHIFT if decision.is_shift else self._outer).on_average(fragment, average, sync, decision.cohort)
        self._rounds[p] = decision.round
        self.checked.steps += 1

    def _check_end(self) -> None:
        """Compare the last Θ with what the entry that closes the run says of it, as far as both are known."""
        for p, log in enumerate(self.state.fragments if self.state.closed else ()):
            if self._rounds.get(p) == log.round:
                self._compare_base(p, log.round, source_of(self.state.number - 1), self._vectors[p])

    def _compare_base(self, p: int, last_round: int, source: str, vectors: Mapping[str, Tensor]) -> None:
        """Compare Θ_p after a round with what the log says of it, if it says so already."""
        base = self._bases[p].get(last_round)
        own = f"{outer_digest(vectors['outer']):016x}" if "outer" in vectors else "missing"
        if base is not None and base != own:
            raise LogError(
                f"{source}: the outer parameters of fragment {p} after round {last_round} are {own}, and the log "
                f"says {base}"
            )

    async def _check_snapshot(self, p: int) -> None:
        """Compare a snapshot with the replay, if there is one of this round."""
        if (last_round := self._rounds.get(p)) is None or last_round not in self._snapshots[p]:
            return
        ref = self._snapshots[p][last_round]
        if await self._is_retired(p, ref):
            return
        vectors = await self._snapshot(p, ref)
        if any(not torch.equal(vectors[kind], own) for kind, own in self._vectors[p].items()):
            raise LogError(f"the snapshot of entry {ref.number} of the log is not what the entries before it make")

    async def _compare_digests(self) -> None:
        """Compare Θ_p of each snapshot that no repeated outer step has made with the digest that the log names."""
        compared: list[str] = []
        for p, refs in enumerate(self._snapshots):
            for ref in [*refs.values()]:
                if await self._is_retired(p, ref):
                    continue
                stored = await self._objects.snapshot(p, ref)
                self._compare_base(p, ref.round, f"the snapshot of entry {ref.number} of the log", stored.vectors)
                self.checked.snapshots += 1
                compared.append(stored.name)
        if compared:
            self.notes.append(
                "no repeated outer step made these snapshots, of which the log's digest of the outer parameters "
                f"alone was checked: {', '.join(compared)}"
            )

    async def _is_retired(self, p: int, ref: SnapshotRef) -> bool:
        """True for a snapshot that nobody needs, and that was deleted since its name was listed."""
        if snapshot_name(p, ref.round, ref.sha256) in [name for name, _ in await self._store.list("snapshots")]:
            return False
        newest = await Log(self._store, self.state).read_all()
        return ref not in newest.fragments[p].snapshots

    def _deleted(self, objects: str) -> StoreError:
        return StoreError(
            f"the run in {self._store.url} went on, and deleted {objects} before they were read: try again"
        )

    async def _snapshot(self, p: int, ref: SnapshotRef) -> dict[str, Tensor]:
        try:
            stored = await self._objects.snapshot(p, ref)
        except LogError:
            if await self._is_retired(p, ref):
                raise self._deleted(f"snapshots of fragment {p}") from None
            raise
        del self._snapshots[p][ref.round]
        kinds = {"outer", *(self._outer.slots if self._outer is not None else ())}
        if stored.vectors.keys() != kinds:
            raise LogError(f"{source_of(ref.number)}: {stored.name} holds {', '.join(stored.vectors)}")
        self.checked.snapshots += 1
        return dict(stored.vectors)


def replayed(
    url: str,
    *,
    initial: Initial = lambda facts: None,
    outer: OuterRule | None = None,
    from_snapshot: bool = False,
) -> Replay:
    """The replay of the run of a URL, done; arguments and errors as those of `Replay`."""
    replay = Replay(open_run(url), initial=initial, outer=outer, from_snapshot=from_snapshot)
    asyncio.run(replay.run())
    return replay


def _fragments(several: Sequence[int]) -> str:
    return f"fragment{'s' * (len(several) > 1)} {', '.join(map(str, several))}"
