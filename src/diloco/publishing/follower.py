"""Follow the versions of a model's weights from a place in a store."""

import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from diloco.errors import UserError
from diloco.exchange.private_torch import changes_of
from diloco.exchange.transport import SECONDS_OF_SILENCE
from diloco.publishing.differences import content_digest
from diloco.publishing.states import State, address_of, load
from diloco.publishing.versions import Chain, GoneError, Held, Version
from diloco.rendezvous.log_thread import Background
from diloco.rendezvous.store import Store, StoreUnreachableError

_LOG = logging.getLogger("diloco")
_T = TypeVar("_T")
_FOR_EVER = float(1 << 30)
"""Bound of a wait for requests that are bounded themselves."""
_POLLS_PER_LIST = 20
"""Polls for the next number between two lists of all: it may have been deleted before it was read."""
_MOST_TRIES = 4
"""Times that versions may be deleted while they are read."""


class Follower:
    """Follows the versions that a `Publisher` writes, and holds the newest one's weights on the CPU.

    Each version is checked (its bytes, its place after the one before, its bits after a difference, with a key its
    signature) before it is held. An error leaves the version that was held: it is read anew where a difference led
    to other bits than its digest's, and none is held if it is gone by then. Never is it a mixture. A follower that
    was away takes the differences it has missed, or the newest whole version, whichever has fewer bytes.

    Iteration gives the newest version whenever there is a newer one, and so may skip numbers. It waits as long as
    the store answers, and a warning says after a moment that there is none yet. Where versions come from a
    publisher without a key, everybody who can write to the store can write them.

    Args:
        url: of the publisher's place.
        public_key: the publisher's, in hexadecimal, or several, of which one has signed each version; None checks
            no signatures.
        timeout_seconds: how long the store may give no answer.
        poll_seconds: time between two looks for a new version; None is 0.05 for a directory, and 1 for others.

    Raises:
        UserError: for a wrong URL or key.
    """

    def __init__(
        self,
        url: str,
        *,
        public_key: str | Sequence[str] | None = None,
        timeout_seconds: float = 600.0,
        poll_seconds: float | None = None,
    ) -> None:
        keys = [public_key] if isinstance(public_key, str) else public_key
        for key in keys or ():
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise UserError(f"public_key={key!r:.100} is no key of 64 hexadecimal digits", "public_key")
        if keys is not None and not keys:
            raise UserError("public_key is empty: give a key, or None to check no signatures", "public_key")
        self._store = Store.open(str(url))
        self._chain = Chain(self._store, keys, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._poll_seconds = poll_seconds or (0.05 if self._store.is_directory else 1.0)
        self._gone_since: float | None = None
        """Time at which the place of the held version was first seen empty."""
        self._is_iterated = False
        self._loaded: tuple[weakref.ref[nn.Module], str, dict[str, tuple[object, int]]] | None = None
        """The module that was loaded last, the digest of its version, and its tensors as they were left."""
        self._lock = threading.RLock()
        """Held while a version is taken or copied: the state is changed in place."""
        self._is_closed = False
        self._background = Background("diloco follower")
        self._background.start()
        weakref.finalize(self, self._background.stop)

    @property
    def store(self) -> Store:
        """The store, with its counts of requests and bytes."""
        return self._store

    @property
    def version(self) -> Version | None:
        """The version that is held; None before the first."""
        return None if self._chain.held is None else self._chain.held.version

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The weights of the held version: CPU tensors by name, read-only, which the next version changes."""
        return MappingProxyType({} if self._chain.held is None else self._chain.held.state)

    def update(self) -> Version | None:
        """Take the newest version; None if there is none newer than the held one.

        Raises:
            PayloadError: if a version is damaged, forged or does not follow the one before it.
            UserError: if it is of another model, or the versions begin anew.
            StoreError: if the store refuses a request, or gives no answer.
        """
        with self._lock:
            return self._result(self._update, lists=True)

    def __iter__(self) -> Iterator[Version]:
        told_at = time.monotonic() + SECONDS_OF_SILENCE
        try:
            for poll in count():
                lists = poll % _POLLS_PER_LIST == 0
                with self._lock:
                    version = self._result(self._update, lists=lists)
                if version is None:
                    if self.version is None and time.monotonic() > told_at:
                        _LOG.warning("%s has no version yet: waiting for its publisher …", self._store.url)
                        told_at = math.inf
                    time.sleep(self._poll_seconds)
                    continue
                self._is_iterated = True
                yield version
                self._is_iterated = False
        finally:
            self._is_iterated = False

    def load_into(self, model: "nn.Module | Mapping[str, Tensor]") -> Version | None:
        """Copy the newest version's weights into a model in place; in a loop over the follower, the loop's.

        Everything is checked first; a tensor of another type than the version's takes the values as a cast rounds
        them.

        Args:
            model: a module, or its tensors by name, on any device.

        Returns:
            The version that the model has now; None if nothing is published yet, or the module was loaded with it
            last, and no operation has changed or replaced its tensors since; torch counts none on `.data`.

        Raises:
            UserError: naming the tensors that do not fit, besides what `update` raises.
        """
        with self._lock:
            if not self._is_iterated:
                self.update()
            held = self._chain.held
            if held is None:
                return None
            if isinstance(model, nn.Module) and self._has_loaded(model, held.version.digest):
                return None
            self._loaded = None
            load(held.state, held.version.tied, model)
            if isinstance(model, nn.Module):
                self._loaded = weakref.ref(model), held.version.digest, _tensors_as_left(model)
            return held.version

    def _has_loaded(self, model: nn.Module, digest: str) -> bool:
        """True if a module has the bits of a version's digest since it was loaded last."""
        if self._loaded is None:
            return False
        module, last_digest, tensors = self._loaded
        return module() is model and last_digest == digest and tensors == _tensors_as_left(model)

    def resume(self, number: int, state: State) -> Version | None:
        """Hold a version whose weights were kept elsewhere, such as on disk; None if they are not the version's.

        Args:
            number: the version's.
            state: its weights, which the follower changes from now on.
        """
        version = self._result(self._chain.version, number)
        if version is None or content_digest(state) != version.digest:
            return None
        self._chain.held = Held(version, state)
        return version

    def file(self, name: str) -> bytes:
        """A file that goes with the held version, one of `version.files`.

        Raises:
            PayloadError: if it is not there, or was changed.
        """
        if (version := self.version) is None or name not in version.files:
            raise UserError(f"the held version has no file {name!r:.100}", "name")
        return self._result(self._chain.file, version, name)

    def _result(self, request: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any, **options: Any) -> _T:
        """The result of a request to the store, which `close` ends."""
        if not self._is_closed:
            with suppress(CancelledError):
                return self._background.wait(request(*arguments, **options), _FOR_EVER, self._store.url)
        raise UserError(f"this follower of {self._store.url} is closed: make a new one")

    def close(self) -> None:
        """End the follower's thread, and a request that it waits for; what is held stays."""
        self._is_closed = True
        self._background.stop()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _update(self, *, lists: bool) -> Version | None:
        for num_left in reversed(range(_MOST_TRIES)):
            newest = await self._newer(lists=lists)
            if newest is None:
                return None
            try:
                return (await self._chain.take(newest)).version
            except GoneError as error:
                if not num_left:
                    raise GoneError(
                        f"{error}, {_MOST_TRIES} times in a row: versions are deleted faster than they are read "
                        "here: keep more of them, or publish less often"
                    ) from None
        return None

    async def _newer(self, *, lists: bool) -> Version | None:
        """The newest version, if it is newer than the held one.

        Args:
            lists: list all versions, even if there is no header with the next number: that may have been deleted.
        """
        held = self.version
        if held is not None and not lists and await self._chain.version(held.number + 1) is None:
            return None
        numbers = await self._chain.numbers()
        if held is not None and numbers and numbers[-1] < held.number:
            if await self._chain.version(held.number) == held:
                return None  # the list is not up to date
            raise UserError(
                f"{self._store.url} ends with version {numbers[-1]}, and this follower holds {held.name}: the "
                "versions begin anew: follow them with a new follower"
            )
        self._check_there(held, numbers)
        if not numbers or (held is not None and numbers[-1] <= held.number):
            return None
        return await self._chain.version(numbers[-1])

    def _check_there(self, held: Version | None, numbers: Sequence[int]) -> None:
        """Refuse a place from which the held version has disappeared."""
        if held is None or numbers:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        elif time.monotonic() > self._gone_since + self._timeout_seconds:
            raise StoreUnreachableError(
                f"{self._store.url} has had no versions for {self._timeout_seconds:g} s: bring the place back"
            )


def _tensors_as_left(model: nn.Module) -> dict[str, tuple[object, int]]:
    """By name each tensor's address and the number of operations that changed it; 0 if torch counts none."""
    return {name: _as_left(tensor) for name, tensor in model.state_dict().items()}


def _as_left(tensor: Tensor) -> tuple[object, int]:
    unknown = object() if tensor.numel() else 0  # an object equals no other
    return address_of(tensor) or unknown, 0 if tensor.is_inference() else changes_of(tensor)
