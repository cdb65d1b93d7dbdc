"""A store: named objects that are written once, in a directory or in a bucket of S3, GCS or Azure.

Trouble that passes is retried here, with jitter, so that nobody else needs to. A request whose answer was lost may
have been carried out, and a store that says "it exists" may mean a write in progress: after either, the object is
read.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from diloco.rendezvous.entries import MOST_BYTES
from diloco.rendezvous.store_errors import (
    StoreError,
    StoreUnreachableError,
    TooLargeError,
    first_line,
    lasting,
)
from diloco.rendezvous.store_url import opened_url
from diloco.rendezvous.turns import Turns

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Buffer", "Store", "StoreError", "StoreUnreachableError", "TooLargeError"]

Buffer: TypeAlias = "bytes | bytearray | memoryview | obstore.Bytes"
T = TypeVar("T")
SLOWEST_BYTES_S = 1 << 17
"""Lowest rate of a link's bytes, about 1 Mbit/s: a request has the time for them beside the store's time limit."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 3.0


class Store:
    """Objects by name; made by `Store.open`, used from one asyncio loop.

    A request that fails for a passing reason is made again until it succeeds or `patience_seconds` have passed.
    All methods raise `StoreError` for trouble that lasts and `StoreUnreachableError` when patience is over.
    """

    def __init__(self, url: str, client: "ObjectStore", *, timeout_seconds: float) -> None:
        self.url = url
        self.requests: Counter[str] = Counter()
        """Requests by kind (get, create, delete, list), repeated ones too."""
        self.bytes_up = 0
        """Bytes of objects that were sent."""
        self.bytes_down = 0
        """Bytes of objects that were received."""
        self._client = client
        self._uploads, self._downloads = Turns(), Turns()
        self._timeout_seconds = timeout_seconds
        self._last_success: float | None = None
        self._failing_since: dict[str, float] = {}
        """By kind of request, the time since which none has succeeded; absent if the last one did."""

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float = 30.0) -> "Store":
        """A store by its URL: a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.

        Credentials, endpoint and region are those of the ordinary environment variables (AWS_ACCESS_KEY_ID,
        AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION, AZURE_*, GOOGLE_*); SSL_CERT_FILE or AWS_CA_BUNDLE
        names the certificate of a private authority. No request is made.

        Args:
            url: of the store.
            timeout_seconds: time limit of one request; one that carries many bytes has more.

        Raises:
            UserError: for a wrong URL or scheme, or a directory whose parent does not exist.
            FileWriteError: for a directory that can't be made.
        """
        url, client = opened_url(url)
        return cls(url, client, timeout_seconds=timeout_seconds)

    @property
    def is_directory(self) -> bool:
        """True for a directory, False for a bucket."""
        return "://" not in self.url or self.url.startswith("file:")

    @property
    def outage_seconds(self) -> float:
        """Time in which no read, or no create, has succeeded; 0.0 if the last ones did."""
        # Another thread asks, while the loop's adds and removes kinds.
        return max((time.monotonic() - since for since in list(self._failing_since.values())), default=0.0)

    async def get(self, name: str, *, most_bytes: int, patience_seconds: float = 60.0) -> "obstore.Bytes | None":
        """The bytes of an object, in the memory into which they were received; None if it is absent.

        Raises:
            StoreError: if it has more than `most_bytes`; none of them is received then.
        """
        retry = _Retry(self, f"read {name}", patience_seconds)
        while True:
            try:
                return await self._get(name, most_bytes, retry)
            except _Again:
                await retry.pause()

    async def create(
        self, name: str, data: "Buffer | Sequence[Buffer]", *, patience_seconds: float = 60.0
    ) -> bytes | None:
        """Create an object unless it is there.

        Args:
            name: of the object.
            data: its bytes, as one buffer or several.
            patience_seconds: how long passing trouble is borne.

        Returns:
            None if the object holds `data` now, else the bytes that somebody else has written.
        """
        parts = _parts(data)
        num_bytes = sum(part.nbytes for part in parts)
        retry = _Retry(self, f"create {name}", patience_seconds)

        async def put() -> None:
            # An empty list of buffers would be an upload of nothing that obstore refuses.
            await obstore.put_async(self._client, name, parts or b"", mode="create", use_multipart=False)

        while True:
            try:
                async with self._uploads.turn(num_bytes) as num_sharing:
                    await self._request("create", put, retry, num_sharing)
                self.bytes_up += num_bytes
                return None
            except (AlreadyExistsError, PreconditionError):
                self.bytes_up += num_bytes
            except FileNotFoundError as error:
                raise StoreError(f"{self.url}: there is no such bucket ({first_line(error)})") from None
            except _Again:
                pass
            try:
                there = await self._get(name, max(MOST_BYTES, num_bytes), retry)
                if there is not None:
                    self._succeeded("create")  # by an attempt whose answer was lost, or by somebody else
                    return None if _same(there, parts, num_bytes) else bytes(there)
            except _Again:
                pass
            await retry.pause()

    async def delete(self, names: Sequence[str], *, patience_seconds: float = 60.0) -> None:
        """Delete objects; absent ones are fine."""
        if not names:
            return
        retry = _Retry(self, f"delete {names[0]}", patience_seconds)
        several = list(names)
        while True:
            try:
                await self._request("delete", lambda: obstore.delete_async(self._client, several), retry)
                return
            except FileNotFoundError:
                # Some stores stop at the first that is absent.
                if len(names) > 1:
                    for name in names:
                        await self.delete([name], patience_seconds=retry.seconds_left)
                return
            except _Again:
                await retry.pause()

    async def list(self, prefix: str, *, patience_seconds: float = 60.0) -> list[tuple[str, int]]:
        """Name and bytes of the objects below `prefix`, a name's leading parts such as "log", sorted."""
        retry = _Retry(self, f"list {prefix or 'objects'}", patience_seconds)

        async def names() -> "list[tuple[str, int]]":
            stream = obstore.list(self._client, prefix or None)
            return [(meta["path"], meta["size"]) async for chunk in stream for meta in chunk]

        while True:
            try:
                return sorted(await self._request("list", names, retry))
            except FileNotFoundError:
                return []
            except _Again:
                await retry.pause()

    async def _get(self, name: str, most_bytes: int, retry: "_Retry") -> "obstore.Bytes | None":
        """One attempt to read an object; `_Again` for passing trouble."""
        result = await self._begun(name, most_bytes, retry)
        if result is None:
            return None
        size = result.meta["size"]
        if not self._downloads.is_free(size):
            result = None  # nobody keeps a connection while others use the link
        async with self._downloads.turn(size) as num_sharing:
            result = result or await self._begun(name, most_bytes, retry)
            if result is None:
                return None
            data = await self._request("", result.bytes_async, retry, num_sharing)
        self.bytes_down += len(data)
        if len(data) != size:
            raise _Again
        return data

    async def _begun(self, name: str, most_bytes: int, retry: "_Retry") -> "obstore.GetResult | None":
        """The answer to a read, of which the bytes have not been received."""
        try:
            result = await self._request("get", lambda: obstore.get_async(self._client, name), retry)
        except FileNotFoundError:
            self._failing_since.pop("", None)  # what had no answer is not there
            return None
        if (size := result.meta["size"]) > most_bytes:
            raise TooLargeError(f"{name} in {self.url} has {size:,} bytes, and may have {most_bytes:,}")
        return result

    async def _request(
        self, kind: str, request: Callable[[], Awaitable[T]], retry: "_Retry", num_bytes: int = 0
    ) -> T:
        """One request, or half of one; `_Again` for passing trouble, "exists" and "absent" as they are."""
        if kind:
            self.requests[kind] += 1
        started = time.monotonic()
        limit = min(self._timeout_seconds, max(retry.seconds_left, 1.0)) + num_bytes / SLOWEST_BYTES_S
        try:
            async with asyncio.timeout(limit):
                result = await request()
        except (BaseError, OSError) as error:  # TimeoutError is an OSError
            if kind == "create" and isinstance(error, AlreadyExistsError | PreconditionError):
                self._succeeded(kind)
                raise
            answered = self._last_success is not None
            trouble = lasting(error, url=self.url, action=retry.action, answered=answered)
            if trouble is not None:
                raise trouble from None
            if isinstance(error, FileNotFoundError):
                self._succeeded(kind)
                raise
            if kind not in ("list", "delete"):  # housekeeping, which can wait
                self._failing_since.setdefault(kind, max(started, self._last_success or started))
            retry.reason = f"no answer in {limit:.3g} s" if isinstance(error, TimeoutError) else first_line(error)
            raise _Again from None
        self._succeeded(kind)
        return result

    def _succeeded(self, kind: str) -> None:
        self._last_success = time.monotonic()
        self._failing_since.pop(kind, None)


class _Again(Exception):  # noqa: N818
    """A request failed, and may succeed if it is made again."""


class _Retry:
    """The pauses between the attempts at one thing, and when they end."""

    def __init__(self, store: Store, action: str, patience_seconds: float) -> None:
        self.action = action
        self.reason = "it is being written"
        self._store = store
        self._patience_seconds = patience_seconds
        self._deadline = time.monotonic() + patience_seconds
        self._longest = _FIRST_PAUSE_SECONDS

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    async def pause(self) -> None:
        pause = random.uniform(0, self._longest)
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        if pause >= self.seconds_left:
            raise StoreUnreachableError(
                f"can't {self.action} in {self._store.url} within {self._patience_seconds:g} s: check the network "
                f"and the store's endpoint ({self.reason})"
            )
        await asyncio.sleep(pause)


def _parts(data: "Buffer | Sequence[Buffer]") -> list[memoryview]:
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview | obstore.Bytes) else data
    return [memoryview(buffer).cast("B") for buffer in buffers]


def _same(there: "obstore.Bytes", parts: Sequence[memoryview], num_bytes: int) -> bool:
    """Whether an object holds the parts, one after another."""
    if len(there) != num_bytes:
        return False
    whole, start = memoryview(there), 0
    for part in parts:
        if whole[start : start + part.nbytes] != part:
            return False
        start += part.nbytes
    return True
