"""The log in the store: the one reader of its entries, and the writer of the next one."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec

from diloco.errors import UserError
from diloco.files import expanded, sha256
from diloco.rendezvous.log.entries import MOST_ENTRY_BYTES, Body, Create, Entry, LogError, new_entry
from diloco.rendezvous.log.keys import MOST_SIGNATURE_BYTES, Signed, Signer
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import BadObjectError, Store, refuse_host
from diloco.schema import converted, decoded


class LostEntryError(LogError):
    """The store lacks an entry that it had, or holds something else in its place."""


FOR_EVER = float("inf")
"""The patience of a replica's work beside its training thread, which bounds it: by `max_local_steps` without the
store, and by the time that leaving may take."""
MOST_AT_ONCE = 32
"""Entries that are asked for at once by a reader that is behind."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """An entry's JSON: its kind says how the body is read."""

    kind: str
    author: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
    previous: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    keys: Annotated[int, msgspec.Meta(ge=0)]
    nonce: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    body: dict[str, Any]


_BODIES: dict[str, type[Any]] = {body.__name__.lower(): body for body in get_args(Body)}


class _Entries(Signed[Entry]):
    def fields(self, header: Entry) -> Any:
        """The JSON value of an entry."""
        return {"kind": header.kind, **vars(header), "body": msgspec.to_builtins(header.body)}

    def read(self, line: bytes, source: str) -> Entry:
        """The entry of a line of JSON.

        Raises:
            FileError: if it is none.
        """
        value = decoded(line, _Line, source=source)
        if value.kind not in _BODIES:
            raise LogError(f"{source} is of an unknown kind, {value.kind!r:.50}: install the newest diloco")
        body = converted(value.body, _BODIES[value.kind], source=source)
        return Entry(author=value.author, previous=value.previous, keys=value.keys, nonce=value.nonce, body=body)


ENTRY = _Entries(
    word="entry",
    place="log/{:010d}",
    form=Entry,
    most_header_bytes=MOST_ENTRY_BYTES - MOST_SIGNATURE_BYTES,
    has_body=False,
    error=LogError,
)


def source_of(number: int) -> str:
    """An entry in words, for errors."""
    return f"entry {number} of the log"


class Log:
    """The entries of a run, from a state on.

    One task at a time calls it.

    Args:
        store: the run's.
        state: after the entries that are known.
        signer: of the entries that are appended.
        patience_seconds: how long a request may take.
    """

    def __init__(
        self, store: Store, state: RunState, signer: Signer | None = None, *, patience_seconds: float = 60.0
    ) -> None:
        self.state = state
        """The state after all entries that were read."""
        self.patience_seconds = patience_seconds
        self._store, self._signer = store, signer or Signer()

    async def read(self, *, at_once: int = MOST_AT_ONCE) -> AsyncIterator[tuple[int, Entry]]:
        """The entries that were written since the last call, with their numbers; `state` is that after each.

        Args:
            at_once: entries to ask for at first: 1 where mostly there is one new entry, or none.

        Raises:
            LogError: naming an entry that is missing, damaged, forged or not valid.
            StoreError: if the store can't be read.
        """
        begin = self.state.number
        while True:
            first = self.state.number
            window = await asyncio.gather(*(self._get(number) for number in range(first, first + at_once)))
            for number, data in enumerate(window, first):
                has_later = any(window[number - first :])
                if data is None and has_later:
                    data = await self._get(number)  # a live run may have written it in between
                if data is None and has_later:
                    raise LogError(f"{source_of(number)} is missing, and there are later ones")
                if data is None:
                    return
                yield number, self._accept(data)
            at_once = max(at_once, min(self.state.number - begin, MOST_AT_ONCE))

    async def read_all(self, *, at_once: int = MOST_AT_ONCE) -> RunState:
        """The state after all entries that are there; errors as those of `read`."""
        async for _ in self.read(at_once=at_once):
            pass
        return self.state

    async def check_no_gap(self) -> None:
        """Refuse a log in which entries are missing before later ones, or whose next name is no file's.

        Raises:
            LogError: naming the first that is missing, or the next.
            StoreError: if the store can't be listed.
        """
        number = self.state.number
        with _naming(number):
            await self._store.check_kind(ENTRY.name(number))
        await check_none_later(self._store, number, patience_seconds=self.patience_seconds)

    async def append(self, body: Body, *, author: int) -> tuple[tuple[int, Entry], bool]:
        """Try to write the next entry.

        Returns:
            The entry that has the next number now, and whether it is this one.

        Raises:
            LogError: if the entry would not be valid, another's is not, or the store lacks the entry before it.
            StoreError: if the store can't be written.
        """
        number = self.state.number
        data = sealed_entry(body, self._signer, author=author, previous=self.state.previous, keys=self.state.keys)
        # Refuse here what everybody else would have to refuse.
        self.state.after(ENTRY.open(data, source_of(number)).header, sha256(data))
        before = number - 1, self.state.previous
        await self._check_there(*before)
        with _naming(number):
            other = await self._store.create(ENTRY.name(number), data, patience_seconds=self.patience_seconds)
        taken = number, self._accept(data if other is None else other)
        if other is None:
            await self._check_there(*before)  # the store may have come back without it while the request waited
        return taken, other is None

    async def check_there(self) -> None:
        """Refuse to go on where the store has not the newest entry that is known.

        Raises:
            LogError: if it is absent, or another.
            StoreError: if the store can't be read.
        """
        await self._check_there(self.state.number - 1, self.state.previous)

    async def check_mounted(self) -> None:
        """Do so in a directory: an entry that was written below a mount point is gone once the mount is back."""
        if self._store.is_directory:
            await self.check_there()

    async def _check_there(self, number: int, digest: str) -> None:
        data = await self._get(number)
        if data is not None and sha256(data) == digest:
            return
        if data is not None:
            trouble = "is another one than this replica knows: the log was changed, or an older copy was put back"
        else:
            trouble = (
                f"is not in {self._store.url} any more: the store has lost it, an older copy was put back, or the "
                "directory was emptied, or unmounted on this computer"
            )
        raise LostEntryError(f"{source_of(number)} {trouble}; see what is there, and start this replica again")

    def _accept(self, data: bytes) -> Entry:
        """Check an entry, and go on to the state after it."""
        source = source_of(self.state.number)
        opened = ENTRY.open(data, source)
        ENTRY.check(opened, self.state.signer(opened.header), source)
        self.state = self.state.after(opened.header, sha256(data))
        return opened.header

    async def _get(self, number: int) -> bytes | None:
        return await stored_entry(self._store, number, patience_seconds=self.patience_seconds)


async def check_none_later(store: Store, number: int, *, patience_seconds: float = 60.0) -> None:
    """Refuse a store in which an entry is absent, and later ones are there.

    Raises:
        LogError: naming both.
        StoreError: if the store can't be listed.
    """
    names = [
        name for name, _ in await store.list("log", after=ENTRY.name(number), patience_seconds=patience_seconds)
    ]
    later = [name for name in names if is_entry(name)]
    if later and await stored_entry(store, number, patience_seconds=patience_seconds) is None:
        raise LogError(
            f"{source_of(number)} is missing, and {later[0]} is there: bring it back, or create a run in another "
            "place; nothing may delete entries, such as a bucket's rule for old objects"
        )


def is_entry(name: str) -> bool:
    """True for the name of an entry."""
    return re.fullmatch(r"log/\d{10}", name) is not None


def sealed_entry(body: Body, signer: Signer, *, author: int, previous: str, keys: int = 0) -> bytes:
    """The bytes of an entry with a nonce of its own."""
    return ENTRY.seal(new_entry(body, author=author, previous=previous, keys=keys), signer)


async def stored_entry(store: Store, number: int, *, patience_seconds: float = 60.0) -> bytes | None:
    """The bytes of an entry, which nobody has checked; None if it is not there.

    Raises:
        LogError: if what lies under its name is no file, or far too large.
        StoreError: if the store can't be read.
    """
    with _naming(number):
        data = await store.get(ENTRY.name(number), most_bytes=MOST_ENTRY_BYTES, patience_seconds=patience_seconds)
    return None if data is None else bytes(data)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """A context in which bytes that can't be an entry raise an error of the log."""
    try:
        yield
    except BadObjectError as error:
        raise LostEntryError(f"{source_of(number)} can't be used: {error}") from None


def begun(data: bytes) -> tuple[Create, RunState]:
    """The content of entry 0, and the state after it, from its bytes.

    Raises:
        LogError: if it is damaged, or does not create a run.
    """
    opened = ENTRY.open(data, source_of(0))
    state = RunState.begin(opened.header, sha256(data))
    ENTRY.check(opened, state.creator, source_of(0))
    assert isinstance(opened.header.body, Create), "RunState.begin has looked"
    return opened.header.body, state


async def first_entry(store: Store) -> tuple[Create, RunState]:
    """The content of entry 0, and the state after it.

    Raises:
        UserError: if the store holds no run.
        LogError: if the entry is damaged or forged.
        StoreError: if the store can't be read.
    """
    if (data := await stored_entry(store, 0)) is None:
        raise UserError(f"{store.url} holds no run: {ENTRY.name(0)} is missing", "url")
    return begun(data)


def is_store(source: str) -> bool:
    """True for the URL of a bucket, and for a directory that holds the log of a run."""
    if "://" in source:
        return True
    with suppress(OSError):  # a directory that can't be read is no store
        return (expanded(source) / ENTRY.name(0)).is_file()
    return False


def open_run(url: str) -> Store:
    """The store of a run that is there; a directory that is not there is not made.

    Raises:
        UserError: for a wrong URL, or a directory that can't be read or holds no run.
    """
    try:
        is_there = "://" in url or (expanded(url) / ENTRY.name(0)).is_file()
    except OSError as error:
        raise UserError(f"{url} can't be read: {error.strerror}", "url") from error
    if not is_there:
        refuse_host(url)
        if not expanded(url).exists():
            raise UserError(f"there is no directory {url}", "url")
        raise UserError(f"{url} holds no run: {ENTRY.name(0)} is missing", "url")
    return Store.open(url)
