"""Versions of a model's weights in a store: their headers and bodies, and the one way to take them.

    versions/0000000007                   the header of version 7, signed: its creation publishes the version
    bodies/0000000007-89abcdef…/00000     the first part of a body of it, there before the header
    files/89abcdef…                       a small file that goes with versions, such as a tokenizer's

A version has the whole state as a body, or the difference from the version before it, or both: who has the one
before takes the difference, and who has none begins at the newest whole one. Numbers count from 0 without a gap;
old versions are deleted from below.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from diloco.errors import FileError, PayloadError, UserError
from diloco.files import sha256
from diloco.publishing.differences import apply_to, content_digest
from diloco.publishing.states import State, num_bytes_of, open_whole, unlike
from diloco.rendezvous.log.entries import Digest, DigestOrNone
from diloco.rendezvous.log.keys import Opened, Signed
from diloco.rendezvous.objects import body_tensor
from diloco.rendezvous.store import BadObjectError, Store, StoreError
from diloco.schema import Count
from diloco.wire.kernels.memory import empty

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
FORMAT = 2
"""Version of the form of published weights, which the header of each version names; 1 has no series."""
PART_BYTES = 1 << 23
"""Size of the parts of a body, but for its last: several travel at once, and an outage costs no more than them."""
MOST_PARTS_AT_ONCE = 8
MOST_FILE_BYTES = 1 << 26
"""Size of the largest file that goes with a version."""
_FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")]


@dataclass(frozen=True, kw_only=True)
class Body:
    """The bytes that a header names: the whole state, a difference, or a file."""

    num_bytes: Count
    sha256: Digest

    @classmethod
    def of(cls, buffers: "Sequence[Buffer]") -> "Body":
        """The name of buffers, one after another."""
        return cls(num_bytes=sum(memoryview(buffer).nbytes for buffer in buffers), sha256=sha256(*buffers))


@dataclass(frozen=True, kw_only=True)
class Version:
    """One state of the weights, as its publisher's signed header describes it."""

    format: Count
    """The version of this form: 2, or 1 without a series."""
    series: DigestOrNone = ""
    """Random, of version 0; all that follow have it, so that signed versions of elsewhere can't join them."""
    number: Count
    """Versions before it."""
    step: Count
    """The step that the publisher named."""
    digest: Digest
    """`content_digest` of the state: names, types, shapes and all bits."""
    facts: dict[str, Any]
    """Further statements of the publisher, JSON by name."""
    previous: DigestOrNone
    """SHA-256 of the header before it; empty in version 0."""
    start: Count
    """Number of the newest version up to this one that has a whole body."""
    num_bytes: Count
    """Size of all tensors."""
    whole: Body | None
    difference: Body | None
    """The difference from the version before it."""
    tied: dict[str, str]
    """Further names of tensors, each with the name that the state has."""
    files: dict[_FileName, Body]
    """The files that go with it, by name."""

    def __post_init__(self) -> None:
        if (self.series == "") != (self.format == 1):
            raise ValueError(f"format {self.format} has {'a' if self.format > 1 else 'no'} series")
        if (self.whole is not None) != (self.start == self.number) or self.start > self.number:
            raise ValueError(f"version {self.number} starts at {self.start}")
        if self.whole is None and self.difference is None:
            raise ValueError("it has no body")
        if (self.previous == "") != (self.number == 0) or (self.number == 0 and self.difference is not None):
            raise ValueError("version 0, and it alone, follows no other")

    @property
    def name(self) -> str:
        """The version in words, for errors."""
        return f"version {self.number}"

    @property
    def smallest(self) -> Body:
        """The body that a follower with the version before takes."""
        body = self.difference or self.whole
        assert body is not None, "a version has a body"
        return body

    @property
    def link(self) -> str:
        """The SHA-256 by which the next header names this one."""
        return sha256(VERSION.line(self))


@dataclass(frozen=True)
class _Numbered:
    """The format of a header, whatever else it holds."""

    format: Count


class _Versions(Signed[Version]):
    def read(self, line: bytes, source: str) -> Version:
        """The header of a line of JSON, after its format, which says what other fields there are.

        Raises:
            FileError: if it is none, or of another format.
        """
        number = FORMAT
        with suppress(ValueError):  # which `decoded` explains
            number = msgspec.json.decode(line, type=_Numbered).format
        if not 1 <= number <= FORMAT:
            raise FileError(
                f"{source} is of format {number}, and this diloco reads format {FORMAT}: install the release of "
                "diloco that publishes"
            )
        return super().read(line, source)

    def fields(self, header: Version) -> Any:
        """The JSON value of a header; format 1 has no series."""
        fields = super().fields(header)
        return fields if header.series else {name: fields[name] for name in fields if name != "series"}


VERSION = _Versions(
    word="version",
    place="versions/{:010d}",
    form=Version,
    most_header_bytes=1 << 20,
    has_body=False,
    error=PayloadError,
)


class GoneError(PayloadError):
    """A body is not in the store: the version was deleted meanwhile."""


def body_name(number: int, body: Body) -> str:
    """The prefix of the names of a body's parts in the store."""
    return f"bodies/{number:010d}-{body.sha256:.16}"


def part_name(number: int, body: Body, part: int) -> str:
    """The name of a part of a body."""
    return f"{body_name(number, body)}/{part:05d}"


def file_name(file: Body) -> str:
    """The name of a file in the store."""
    return f"files/{file.sha256}"


async def upload(
    store: Store, number: int, body: Body, buffers: "Sequence[Buffer]", patience_seconds: float
) -> None:
    """Put a body's parts into the store; those that are there already stay."""
    parts = list(_parts(buffers))

    async def create(part: int) -> None:
        name = part_name(number, body, part)
        if await store.create(name, parts[part], patience_seconds=patience_seconds) is not None:
            raise PayloadError(f"{name} in {store.url} has other bytes than its name says: delete it")

    await _several([lambda part=part: create(part) for part in range(len(parts))])


def _parts(buffers: "Sequence[Buffer]") -> "list[list[memoryview]]":
    """The buffers cut into parts, each a list of pieces of them."""
    parts, room = [list[memoryview]()], PART_BYTES
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest.nbytes:
            if not room:
                parts.append([])
                room = PART_BYTES
            piece, rest = rest[:room], rest[room:]
            parts[-1].append(piece)
            room -= piece.nbytes
    return parts


async def _several(makers: "Sequence[Callable[[], Awaitable[_T]]]") -> list[_T]:
    """The results of requests, a few of which are under way at once; after an error, none is."""
    turns = asyncio.Semaphore(MOST_PARTS_AT_ONCE)

    async def one(make: "Callable[[], Awaitable[_T]]") -> _T:
        async with turns:
            return await make()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(make)) for make in makers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True)
class Held:
    """A version, and the state that has its digest."""

    version: Version
    state: State


class Chain:
    """The versions of a place, for one reader, which may hold one of them.

    Args:
        store: the place.
        public_keys: those of which one has signed every header; None takes any header.
        patience_seconds: how long the store may give no answer.
    """

    def __init__(self, store: Store, public_keys: Collection[str] | None, patience_seconds: float) -> None:
        self.held: Held | None = None
        """The version that was taken last; None before the first, and where a body broke the state."""
        self.public_keys = public_keys
        self._store, self._patience = store, patience_seconds

    async def numbers(self) -> list[int]:
        """The numbers of the versions in the store, ascending."""
        listed = await self._store.list("versions", patience_seconds=self._patience)
        names = (re.fullmatch(r"versions/(\d{10})", name) for name, _ in listed)
        return [int(name[1]) for name in names if name]

    async def newest_number(self) -> int | None:
        """The number of the newest version, also where a list does not have it yet; None if there is none."""
        number = max(await self.numbers(), default=-1)
        while await self._get(VERSION.name(number + 1), VERSION.most_head_bytes) is not None:
            number += 1
        return None if number < 0 else number

    async def version(self, number: int, public_keys: Collection[str] | None = None) -> Version | None:
        """A version's header; None if it is not there.

        Args:
            number: the version's.
            public_keys: those of which one has signed it; None takes the chain's.

        Raises:
            PayloadError: if it is not sound, or not signed as it should be.
        """
        name, source = VERSION.name(number), f"version {number} in {self._store.url}"
        try:
            data = await self._get(name, VERSION.most_head_bytes)
        except BadObjectError as error:
            raise PayloadError(str(error)) from None
        if data is None:
            return None
        opened = VERSION.open(data, source)
        if (keys := self.public_keys if public_keys is None else public_keys) is not None:
            _check_signature(opened, keys, source)
        if opened.header.number != number:
            VERSION.refuse(source, f"it is version {opened.header.number}, put in another's place")
        return opened.header

    async def take(self, newest: Version) -> Held:
        """Take a version that is newer than the held one: by the way that needs the fewest bytes.

        Where a difference on the way is damaged, the newest whole version is taken.

        Raises:
            GoneError: if the versions on the way are deleted meanwhile.
            PayloadError: if a version is not sound; the held one stays, unless a difference has broken its state.
            UserError: if it is of another series than the held one.
        """
        if self.held is not None and newest.series != self.held.version.series:
            raise UserError(
                f"{newest.name} in {self._store.url} is of another series than {self.held.version.name}, which is "
                "held: the versions begin anew: follow them with a new follower"
            )
        by_differences = await self._since_held(newest)
        by_whole = await self._from_whole(newest)
        ways = [way for way in (by_differences, by_whole) if way]
        ways.sort(key=lambda way: sum(body.num_bytes for _, _, body in way))
        if not ways:
            raise GoneError(f"the versions before {newest.name} in {self._store.url} were deleted meanwhile")
        for index, way in enumerate(ways):
            try:
                return await self._go(way)
            except PayloadError:
                if index == len(ways) - 1:
                    raise
        raise AssertionError("there is a way")

    async def _since_held(self, newest: Version) -> "list[_Stage]":
        """The differences that lead from the held version to a newer one; empty if one is not there."""
        if self.held is None:
            return []
        versions = await self._between(self.held.version.number + 1, newest)
        if not versions:
            return []
        _check_linked([self.held.version, *versions], self._store.url)
        stages = [(version, "difference", version.difference) for version in versions]
        return [(v, kind, body) for v, kind, body in stages if body] if all(body for *_, body in stages) else []

    async def _from_whole(self, newest: Version) -> "list[_Stage]":
        """The newest whole version and the differences after it; empty if one is not there."""
        versions = await self._between(newest.start, newest)
        if not versions or versions[0].whole is None:
            return []
        _check_linked(versions, self._store.url)
        first, *later = versions
        stages = [(version, "difference", version.difference) for version in later]
        return [(first, "whole", versions[0].whole), *((v, kind, body) for v, kind, body in stages if body)]

    async def _between(self, first: int, newest: Version) -> list[Version]:
        """The versions from a number to the newest; empty if one of them is not there."""
        versions = [await self.version(first)] if first < newest.number else []
        if None not in versions:  # the oldest are deleted first, and who is far behind lacks thousands
            makers = [lambda number=number: self.version(number) for number in range(first + 1, newest.number)]
            versions += await _several(makers)
        return [] if None in versions else [*(version for version in versions if version is not None), newest]

    async def _go(self, way: "Sequence[_Stage]") -> Held:
        """Take the bodies of a way, one after another; after each, a version is held."""
        for version, kind, body in way:
            content_N = await self._body(version, kind, body)
            if kind == "whole":
                state = open_whole(content_N, source=f"{version.name} in {self._store.url}")
                await self._check_whole(version, state)
            else:
                state = await self._changed(version, content_N)
            self.held = Held(version, state)
        assert self.held is not None, "a way has a stage"
        return self.held

    async def _check_whole(self, version: Version, state: State) -> None:
        source = f"{version.name} in {self._store.url}"
        if self.held is not None and (difference := unlike(self.held.state, state)):
            raise UserError(f"{source} is of another model: {difference}: follow it with a new follower")
        if (actual := await asyncio.to_thread(content_digest, state)) != version.digest:
            raise PayloadError(f"{source} has the digest {actual:.16}…, and its header says {version.digest:.16}…")
        if num_bytes_of(state) != version.num_bytes:
            raise PayloadError(f"{source} has {num_bytes_of(state):,} bytes, not those of its header")

    async def _changed(self, version: Version, content_N: Tensor) -> State:
        """The held state, changed in place to that of the next version; not held any more if it is another's."""
        assert self.held is not None, "a difference follows a version that is held"
        before, source = self.held, f"{version.name} in {self._store.url}"
        state, self.held = before.state, None
        error = None
        try:
            await asyncio.to_thread(apply_to, state, content_N.numpy().data, source=source)
        except PayloadError as refused:
            error = refused
        expected = version if error is None else before.version
        actual = await asyncio.to_thread(content_digest, state)
        if actual == expected.digest and error is not None:
            self.held = before  # nothing was changed
        if error is not None:
            raise error
        if actual != version.digest:
            await self._read_anew(before.version)
            raise PayloadError(
                f"{source} leads to the digest {actual:.16}…, and its header says {version.digest:.16}…: it was "
                "changed, or its publisher has failed"
            )
        return state

    async def _read_anew(self, version: Version) -> None:
        """Hold a version whose state was changed in place; none if it can't be read any more."""
        try:
            if way := await self._from_whole(version):
                await self._go(way)
        except (PayloadError, UserError, StoreError):
            self.held = None

    async def _body(self, version: Version, kind: str, body: Body) -> Tensor:
        """A body with the SHA-256 of the header, flat uint8."""
        source = f"the {kind} of {version.name} in {self._store.url}"
        if (
            kind == "difference"
            and self.held is not None
            and body.num_bytes > 2 * self.held.version.num_bytes + 4096
        ):
            raise PayloadError(
                f"{source} has {body.num_bytes:,} bytes, more than the model: it was not published so"
            )
        try:
            content_N = empty(body.num_bytes, torch.uint8, torch.device("cpu"))
        except (MemoryError, RuntimeError, ValueError):
            raise PayloadError(f"{source} has {body.num_bytes:,} bytes: there is no memory for it") from None

        async def fetch(part: int) -> None:
            name = part_name(version.number, body, part)
            start = part * PART_BYTES
            stop = min(start + PART_BYTES, body.num_bytes)
            try:
                data = await self._get(name, stop - start)
            except BadObjectError as error:
                raise PayloadError(str(error)) from None
            if data is None:
                raise GoneError(f"{name} is not in {self._store.url}: {version.name} was deleted meanwhile")
            if len(data) != stop - start:
                raise PayloadError(
                    f"{name} in {self._store.url} was cut short: it has {len(data):,} bytes, not {stop - start:,}"
                )
            content_N[start:stop] = body_tensor(data)

        num_parts = max(1, -(-body.num_bytes // PART_BYTES))
        await _several([lambda part=part: fetch(part) for part in range(num_parts)])
        if await asyncio.to_thread(sha256, content_N.numpy().data) != body.sha256:
            raise PayloadError(f"{source} does not match the SHA-256 in its header: it was damaged or changed")
        return content_N

    async def file(self, version: Version, name: str) -> bytes:
        """A file that goes with a version.

        Raises:
            PayloadError: if it is not there, or not the header's.
        """
        file = version.files[name]
        try:
            data = await self._get(file_name(file), min(file.num_bytes, MOST_FILE_BYTES))
        except BadObjectError as error:
            raise PayloadError(str(error)) from None
        if data is None or Body.of([data]) != file:
            raise PayloadError(f"{name} of {version.name} in {self._store.url} is not there, or was changed")
        return bytes(data)

    async def _get(self, name: str, most_bytes: int) -> memoryview | None:
        data = await self._store.get(name, most_bytes=most_bytes, patience_seconds=self._patience)
        return None if data is None else memoryview(data)


_Stage = tuple[Version, str, Body]
"""A version, the kind of the body that leads to it, and that body."""


def _check_signature(opened: Opened[Version], public_keys: Collection[str], source: str) -> None:
    assert public_keys, "a reader that checks has a key, or the empty one"
    for index, key in enumerate(public_keys):
        try:
            VERSION.check(opened, key, source)
            return
        except PayloadError as error:
            if index == len(public_keys) - 1:
                several = f", nor with one of {len(public_keys) - 1} others" if index else ""
                raise PayloadError(f"{error}{several}") from None


def _check_linked(versions: Sequence[Version], url: str) -> None:
    """Refuse versions of which one does not follow the one before."""
    for before, version in pairwise(versions):
        if version.previous != before.link:
            raise PayloadError(
                f"{version.name} in {url} does not follow {before.name} as it was read: one of them was replaced"
            )
