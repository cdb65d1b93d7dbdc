"""The log in the store: appending an entry, and reading all of them."""

import asyncio
from collections.abc import AsyncIterator

from diloco.errors import UserError
from diloco.files import expanded, sha256
from diloco.rendezvous.log.entries import (
    MOST_ENTRY_BYTES,
    Body,
    Create,
    Entry,
    LogError,
    entry_name,
    new_entry,
    open_entry,
    seal_entry,
)
from diloco.rendezvous.log.keys import Signer, check
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import Store

FOR_EVER = float("inf")


_MOST_AT_ONCE = 16
"""Entries that a replica which is behind asks for at once."""


class Log:
    """The entries of a run, from a state on.

    Whoever calls it does so from one task at a time.
    """

    def __init__(self, store: Store, signer: Signer, state: RunState) -> None:
        self.state = state
        """The state after all entries that were read."""
        self._store, self._signer = store, signer

    async def read(self, *, patience_seconds: float = FOR_EVER) -> list[tuple[int, Entry]]:
        """The entries that were written since the last call, with their numbers.

        Raises:
            LogError: naming an entry that is damaged, forged or not valid.
            StoreError: if the store can't be read.
        """
        entries: list[tuple[int, Entry]] = []
        while True:
            # Mostly there is one new entry, or none: only who finds more asks for several at once.
            names = map(entry_name, range(self.state.number, self.state.number + _num_at_once(len(entries))))
            gets = (
                self._store.get(n, most_bytes=MOST_ENTRY_BYTES, patience_seconds=patience_seconds) for n in names
            )
            for data in await asyncio.gather(*gets):
                if data is None:
                    return entries
                entries.append(self._taken(bytes(data)))

    async def append(
        self, body: Body, *, author: int, patience_seconds: float = FOR_EVER
    ) -> tuple[tuple[int, Entry], bool]:
        """Try to write the next entry.

        Returns:
            The entry that has the next number now, and whether it is this one.

        Raises:
            LogError: if the entry would not be valid, another's is not, or the entry before is not there any more.
            StoreError: if the store can't be written.
        """
        entry = new_entry(body, author=author, previous=self.state.previous, keys=self.state.keys)
        data = seal_entry(entry, self._signer.sign(entry.line()))
        # Refuse here what everybody else would have to refuse.
        self.state.after(open_entry(data, number=self.state.number)[0], sha256(data))
        await self.check_there()
        name = entry_name(self.state.number)
        other = await self._store.create(name, data, patience_seconds=patience_seconds)
        return self._taken(data if other is None else other), other is None

    async def check_there(self) -> None:
        """Refuse to go on alone in a directory that was emptied, or unmounted under this replica."""
        if not self._store.is_directory:
            return
        # Entry 0, since a write that an unmount has overtaken leaves the newest one behind.
        data = await self._store.get(entry_name(0), most_bytes=MOST_ENTRY_BYTES, patience_seconds=FOR_EVER)
        if data is None or sha256(bytes(data)) != self.state.run:
            raise LogError(
                f"the run is not in {self._store.url} any more: the directory was emptied, or unmounted on this "
                "computer; bring it back, and start this replica again"
            )

    def _taken(self, data: bytes) -> tuple[int, Entry]:
        """Check an entry, and go on to the state after it."""
        number = self.state.number
        entry, signature = open_entry(data, number=number)
        check(self.state.signer(entry), signature, entry.line(), source=f"entry {number} of the log")
        self.state = self.state.after(entry, sha256(data))
        return number, entry


def _num_at_once(num_read: int) -> int:
    """Entries to ask for at once after so many new ones."""
    return min(max(1, num_read), _MOST_AT_ONCE)


def begun(data: bytes) -> RunState:
    """The state after entry 0, from its bytes.

    Raises:
        LogError: if it is damaged, or does not create a run.
    """
    entry, signature = open_entry(data, number=0)
    state = RunState.begin(entry, sha256(data))
    check(state.creator, signature, entry.line(), source="entry 0 of the log")
    return state


_AT_ONCE = 32
"""Entries that are downloaded at once."""


def is_store(source: str) -> bool:
    """True for the URL of a bucket, and for a directory that holds the log of a run."""
    return "://" in source or (expanded(source) / entry_name(0)).is_file()


def open_run(url: str) -> Store:
    """The store of a run that is there; a directory that is not there is not made.

    Raises:
        UserError: for a wrong URL, or a directory without a run.
    """
    if not is_store(url):
        raise UserError(f"{url} holds no run: {entry_name(0)} is missing", "url")
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
        raise UserError(f"{store.url} holds no run: {entry_name(0)} is missing", "url")
    state = begun(data)
    body = open_entry(data, number=0)[0].body
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
            entry, signature = open_entry(data, number=number)
            check(state.signer(entry), signature, entry.line(), source=f"entry {number} of the log")
            state = state.after(entry, sha256(data))
            yield number, entry, state


async def _entry(store: Store, number: int) -> bytes | None:
    data = await store.get(entry_name(number), most_bytes=MOST_ENTRY_BYTES)
    return None if data is None else bytes(data)
