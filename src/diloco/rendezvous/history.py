"""The log of a run as somebody reads it who takes no part in the run."""

import asyncio
from collections.abc import AsyncIterator

from diloco.errors import UserError
from diloco.files import expanded, sha256
from diloco.rendezvous.entries import MOST_BYTES, Create, Entry, LogError, name_of, opened
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
            check(state.signer(entry), signature, entry.line(), source=f"entry {number} of the log")
            state = state.after(entry, sha256(data))
            yield number, entry, state


async def _entry(store: Store, number: int) -> bytes | None:
    data = await store.get(name_of(number), most_bytes=MOST_BYTES)
    return None if data is None else bytes(data)
