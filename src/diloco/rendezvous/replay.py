"""The replay of a run from its log alone: every entry, payload and outer step is checked, and Θ is what comes out.

It shares no code with the thread that follows a log in a live run, nor with the engine's rounds, but the state
machine, the codecs and the outer rule.

Shapes: N elements of one fragment.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.outer.digest import outer_digest
from diloco.outer.rule import FragmentState, OuterRule
from diloco.reduction.reduction import Average
from diloco.rendezvous import index, snapshots
from diloco.rendezvous.archive import newest_state
from diloco.rendezvous.counted import CountedPayloads
from diloco.rendezvous.counted_shares import CountedShares
from diloco.rendezvous.entries import MOST_BYTES, LogError, Outer, name_of
from diloco.rendezvous.facts import RunFacts
from diloco.rendezvous.history import entries_after, first_entry, open_run
from diloco.rendezvous.keys import check
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.state import OuterRef, SnapshotRef
from diloco.rendezvous.store import Store
from diloco.schedule import Sync

Initial = Callable[[Mapping[str, Any]], Mapping[str, Tensor] | None]
"""Makes the initial parameters by name from entry 0's facts; None if it can't."""


@dataclass(kw_only=True)
class Checked:
    """Counts of what was checked and found right."""

    entries: int = 0
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
        self._run_facts: RunFacts
        self._outers: list[OuterRef] = []
        self._bases: list[dict[int, str]] = []  # for each fragment the digest of Θ_p by round
        self._vectors: dict[int, dict[str, Tensor]] = {}  # by fragment: Θ_p and the rule's slots, where known
        self._rounds: dict[int, int] = {}  # the round of these
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
        await self._read_log(first)
        counted = (CountedPayloads if self._run_facts.form.second is None else CountedShares)(
            store=self._store,
            form=self._run_facts.form,
            state=self.state,
            bases=self._bases,
            notes=self.notes,
            present=frozenset(name for name, _ in await self._store.list("payloads")),
        )
        await self._start(counted)
        outers = [ref for ref in self._outers if not self._from_snapshot or self._is_after_start(ref)]
        self._scratch = torch.empty(max(self._run_facts.form.sizes))
        async for ref, several in counted.of(outers):
            self.checked.payloads, self.checked.payload_bytes = len(counted.sizes), sum(counted.sizes)
            if several is None:
                self.checked.retired += len(ref.body.contributions)
            else:
                self.checked.averages += len(several) if self._run_facts.form.num_shares > 1 else 0
                self._check_round(ref, partial(counted.average, ref, several))
                await self._check_snapshot(ref.body.fragment)

    def checksum(self, fragment: int, last_round: int) -> str | None:
        """The digest of Θ_p after a round, in hexadecimal; None where it is not known."""
        if last_round == self._rounds.get(fragment):
            return f"{outer_digest(self._vectors[fragment]['outer']):016x}"
        return self._bases[fragment].get(last_round)

    @property
    def is_whole(self) -> bool:
        """Whether Θ is known."""
        return len(self._vectors) == len(self._run_facts.form.sizes)

    def parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, after the last entry.

        Raises:
            UserError: if it is not known: there was no snapshot, and no initial parameters.
        """
        fragments = range(len(self._run_facts.form.sizes))
        if unknown := [p for p in fragments if p not in self._vectors]:
            raise UserError(
                f"the outer parameters of fragment {unknown[0]} can't be made from the log: it has no snapshot "
                "of them yet, so give the run's initial parameters",
                "initial",
            )
        return self._run_facts.named([self._vectors[p]["outer"] for p in fragments])

    async def _read_log(self, first: RunState) -> None:
        """Read and check all entries, and in a whole replay all indexes."""
        stored = {name for name, _ in await self._store.list("index")}
        self.state = await newest_state(self._store, first) if self._from_snapshot else first
        logs = self.state.fragments
        self._outers = sorted((ref for log in logs for ref in log.since), key=lambda ref: ref.number)
        self._bases = [
            {log.round - back: base for back, base in enumerate(reversed(log.before), 1)} for log in logs
        ]
        async for number, entry, state in entries_after(self._store, self.state):
            self.state = state
            self.checked.entries += 1
            if isinstance(entry.body, Outer):
                self._outers.append(OuterRef(number=number, body=entry.body))
            if not self._from_snapshot and index.name_of(state.number) in stored:
                await self._check_index(state)
        for ref in self._outers:
            self._bases[ref.body.fragment][ref.body.round - 1] = ref.body.before
        later = [name for name, _ in await self._store.list("log") if name > name_of(self.state.number)]
        if later and await self._store.get(name_of(self.state.number), most_bytes=MOST_BYTES) is None:
            raise LogError(f"entry {self.state.number} of the log is missing, and {later[0]} is there")

    async def _check_index(self, state: RunState) -> None:
        data = await self._store.get(index.name_of(state.number), most_bytes=index.MOST_BYTES)
        if data is None:
            return  # it was retired a moment ago
        stored, signature = index.opened(bytes(data), number=state.number)
        source = f"index {state.number} of the log"
        check(state.members[stored.author].key, signature, stored.line(), source=source)
        if stored.state != state:
            raise LogError(f"{source} does not say what the entries 0 to {state.number - 1} say: delete it")
        self.checked.indexes += 1

    async def _start(self, counted: CountedPayloads) -> None:
        """Find the round from which each fragment's outer steps can be taken again, and Θ_p after it."""
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
                await self._start_at(p, ref.round, await self._snapshot(p, ref))
                self._compare_base(p, ref.round, f"the snapshot of entry {ref.number} of the log")
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

    def _check_round(self, ref: OuterRef, average: Callable[[Tensor], Average]) -> None:
        """Take one outer step again, if Θ_p is known; `average` writes Δ_p to memory."""
        body, p = ref.body, ref.body.fragment
        self.checked.rounds += 1
        if self._rounds.get(p) != body.round - 1:
            return
        self._compare_base(p, body.round - 1, f"entry {ref.number} of the log")
        assert self._outer is not None, "where it is None, no Θ is known"
        cohort = self.state.cohort(body.contributions)
        delta, sync = average(self._scratch[: self._run_facts.form.sizes[p]]), Sync(p, body.round, 0)
        self._outer.on_average(FragmentState(self._vectors[p].__getitem__), delta, sync, cohort)
        self._rounds[p] = body.round
        self.checked.steps += 1

    def _compare_base(self, p: int, last_round: int, source: str) -> None:
        """Compare Θ_p after a round with what the log says of it, if it says so already."""
        base = self._bases[p].get(last_round)
        own = f"{outer_digest(self._vectors[p]['outer']):016x}"
        if base is not None and base != own:
            raise LogError(
                f"{source}: the outer parameters of fragment {p} after round {last_round} are {own}, and the log "
                f"says {base}"
            )

    async def _check_snapshot(self, p: int) -> None:
        """Compare a snapshot with the replay, if there is one of this round."""
        for ref in self.state.fragments[p].snapshots:
            if ref.round == self._rounds.get(p):
                vectors = await self._snapshot(p, ref)
                if any(not torch.equal(vectors[kind], own) for kind, own in self._vectors[p].items()):
                    raise LogError(
                        f"the snapshot of entry {ref.number} of the log is not what the entries before it make"
                    )

    async def _snapshot(self, p: int, ref: SnapshotRef) -> dict[str, Tensor]:
        size, name = self._run_facts.form.sizes[p], snapshots.name_of(p, ref.round, ref.sha256[0])
        data = await self._store.get(name, most_bytes=snapshots.most_bytes(size))
        if data is None:
            raise LogError(f"entry {ref.number} of the log names {name}, which is not in the store")
        try:
            vectors = snapshots.opened(data, name=name, num_elements=size)
        except snapshots.SnapshotError as error:
            raise LogError(f"entry {ref.number} of the log: {error}") from None
        kinds = {"outer", *(self._outer.slots if self._outer is not None else ())}
        if vectors.keys() != kinds:
            raise LogError(f"entry {ref.number} of the log: {name} holds {', '.join(vectors)}")
        self.checked.snapshots += 1
        return vectors


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
