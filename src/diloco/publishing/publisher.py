"""Publish the versions of a model's weights to a place in a store."""

import asyncio
import logging
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor

from diloco.errors import PayloadError, UserError
from diloco.publishing.differences import content_digest, difference_of
from diloco.publishing.states import State, copied, num_bytes_of, seal_whole, unlike
from diloco.publishing.versions import (
    FORMAT,
    MOST_FILE_BYTES,
    VERSION,
    Body,
    Chain,
    Held,
    Version,
    body_name,
    file_name,
    upload,
)
from diloco.rendezvous.log.keys import Signer, signer_of_environment
from diloco.rendezvous.log_thread import Background
from diloco.rendezvous.store import Store, StoreError, StoreUnreachableError
from diloco.schema import json_facts

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Buffer

_LOG = logging.getLogger("diloco")
_T = TypeVar("_T")
_FOR_EVER = float(1 << 30)
"""Bound of a wait for requests that are bounded themselves."""
_MOST_TRIES = 4
"""Times that a version may find another in its place."""


class OvertakenError(UserError):
    """Another publisher of the same states has published this one, or a newer one: `newest`."""

    def __init__(self, newest: Version) -> None:
        super().__init__(f"version {newest.number} of step {newest.step} is published already")
        self.newest = newest


class Publisher:
    """Publishes a model's weights, version after version, in a directory or a bucket of S3, GCS or Azure.

    A version has the whole weights, or the difference from the version before, without loss. A publisher that is
    started again goes on with the versions that it finds. One place takes one publisher.

    Args:
        url: a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, which nothing
            else uses.
        dtype: type to which floating-point tensors are cast; None publishes each in its own.
        whole_every: versions after which a whole one follows.
        keep: the newest whole versions that are kept, with those that follow them; older ones are deleted.
        key: the file of the key that signs, made by `diloco keys new`; None is that of the environment variable
            DILOCO_KEY, or no key.
        timeout_seconds: how long the store may give no answer.

    Raises:
        UserError: for a wrong URL, key or setting.

    >>> import diloco, tempfile
    >>> place = tempfile.mkdtemp()
    >>> publisher = diloco.Publisher(place)
    >>> model = torch.nn.Linear(2, 2)
    >>> publisher.publish(model, step=100).number
    0
    >>> follower = diloco.Follower(place)
    >>> follower.load_into(torch.nn.Linear(2, 2)).step
    100
    """

    def __init__(
        self,
        url: str,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        whole_every: int = 50,
        keep: int = 2,
        key: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        for name, value in {"whole_every": whole_every, "keep": keep, "timeout_seconds": timeout_seconds}.items():
            if not value >= (0 if name == "timeout_seconds" else 1):
                raise UserError(f"{name}={value} is too small", name)
        self._dtype, self._whole_every, self._keep = dtype, whole_every, keep
        self._signer = signer_of_environment() if key is None else Signer.of_file(key)
        self._store, self._patience = Store.open(str(url)), timeout_seconds
        self._is_alone = True
        self._shared_facts: Mapping[str, Any] = {}
        """The facts of all versions of those with whom this publisher shares the place."""
        self._former_keys: Collection[str] = ()
        """Keys of which versions are followed by others, but nothing else of them is believed."""
        self._chain = Chain(self._store, [self._signer.public], timeout_seconds)
        self._newest: Version | None = None
        """The newest version that is known; `_chain` holds it, unless it is damaged there, or of a former key."""
        self._is_known = False
        """True if it is the newest of the place, as far as its only publisher can know."""
        self._attempts: list[tuple[Version, Held | None]] = []
        """Own versions after it that may be in the store, though it gave no answer; of the last one the state."""
        self._lost = ""
        """The reason why this place is another publisher's."""
        self._has_cleaned = False
        self._is_closed = False
        self._lock = threading.Lock()
        """Held while a version is published."""
        self._background = Background("diloco publisher")
        self._background.start()
        weakref.finalize(self, self._background.stop)

    @property
    def store(self) -> Store:
        """The store, with its counts of requests and bytes."""
        return self._store

    def newest(self) -> Version | None:
        """The newest version of the place; None if there is none. Errors are those of `publish`."""
        return self._result(self._read_newest)

    def _result(self, request: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any, **options: Any) -> _T:
        """The result of a request to the store, after those of other threads."""
        with self._lock:
            if self._is_closed:
                raise UserError(f"this publisher to {self._store.url} is closed: make a new one")
            return self._background.wait(request(*arguments, **options), _FOR_EVER, self._store.url)

    async def _read_newest(self) -> Version | None:
        return (await self._read(await self._chain.newest_number()))[0]

    def share_with(
        self,
        public_keys: Iterable[str],
        facts: Mapping[str, Any] | None = None,
        *,
        former_keys: Collection[str] = (),
    ) -> None:
        """From now on take the versions of others, too, that publish the same states here: each step once.

        Args:
            public_keys: of the others; an empty one where they have none.
            facts: those that all of their versions have; a version with another value of one is of other states.
            former_keys: of those who publish here no more; a version of theirs is followed by a whole one, of
                whichever step.
        """
        self._is_alone, self._shared_facts, self._former_keys = False, facts or {}, former_keys
        self._chain.public_keys = [*dict.fromkeys([self._signer.public, *public_keys])]

    def publish(
        self,
        model: "nn.Module | Mapping[str, Tensor]",
        *,
        step: int,
        facts: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Version:
        """Publish weights as the next version; returns when it is there for all.

        After an error the next call looks into the store, and goes on. Calls from several threads wait for one
        another.

        Args:
            model: a module, or tensors by name, on any device. They are copied first; of tied tensors one copy is
                published.
            step: of the training.
            facts: what else is to be known of the version, JSON by name.
            files: small files that go with it, by name, such as config.json; None keeps those of the version
                before.

        Raises:
            UserError: for what can't be published, for another model than that of the versions before, and if
                another publisher writes to this place.
            StoreError: if the store refuses a request, or gives no answer.
        """
        if not (isinstance(step, SupportsIndex) and 0 <= (step := int(step)) < 1 << 63):
            raise UserError(f"step={step!r:.100} must be a whole number of at least 0", "step")
        values = json_facts(facts or {})
        for name, content in (files or {}).items():
            if len(content) > MOST_FILE_BYTES:
                raise UserError(
                    f"the file {name} has {len(content):,} bytes, more than {MOST_FILE_BYTES:,}", "files"
                )
        state, tied = copied(model, self._dtype)
        return self._result(self._publish, state, files, step=step, facts=values, tied=tied)

    def close(self) -> None:
        """End the publisher's thread; the versions stay."""
        self._is_closed = True
        self._background.stop()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _publish(self, state: State, files: Mapping[str, bytes] | None, **fields: Any) -> Version:
        for _ in range(_MOST_TRIES):
            is_believed, newest = await self._look(), self._newest
            if not self._is_alone and newest is not None and is_believed:
                self._check_is_newer(fields["step"], newest)
            if version := await self._try(state, files, **fields):
                await self._clean(version, newest)
                return version
        raise StoreUnreachableError(f"{self._store.url} has had another new version {_MOST_TRIES} times meanwhile")

    def _check_is_newer(self, step: int, newest: Version) -> None:
        is_of_others = any(newest.facts.get(name, value) != value for name, value in self._shared_facts.items())
        if newest.step >= step or is_of_others:
            raise OvertakenError(newest)

    async def _try(self, state: State, files: Mapping[str, bytes] | None, **fields: Any) -> Version | None:
        """Publish a version after the newest that is known; None if there is another in its place."""
        before, newest = self._chain.held, self._newest
        if before is not None and (difference := unlike(before.state, state)):
            raise UserError(
                f"{self._store.url} has {before.version.name} of another model: {difference}: publish this one at "
                "a URL of its own"
            )
        buffers = await self._bodies(state)
        bodies = {kind: await asyncio.to_thread(Body.of, parts) for kind, parts in buffers.items()}
        number = 0 if newest is None else newest.number + 1
        version = Version(
            format=FORMAT if newest is None else newest.format,
            series=secrets.token_hex(32) if newest is None else newest.series,
            number=number,
            digest=await asyncio.to_thread(content_digest, state),
            previous="" if newest is None else newest.link,
            start=number if newest is None or "whole" in bodies else newest.start,
            num_bytes=num_bytes_of(state),
            whole=bodies.get("whole"),
            difference=bodies.get("difference"),
            files=_named(files, newest),
            **fields,
        )
        head = self._head(version)
        self._is_known = False
        self._attempts = [*((earlier, None) for earlier, _ in self._attempts), (version, Held(version, state))]
        for kind, body in bodies.items():
            await upload(self._store, number, body, buffers[kind], self._patience)
        for name, content in (files or {}).items():
            await self._store.create(file_name(version.files[name]), content, patience_seconds=self._patience)
        if await self._store.create(VERSION.name(number), head, patience_seconds=self._patience) is not None:
            return None
        self._chain.held, self._newest = Held(version, state), version
        self._is_known, self._attempts = True, []
        return version

    async def _look(self) -> bool:
        """Find the newest version, unless it is known; False if it is one of a former key."""
        if self._lost:
            raise UserError(self._lost, "url")
        known = self._newest if self._is_known and self._is_alone else None
        number = await self._chain.newest_number() if known is None else known.number
        newest, is_believed = await self._read(number)
        if newest is None and self._newest is not None:  # such as a directory that is not mounted any more
            raise StoreUnreachableError(f"{self._newest.name} is gone from {self._store.url}: bring it back")
        own = [held for version, held in self._attempts if version == newest]
        if newest is None or not is_believed:
            self._chain.held = None
        elif own:
            self._chain.held = own[0]
        elif newest != self._newest:
            if self._is_alone and (self._newest is not None or self._attempts):
                self._lose(newest)
            await self._take(newest)
        self._newest, self._is_known = newest, True
        self._attempts = [pair for pair in self._attempts if newest is None or pair[0].number > newest.number]
        return is_believed

    async def _read(self, number: int | None) -> tuple[Version | None, bool]:
        """A version's header, and whether one of the keys of today has signed it."""
        if number is None:
            return None, True
        try:
            return await self._chain.version(number), True
        except PayloadError as error:
            with suppress(PayloadError):
                if self._former_keys:
                    return await self._chain.version(number, self._former_keys), False
            raise UserError(
                f"{error}: publish with the key of the versions there, or at a URL of its own"
            ) from None

    async def _take(self, newest: Version) -> None:
        """Hold the newest version; none if it is damaged."""
        try:
            await self._chain.take(newest)
        except PayloadError as error:
            self._chain.held = None  # an earlier version, perhaps
            _LOG.warning("%s; a whole version follows", error)

    def _lose(self, newest: Version) -> NoReturn:
        self._lost = (
            f"another publisher has written {newest.name} in {self._store.url}: a place takes one publisher: "
            "stop one of them, or give it a URL of its own"
        )
        raise UserError(self._lost, "url")

    async def _bodies(self, state: State) -> "dict[str, Sequence[Buffer]]":
        """The bodies of the next version, by kind, each as buffers."""
        bodies: dict[str, Sequence[Buffer]] = {}
        before, newest, whole = self._chain.held, self._newest, seal_whole(state)
        if before is not None:
            content = await asyncio.to_thread(difference_of, before.state, state)
            if memoryview(content).nbytes < sum(buffer.nbytes for buffer in whole):
                bodies["difference"] = [content]
        if not bodies or newest is None or newest.number + 1 - newest.start >= self._whole_every:
            bodies["whole"] = whole
        return bodies

    def _head(self, version: Version) -> bytes:
        """The signed header, which every reader takes."""
        head = VERSION.seal(version, self._signer)
        try:
            VERSION.open(head, "the version")
        except PayloadError as error:
            raise UserError(f"{error}: give shorter facts, and files with plain names", "facts", "files") from None
        return head

    async def _clean(self, version: Version, before: Version | None) -> None:
        """Delete old versions after each whole one, and what an earlier publisher left behind when it was killed.

        Headers go first, so that every header has its bodies. The files of the version before stay: a follower may
        be about to read them.
        """
        if version.whole is None and self._has_cleaned:
            return
        try:
            oldest = version.start
            for _ in range(self._keep - 1):
                last = await self._chain.version(oldest - 1) if oldest else None
                oldest = oldest if last is None else last.start
            old = [VERSION.name(number) for number in await self._chain.numbers() if number < oldest]
            await self._store.delete(old)
            own = tuple(f"{body_name(version.number, b)}/" for b in (version.whole, version.difference) if b)
            listed = [re.fullmatch(r"bodies/(\d{10})-.*", name) for name, _ in await self._store.list("bodies")]
            numbers = {name[0]: int(name[1]) for name in listed if name}
            old = [name for name, number in numbers.items() if number < oldest]
            # A publisher that was killed may have begun the body of this number.
            old += [n for n, number in numbers.items() if number == version.number and not n.startswith(own)]
            files = {file_name(file) for kept in (version, before) if kept for file in kept.files.values()}
            await self._store.delete([*old, *(n for n, _ in await self._store.list("files") if n not in files)])
            self._has_cleaned = True
        except (StoreError, PayloadError) as error:
            _LOG.warning("%s: old versions stay", error)


def _named(files: Mapping[str, bytes] | None, newest: Version | None) -> dict[str, Body]:
    if files is None:
        return {} if newest is None else newest.files
    return {name: Body.of([content]) for name, content in files.items()}
