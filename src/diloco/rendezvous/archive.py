"""Snapshots and indexes, from which a joiner starts, and the end of what nobody needs any more."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from diloco.files import sha256
from diloco.rendezvous import index, snapshots
from diloco.rendezvous.contract import StoredSnapshot
from diloco.rendezvous.entries import MOST_BYTES as MOST_ENTRY_BYTES
from diloco.rendezvous.entries import Keys, LogError, Snapshot
from diloco.rendezvous.entries import name_of as entry_name
from diloco.rendezvous.entries import opened as opened_entry
from diloco.rendezvous.keys import Signer, check
from diloco.rendezvous.log import FOR_EVER, Log
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.retiring import retirable
from diloco.rendezvous.store import Store, StoreError

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
            buffers, digest = await asyncio.to_thread(snapshots.sealed, vectors)
            name = snapshots.name_of(fragment, last_round, digest)
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
    name = snapshots.name_of(fragment, refs[-1].round, refs[-1].sha256[0])
    most_bytes = snapshots.most_bytes(num_elements)
    data = await store.get(name, most_bytes=most_bytes, patience_seconds=FOR_EVER)
    if data is None:
        raise LogError(f"{name} is not in the store, though the log names it")
    return StoredSnapshot(round=refs[-1].round, name=name, data=data)


async def write_index(store: Store, signer: Signer, state: RunState, *, author: int) -> None:
    """Write an index of the log up to now, and delete what nobody needs after that."""
    made = index.Index(author=author, state=state)
    data = index.sealed(made, signer.sign(made.line()))
    if len(data) > index.MOST_BYTES:
        _LOG.warning(
            "index %d of %s would have %d bytes, and may have %d: joiners read the whole log instead; choose a "
            "smaller snapshot_rounds, or fewer fragments, for the next run",
            state.number,
            store.url,
            len(data),
            index.MOST_BYTES,
        )
    else:
        await store.create(index.name_of(state.number), data, patience_seconds=FOR_EVER)
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
        numbers = [index.number_of(name) for name, _ in await store.list("index")]
        if (number := max((n for n in numbers if n is not None), default=None)) is None:
            return first
        data = await store.get(index.name_of(number), most_bytes=index.MOST_BYTES)
        if data is not None:
            return await _state_of(store, first, number, bytes(data))
        await asyncio.sleep(_LISTING_SECONDS)  # a newer one has taken its place, which the listing may show later
    return first


async def _state_of(store: Store, first: RunState, number: int, data: bytes) -> RunState:
    """The state of an index, compared with entry 0 and with the entry before the index."""
    made, signature = index.opened(data, number=number)
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
    entry, signature = opened_entry(before, number=number)
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
        entry, signature = opened_entry(bytes(data), number=number)
        check(first.creator, signature, entry.line(), source=f"entry {number} of the log")
        if not isinstance(entry.body, Keys):
            raise LogError(f"entry {number} of the log does not change the allow-list, and an index says so")
        allowed = [k for k in dict.fromkeys((*allowed, *entry.body.allowed)) if k not in entry.body.revoked]
    if tuple(allowed) != state.allowed:
        raise LogError(f"index {state.number} of the log has another allow-list than the creator's entries")
    return tuple(allowed)
