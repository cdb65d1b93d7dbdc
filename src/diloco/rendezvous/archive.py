"""The start of a joiner: snapshots, the index of the log, and the retiring of objects that nobody needs.

The index is the bookkeeping of the log up to an entry, so that a joiner need not read the log from its
beginning: two lines like an entry, compact JSON and its author's signature. `kind` keeps the two apart.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from torch import Tensor

from diloco.errors import FileError
from diloco.files import sha256
from diloco.rendezvous.contract import StoredSnapshot
from diloco.rendezvous.log.entries import (
    MOST_ENTRY_BYTES,
    SIGNATURE,
    Keys,
    LogError,
    Snapshot,
    entry_name,
    open_entry,
)
from diloco.rendezvous.log.keys import Signer, check
from diloco.rendezvous.log.log import FOR_EVER, Log
from diloco.rendezvous.log.run import MOST_NORMS, FragmentLog, RunState
from diloco.rendezvous.objects import most_snapshot_bytes, seal_snapshot, snapshot_name
from diloco.rendezvous.store import Store, StoreError
from diloco.schema import decoded

MOST_INDEX_BYTES = 1 << 25
"""Length of the longest index that is read."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The state after the entries 0 … k−1, by one replica's word."""

    kind: Literal["index"] = "index"
    author: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    state: RunState

    def line(self) -> bytes:
        """The JSON line, which is what is signed."""
        text = json.dumps(msgspec.to_builtins(self), separators=(",", ":"), sort_keys=True, allow_nan=False)
        return text.encode() + b"\n"


def index_name(number: int) -> str:
    """The name of the index of the entries 0 … number − 1 in the store."""
    return f"index/{number:010d}"


def index_number(name: str) -> int | None:
    """The number of the index that an object is; None if it is none."""
    match = re.fullmatch(r"index/(\d{10})", name)
    return None if match is None else int(match[1])


def seal_index(index: Index, signature: str) -> bytes:
    """The bytes of an index, from the signature of its line."""
    return index.line() + signature.encode() + b"\n"


def open_index(data: bytes, *, number: int) -> tuple[Index, str]:
    """An index and its signature, from bytes that nobody has checked.

    The caller checks the signature against `index.state.members[index.author].key`, that key and the allow-list
    against entry 0 and the `kept` entries, and `state.previous` against the entry before.

    Args:
        data: the object.
        number: that of its name.

    Raises:
        LogError: naming the index, if `sealed` does not write these bytes, or no log leads to this state.
    """
    source = f"index {number} of the log"
    if len(data) > MOST_INDEX_BYTES:
        raise LogError(f"{source} can't be read: it has more than {MOST_INDEX_BYTES:,} bytes")
    line, _, rest = data.partition(b"\n")
    try:
        index = decoded(line, Index, source=source)
        signature = rest.removesuffix(b"\n").decode("ascii")
        is_canonical = seal_index(index, signature) == data and SIGNATURE.fullmatch(signature)
    except FileError as error:
        raise LogError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise LogError(f"{source} can't be read: {error}") from None
    if not is_canonical:
        raise LogError(f"{source} can't be read: its bytes are not in the form in which diloco writes them")
    if reason := next(_contradictions(index, number), None):
        raise LogError(f"{source} can't be true: {reason}")
    return index, signature


def _contradictions(index: Index, number: int) -> Iterator[str]:
    """The reasons, in words, why no log leads to a state."""
    state = index.state
    members, num_slots = state.members, state.rules.num_slots
    held = [member for member in members if not member.fenced]
    if state.number != number or number < 1 + len(members) + state.num_outer + len(state.kept):
        yield f"it counts {state.number} entries"
    if index.author >= len(members) or members[index.author].fenced:
        yield f"its author, replica {index.author}, has not joined, or was replaced"
    if len(state.fragments) != state.rules.num_fragments:
        yield f"it has {len(state.fragments)} fragments"
    if len({m.slot for m in held}) < len(held) or len({m.name for m in held}) < len(held):
        yield "two replicas share a slot or a name"
    if any(m.slot >= num_slots or not m.joined <= m.last_outer <= state.num_outer for m in members):
        yield "a replica has a slot, or outer entries, that the run has not"
    if any(slot >= num_slots for slot in state.positions):
        yield "a slot has a position, and the run has no such slot"
    if state.tokens != sum(m.tokens for m in members) or state.num_outer != sum(f.round for f in state.fragments):
        yield "its sums are wrong"
    if not state.creator and (state.allowed or state.kept or any(m.key for m in members)):
        yield "it has keys, in a run without keys"
    if state.creator and ("" in state.allowed or not all(m.key for m in members)):
        yield "it has replicas without keys, in a run with keys"
    if not _ascends([0, *state.kept, number]):
        yield "its changes of the allow-list are out of order"
    for fragment, log in enumerate(state.fragments):
        if reason := next(_contradictions_of(state, fragment, log), None):
            yield f"of fragment {fragment}, {reason}"


def _contradictions_of(state: RunState, fragment: int, log: FragmentLog) -> Iterator[str]:
    rules, members = state.rules, state.members
    if len(log.before) != min(log.round, rules.max_stale + 1):
        yield f"it has {len(log.before)} checksums after {log.round} rounds"
    if not min(log.round, MOST_NORMS) <= len(log.norms) <= MOST_NORMS or (log.norms and not log.round):
        yield f"it has {len(log.norms)} norms after {log.round} rounds"
    for replica, seq in log.last_seq.items():
        if replica >= len(members) or members[replica].fenced:
            yield f"payload {seq} of replica {replica} can't have been counted"
    for slot, number in log.last_round.items():
        if slot >= rules.num_slots or not 0 < number <= log.round:
            yield f"round {number} can't have counted the replica of slot {slot}"
    rounds = [ref.round for ref in log.snapshots]
    if len(rounds) > 2 or not _ascends([0, *rounds, log.round + 1]):
        yield f"it has snapshots of the rounds {rounds} after {log.round} rounds"
    if not _ascends([0, *(ref.number for ref in log.snapshots), state.number]):
        yield "its snapshots are out of order"
    first = rounds[0] if len(rounds) == 2 else 0
    if [ref.body.round for ref in log.since] != list(range(first + 1, log.round + 1)[: len(log.since) + 1]):
        yield f"its outer entries are not those of the rounds {first + 1} to {log.round}"
    if not _ascends([0, *(ref.number for ref in log.since), state.number]):
        yield "its outer entries are out of order"
    newest = tuple(ref.body.before for ref in log.since)[-len(log.before) :] if log.before else ()
    if newest and newest != log.before[-len(newest) :]:
        yield "its checksums are not those of its outer entries"
    for ref in log.since:
        replicas = [c.replica for c in ref.body.contributions]
        if ref.body.fragment != fragment or not replicas or not _ascends([-1, *replicas, len(members)]):
            yield f"outer entry {ref.number} has wrong contributions"


def _ascends(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


_PAYLOAD = re.compile(r"payloads/(\d{1,10})/(\d{1,20})(?:[-/].*)?")


_AVERAGE = re.compile(r"averages/(\d{10})/\d{1,10}")


_SNAPSHOT = re.compile(r"snapshots/(\d{1,10})/(\d{1,20})-([0-9a-f]{64})")


_INDEX = re.compile(r"index/(\d{10})")


def retirable(state: RunState, names: Iterable[str]) -> list[str]:
    """The objects that nobody needs any more

    A joiner reads the newest index, the last two snapshots of each fragment, the payloads and averages of the
    outer entries since the first of them, and the entries after the index. A replica that was away for longer does
    the same. Entries are never retired: a replica that wakes up after days would find its next entry absent, write
    it, and go on alone.

    Args:
        state: that of the newest index in the store.
        names: of objects in the store.
    """
    since = [ref for log in state.fragments for ref in log.since]
    counted = {(c.replica, c.seq) for ref in since for c in ref.body.contributions}
    needed = {ref.number for ref in since}
    snapshots = {
        (fragment, ref.round, sha256)
        for fragment, log in enumerate(state.fragments)
        for ref in log.snapshots
        for sha256 in ref.sha256
    }

    def is_retirable(name: str) -> bool:
        if match := _PAYLOAD.fullmatch(name):
            replica, seq = int(match[1]), int(match[2])
            return (replica, seq) not in counted and not _may_count(state, replica, seq)
        if match := _AVERAGE.fullmatch(name):
            return int(match[1]) < state.number and int(match[1]) not in needed
        if match := _SNAPSHOT.fullmatch(name):
            fragment, rounds = int(match[1]), int(match[2])
            if fragment >= len(state.fragments) or not (refs := state.fragments[fragment].snapshots):
                return False
            return rounds <= refs[-1].round and (fragment, rounds, match[3]) not in snapshots
        match = _INDEX.fullmatch(name)
        return match is not None and int(match[1]) < state.number

    return [name for name in names if is_retirable(name)]


def _may_count(state: RunState, replica: int, seq: int) -> bool:
    """Whether a payload may still enter an entry."""
    if replica >= len(state.members):
        return True  # of a replica that joined after the index
    # The log does not say of which fragment a payload is that was not counted.
    oldest = min(log.last_seq.get(replica, -1) for log in state.fragments)
    return not state.members[replica].fenced and seq > oldest


_LOG = logging.getLogger("diloco")


_RETIRED = ("payloads", "averages", "snapshots", "index")


_MOST_LISTINGS, _LISTING_SECONDS = 10, 0.5


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
        """Upload what comes, for ever, and append the entry that says so."""
        while True:
            await self._has_more.wait()
            fragment = next(iter(self._waiting))
            last_round, vectors = self._waiting.pop(fragment)
            if not self._waiting:
                self._has_more.clear()
            buffers, digest = await asyncio.to_thread(seal_snapshot, vectors)
            name = snapshot_name(fragment, last_round, digest)
            await self._store.create(name, buffers, patience_seconds=FOR_EVER)
            await self._log.check_there()
            append(Snapshot(fragment=fragment, round=last_round, sha256=(digest,)))


async def newest_snapshot(
    store: Store, state: RunState, fragment: int, num_elements: int
) -> StoredSnapshot | None:
    """A fragment's newest snapshot; None if there is none yet.

    Raises:
        LogError: if the log names it, and it is not in the store.
    """
    if not (refs := state.fragments[fragment].snapshots):
        return None
    name = snapshot_name(fragment, refs[-1].round, refs[-1].sha256[0])
    most_bytes = most_snapshot_bytes(num_elements)
    data = await store.get(name, most_bytes=most_bytes, patience_seconds=FOR_EVER)
    if data is None:
        raise LogError(f"{name} is not in the store, though the log names it")
    return StoredSnapshot(round=refs[-1].round, name=name, data=data)


async def write_index(store: Store, signer: Signer, state: RunState, *, author: int) -> None:
    """Write an index of the log up to now, and delete what nobody needs after that."""
    made = Index(author=author, state=state)
    data = seal_index(made, signer.sign(made.line()))
    if len(data) > MOST_INDEX_BYTES:
        _LOG.warning(
            "index %d of %s would have %d bytes, and may have %d: joiners read the whole log instead; choose a "
            "smaller snapshot_rounds, or fewer fragments, for the next run",
            state.number,
            store.url,
            len(data),
            MOST_INDEX_BYTES,
        )
    else:
        await store.create(index_name(state.number), data, patience_seconds=FOR_EVER)
    try:
        names = [name for prefix in _RETIRED for name, _ in await store.list(prefix)]
        await store.delete(retirable(state, names))
    except StoreError as error:  # training goes on; whoever writes the next index deletes more
        _LOG.warning("%s: what nobody needs is deleted later", error)


async def newest_state(store: Store, first: RunState) -> RunState:
    """The state of the newest index, or that after entry 0 if there is none.

    Args:
        store: the run's.
        first: the state after entry 0.

    Raises:
        LogError: if the index is damaged, or forged.
    """
    for _ in range(_MOST_LISTINGS):
        numbers = [index_number(name) for name, _ in await store.list("index")]
        if (number := max((n for n in numbers if n is not None), default=None)) is None:
            return first
        data = await store.get(index_name(number), most_bytes=MOST_INDEX_BYTES)
        if data is not None:
            return await _state_of(store, first, number, bytes(data))
        await asyncio.sleep(_LISTING_SECONDS)  # a newer one has taken its place, which the listing may show later
    return first


async def _state_of(store: Store, first: RunState, number: int, data: bytes) -> RunState:
    """The state of an index, compared with entry 0 and with the entry before the index."""
    made, signature = open_index(data, number=number)
    state, source = made.state, f"index {number} of the log"
    if (state.run, state.rules, state.creator) != (first.run, first.rules, first.creator):
        raise LogError(f"{source} is of another run")
    if state.creator:
        allowed = await _ever_allowed(store, first, state)
        if state.members[made.author].key not in allowed:
            raise LogError(f"{source} is by a replica whose key the run's creator has not allowed")
    check(state.members[made.author].key, signature, made.line(), source=source)
    before = await store.get(entry_name(number - 1), most_bytes=MOST_ENTRY_BYTES)
    if before is None or sha256(bytes(before)) != state.previous:
        raise LogError(f"{source} does not follow entry {number - 1}: the log or the index was changed")
    _check_newest_keys(bytes(before), state, source)
    return state


def _check_newest_keys(before: bytes, state: RunState, source: str) -> None:
    """Compare an index with the entry before it, whose author signed which change of the allow-list is the newest.

    Without it, a replica that was revoked could write an index that leaves its revocation out.
    """
    number = state.number - 1
    entry, signature = open_entry(before, number=number)
    if not -1 <= entry.author < len(state.members):
        raise LogError(f"{source} leaves out replica {entry.author}")
    key = state.creator if entry.author == -1 else state.members[entry.author].key
    check(key, signature, entry.line(), source=f"entry {number} of the log")
    if state.keys != (number if isinstance(entry.body, Keys) else entry.keys):
        raise LogError(f"{source} leaves out a change of the allow-list")


async def _ever_allowed(store: Store, first: RunState, state: RunState) -> tuple[str, ...]:
    """The keys that the creator's own entries allow, which must be those of the index."""
    allowed = list(first.allowed)
    for number in state.kept:
        data = await store.get(entry_name(number), most_bytes=MOST_ENTRY_BYTES)
        if data is None:
            raise LogError(f"entry {number} of the log, which changes the allow-list, is not in the store")
        entry, signature = open_entry(bytes(data), number=number)
        check(first.creator, signature, entry.line(), source=f"entry {number} of the log")
        if not isinstance(entry.body, Keys):
            raise LogError(f"entry {number} of the log does not change the allow-list, and an index says so")
        allowed = [k for k in dict.fromkeys((*allowed, *entry.body.allowed)) if k not in entry.body.revoked]
    if tuple(allowed) != state.allowed:
        raise LogError(f"index {state.number} of the log has another allow-list than the creator's entries")
    return tuple(allowed)
