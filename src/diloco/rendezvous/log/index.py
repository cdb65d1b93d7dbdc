"""The index of the log: its bookkeeping up to an entry, so that a joiner need not read the log from its beginning.

With each index the objects are retired that nobody needs any more.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from diloco.files import sha256
from diloco.rendezvous.log.entries import Keys, LogError
from diloco.rendezvous.log.keys import MOST_SIGNATURE_BYTES, Opened, Signed, Signer
from diloco.rendezvous.log.log import ENTRY, FOR_EVER, source_of, stored_entry
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import Store, StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_INDEX_BYTES = 1 << 25
"""Size of the largest index that is read."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The state after the entries 0 … k−1, as one replica states it."""

    author: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    state: RunState


INDEX = Signed(
    word="index",
    place="index/{:010d}",
    form=Index,
    most_header_bytes=MOST_INDEX_BYTES - MOST_SIGNATURE_BYTES,
    has_body=False,
    error=LogError,
)


def index_source(number: int) -> str:
    """An index in words, for errors."""
    return f"index {number} of the log"


def open_index(data: "Buffer", number: int) -> Opened[Index]:
    """An index, from bytes that nobody has checked.

    The caller checks the signature against the author's key, that key and the allow-list against entry 0 and the
    `kept` entries, and `state.previous` against the entry before.

    Raises:
        LogError: naming the index, if `INDEX.seal` does not write these bytes, or nobody can read on from this
            state.
    """
    opened = INDEX.open(data, index_source(number))
    if reason := _contradiction(opened.header, number):
        raise LogError(f"{index_source(number)} can't be true: {reason}")
    return opened


def _contradiction(index: Index, number: int) -> str:
    """The reason why nobody can read on from a state; empty if one can. A replay finds all other false values."""
    state, refs = index.state, index.state.since
    replicas = {index.author, *(c.replica for ref in refs for c in ref.body.contributions)}
    replicas |= {replica for log in state.fragments for replica in log.last_seq}
    if state.number != number:
        return f"it counts {state.number} entries"
    if state.closed:
        return "it says that the run is closed"
    if not state.is_complete and any(log.round for log in state.fragments):
        return "it has outer steps, and says that the run has not begun"
    if missing := [replica for replica in replicas if replica >= len(state.members)]:
        return f"replica {missing[0]} has not joined"
    if state.members[index.author].fenced:
        return f"its author, replica {index.author}, was replaced"
    if any(member.slot >= state.rules.num_slots for member in state.members):
        return "a replica has a slot that the run has not"
    if len(state.fragments) != state.rules.num_fragments:
        return f"it has {len(state.fragments)} fragments"
    if not state.losses.fit(state.num_outer):
        return f"its losses are not those of {state.num_outer} outer steps"
    if any(ref.body.fragment != p for p, log in enumerate(state.fragments) for ref in log.since):
        return "it has an outer entry in the place of another fragment's"
    return "" if all(ref.body.contributions for ref in refs) else "it has an outer entry without contributions"


_PAYLOAD = re.compile(r"payloads/(\d{1,10})/(\d{1,20})(?:-\d{1,10})?")
_AVERAGE = re.compile(r"averages/(\d{10})/\d{1,10}")
_SNAPSHOT = re.compile(r"snapshots/(\d{1,10})/(\d{1,20})-([0-9a-f]{64})")
_INDEX = re.compile(r"index/(\d{10})")
"""The names of the objects that are retired."""


def retirable(state: RunState, names: Iterable[str]) -> list[str]:
    """The objects that nobody needs any more.

    A joiner reads the newest index, the last two snapshots of each fragment, the payloads and averages of the
    outer entries since the first of them, and the entries after the index. A replica that was away for longer does
    the same. Entries are never retired: a replica that wakes up after days would find its next entry absent, write
    it, and go on alone.

    Args:
        state: that of the newest index in the store.
        names: of objects in the store.
    """
    counted = {(c.replica, c.seq) for ref in state.since for c in ref.body.contributions}
    needed = {ref.number for ref in state.since}
    snapshots = {(p, ref.round, ref.sha256) for p, log in enumerate(state.fragments) for ref in log.snapshots}

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
    """True if a payload may still enter an entry."""
    if replica >= len(state.members):
        return True  # of a replica that joined after the index
    # The log does not say of which fragment a payload is that was not counted.
    return not state.members[replica].fenced and seq > min(state.last_seqs(replica))


_LOG = logging.getLogger("diloco")
_RETIRED = ("payloads", "averages", "snapshots", "index")
_MOST_LISTINGS, _LISTING_SECONDS = 10, 0.5


async def write_index(store: Store, signer: Signer, state: RunState, *, author: int) -> None:
    """Write an index of the log up to now, and delete what nobody needs after that."""
    data = INDEX.seal(Index(author=author, state=state), signer)
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
        await store.create(INDEX.name(state.number), data, patience_seconds=FOR_EVER)
    try:
        names = [name for prefix in _RETIRED for name, _ in await store.list(prefix)]
        await store.delete(retirable(state, names))
    except StoreError as error:  # training goes on; the writer of the next index deletes more
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
        matches = [_INDEX.fullmatch(name) for name, _ in await store.list("index")]
        if (number := max((int(match[1]) for match in matches if match), default=None)) is None:
            return first
        data = await store.get(INDEX.name(number), most_bytes=MOST_INDEX_BYTES)
        if data is not None:
            return await _state_of(store, first, number, data)
        await asyncio.sleep(_LISTING_SECONDS)  # a newer one has taken its place, which the listing may show later
    return first


async def _state_of(store: Store, first: RunState, number: int, data: "Buffer") -> RunState:
    """The state of an index, compared with entry 0 and with the entry before the index."""
    opened, source = open_index(data, number), index_source(number)
    state, author = opened.header.state, opened.header.author
    if (state.run, state.rules, state.creator) != (first.run, first.rules, first.creator):
        raise LogError(f"{source} is of another run")
    if state.creator:
        allowed = await _ever_allowed(store, first, state)
        if state.members[author].key not in allowed:
            raise LogError(f"{source} is by a replica whose key the run's creator has not allowed")
    INDEX.check(opened, state.members[author].key, source)
    before = await stored_entry(store, number - 1)
    if before is None or sha256(before) != state.previous:
        raise LogError(f"{source} does not follow entry {number - 1}: the log or the index was changed")
    _check_newest_keys(before, state, source)
    return state


def _check_newest_keys(before: bytes, state: RunState, source: str) -> None:
    """Compare an index with the entry before it, whose author signed which change of the allow-list is the newest.

    Without it, a replica that was revoked could write an index that leaves its revocation out.
    """
    number = state.number - 1
    opened = ENTRY.open(before, source_of(number))
    entry = opened.header
    if not -1 <= entry.author < len(state.members):
        raise LogError(f"{source} leaves out replica {entry.author}")
    public = state.creator if entry.author == -1 else state.members[entry.author].key
    ENTRY.check(opened, public, source_of(number))
    if state.keys != (number if isinstance(entry.body, Keys) else entry.keys):
        raise LogError(f"{source} leaves out a change of the allow-list")


async def _ever_allowed(store: Store, first: RunState, state: RunState) -> tuple[str, ...]:
    """The keys that the creator's own entries allow, which must be those of the index.

    Each change of the list names the one before it, so that the index can leave none out.
    """
    allowed, newest = list(first.allowed), first.keys
    for number in state.kept:
        if (data := await stored_entry(store, number)) is None:
            raise LogError(f"{source_of(number)}, which changes the allow-list, is not in the store")
        opened = ENTRY.open(data, source_of(number))
        ENTRY.check(opened, first.creator, source_of(number))
        body = opened.header.body
        if not isinstance(body, Keys):
            raise LogError(f"{source_of(number)} does not change the allow-list, and an index says so")
        if opened.header.keys != newest:
            raise LogError(f"{index_source(state.number)} leaves out a change of the allow-list before {number}")
        newest = number
        allowed = [key for key in dict.fromkeys((*allowed, *body.allowed)) if key not in body.revoked]
    if tuple(allowed) != state.allowed:
        raise LogError(f"{index_source(state.number)} has another allow-list than the creator's entries")
    return tuple(allowed)
