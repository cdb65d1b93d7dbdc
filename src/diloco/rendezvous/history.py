"""The log of a run as somebody reads it who takes no part in the run."""

import asyncio
from collections.abc import AsyncIterator

from diloco.errors import UserError
from diloco.files import expanded
from diloco.rendezvous import index
from diloco.rendezvous.entries import MOST_BYTES, Create, Entry, Keys, LogError, digest, name_of, opened
from diloco.rendezvous.keys import check
from diloco.rendezvous.log import begun
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.store import Store

_AT_ONCE = 32
"""Entries that are downloaded at once."""


def is_store(source: str) -> bool:
    """True for the URL of a bucket, and for a directory that holds the log of a run."""
    return "://" in source or (expanded(source) / name_of(0)).is_file()


def open_run(url: str) -> Store:
    """The store of a run that is there; a directory that is not there is not made.

    Raises:
        UserError: for a wrong URL, or a directory without a run.
    """
    if not is_store(url):
        raise UserError(f"{url} holds no run: {name_of(0)} is missing", "url")
    return Store.open(url)


async def first_entry(store: Store) -> tuple[Create, RunState]:
    """Entry 0, and the state after it.

    Raises:
        UserError: if the store holds no run.
        LogError: if the entry is damaged or forged.
        StoreError: if the store can't be read.
    """
    data = await _entry(store, 0)
    if data is None:
        raise UserError(f"{store.url} holds no run: {name_of(0)} is missing", "url")
    state = begun(data)
    body = opened(data, number=0)[0].body
    assert isinstance(body, Create), "begun has looked"
    return body, state


async def newest_state(store: Store, first: RunState) -> RunState:
    """The state of the newest index, by the word of the replica that wrote it; `first` if there is none.

    Args:
        store: the run's.
        first: the state after entry 0.

    Raises:
        LogError: if the index is damaged, forged, or not of this log.
    """
    names = [name for name, _ in await store.list("index")]
    if not names:
        return first
    number = int(names[-1].rpartition("/")[2])
    data = await store.get(names[-1], most_bytes=index.MOST_BYTES)
    last = await _entry(store, number - 1)
    if data is None or last is None:
        raise LogError(f"index {number} of the log, or the entry before it, is missing")
    newest, signature = index.opened(bytes(data), number=number)
    state = newest.state
    check(state.members[newest.author].key, signature, newest.line(), what=f"index {number} of the log")
    same = ("run", "rules", "creator")
    if any(getattr(state, name) != getattr(first, name) for name in same) or state.previous != digest(last):
        raise LogError(f"index {number} is not of this log: delete it")
    await _check_keys(store, first, state)
    return state


async def _check_keys(store: Store, first: RunState, state: RunState) -> None:
    """Check an index's keys against entry 0 and the creator's other entries."""
    allowed, known = list(first.allowed), set(first.allowed)
    for number in state.kept:
        data = await _entry(store, number)
        if data is None:
            raise LogError(f"entry {number} of the log is missing")
        entry, signature = opened(data, number=number)
        check(first.creator, signature, entry.line(), what=f"entry {number} of the log")
        if not isinstance(entry.body, Keys):
            raise LogError(f"index {state.number} of the log names entry {number}, which changes no allow-list")
        known.update(entry.body.allowed)
        allowed = list(dict.fromkeys((*allowed, *entry.body.allowed)))
        allowed = [key for key in allowed if key not in entry.body.revoked]
    if first.creator and (tuple(allowed) != state.allowed or not {m.key for m in state.members} <= known):
        raise LogError(f"index {state.number} of the log has keys that the run's creator has not allowed")


async def entries_after(
    store: Store, state: RunState, *, at_once: int = _AT_ONCE
) -> AsyncIterator[tuple[int, Entry, RunState]]:
    """The entries after a state: number, entry, and the state after it.

    Args:
        store: the run's.
        state: after the entries that are known.
        at_once: names that are asked for at once.

    Raises:
        LogError: naming an entry that is missing, damaged, forged or not valid.
        StoreError: if the store can't be read.
    """
    while True:
        numbers = range(state.number, state.number + at_once)
        window = await asyncio.gather(*(_entry(store, number) for number in numbers))
        for number, data in zip(numbers, window, strict=True):
            if data is None and any(window[number - numbers[0] :]):
                data = await _entry(store, number)  # a live run may have written it in between
            if data is None and any(window[number - numbers[0] :]):
                raise LogError(f"entry {number} of the log is missing, and there are later ones")
            if data is None:
                return
            entry, signature = opened(data, number=number)
            check(state.signer(entry), signature, entry.line(), what=f"entry {number} of the log")
            state = state.after(entry, digest(data))
            yield number, entry, state


async def _entry(store: Store, number: int) -> bytes | None:
    data = await store.get(name_of(number), most_bytes=MOST_BYTES)
    return None if data is None else bytes(data)
