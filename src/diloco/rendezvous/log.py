"""The log as one replica reads and writes it: entries in the store, checked, and the state that they make."""

import asyncio

from diloco.files import sha256
from diloco.rendezvous.entries import MOST_BYTES, Body, Entry, LogError, name_of, new_entry, opened, sealed
from diloco.rendezvous.keys import Signer, check
from diloco.rendezvous.machine import RunState
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
            names = map(name_of, range(self.state.number, self.state.number + _num_at_once(len(entries))))
            gets = (self._store.get(n, most_bytes=MOST_BYTES, patience_seconds=patience_seconds) for n in names)
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
        data = sealed(entry, self._signer.sign(entry.line()))
        # Refuse here what everybody else would have to refuse.
        self.state.after(opened(data, number=self.state.number)[0], sha256(data))
        await self.check_there()
        name = name_of(self.state.number)
        other = await self._store.create(name, data, patience_seconds=patience_seconds)
        return self._taken(data if other is None else other), other is None

    async def check_there(self) -> None:
        """Refuse to go on alone in a directory that was emptied, or unmounted under this replica."""
        if not self._store.is_directory:
            return
        # Entry 0, since a write that an unmount has overtaken leaves the newest one behind.
        data = await self._store.get(name_of(0), most_bytes=MOST_BYTES, patience_seconds=FOR_EVER)
        if data is None or sha256(bytes(data)) != self.state.run:
            raise LogError(
                f"the run is not in {self._store.url} any more: the directory was emptied, or unmounted on this "
                "computer; bring it back, and start this replica again"
            )

    def _taken(self, data: bytes) -> tuple[int, Entry]:
        """Check an entry, and go on to the state after it."""
        number = self.state.number
        entry, signature = opened(data, number=number)
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
    entry, signature = opened(data, number=0)
    state = RunState.begin(entry, sha256(data))
    check(state.creator, signature, entry.line(), source="entry 0 of the log")
    return state
