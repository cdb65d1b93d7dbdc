"""A store: named objects that are written once, in a directory, or in a bucket of S3, GCS, Azure or Hugging Face.

Passing failures are retried here, with jitter, so that no caller needs to. A request whose answer was lost may
have been carried out, and a store that says "it exists" may mean a write in progress: after either, the object is
read.
"""

import asyncio
import atexit
import errno
import logging
import math
import os
import random
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from diloco.errors import DilocoError, UserError
from diloco.files import create, expanded, make_directory, os_error, remove_abandoned, require
from diloco.rendezvous.log.entries import MOST_ENTRY_BYTES
from diloco.units import gbit_s

if TYPE_CHECKING or find_spec("obstore"):  # a report of a run without a store needs none; Store.open refuses
    import obstore
    import obstore.exceptions as obstore_errors
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
    from obstore.store import LocalStore, S3Store, from_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

Buffer: TypeAlias = "bytes | bytearray | memoryview | obstore.Bytes"
T = TypeVar("T")
_LOG = logging.getLogger("diloco")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "InvalidBucketName"}
_WRONG_CREDENTIALS = {
    "AuthenticationFailed",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidAuthenticationInfo",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_DENIED = {"AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch"}
_TRANSIENT_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch"}
_TRANSIENT_STATUS = {408, 409, 412, 425, 429, 500, 502, 503, 504, 507, 508, 509, 520, 521, 522, 523, 524, 529}
_TRANSIENT_NUMBERS = {
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOMEM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENOSPC, errno.EDQUOT),
}
"""Numbers of the operating system's errors that a file system gives while it recovers, or is full."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL and AWS_REGION if the store is not AWS",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to the S3 credentials of a Hugging Face token",
}
"""The environment variables of each kind of store."""


class StoreError(DilocoError):
    """A store refuses what a run needs of it: no permission, no bucket, no credentials, or an object too large."""


class NoCredentialsError(StoreError):
    """A store needs credentials, and there are none."""

    exit_code = UserError.exit_code


class BadObjectError(StoreError):
    """An object is larger than what can lie under its name, or no file."""


class StoreUnreachableError(StoreError):
    """A store has not answered for as long as the caller would wait."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the answer's body, and with the store's own code."""
    text = str(error)
    line = text.partition("\n")[0].partition(": <")[0].strip().rstrip(":")
    if (code := _code(text)) and code not in line:
        line += f" ({code})"
    return line or type(error).__name__


def lasting(error: Exception, *, url: str, action: str, answered: bool) -> StoreError | None:
    """The error to raise for a failure that another try would not mend; None where another try may mend it.

    Args:
        error: the client library's.
        url: the store's.
        action: the failed request, such as "read log/0000000000".
        answered: whether the store has answered a request before: credentials were there then.
    """
    if isinstance(error, TimeoutError):
        return None
    text, scheme = str(error), url.partition("://")[0]
    code, status, number = _code(text), _number(r"status code: (\d{3})", text), os_error(error)
    where = f"can't {action} in {url}"
    if scheme not in CREDENTIALS:
        if isinstance(error, obstore_errors.PermissionDeniedError):
            number = number or errno.EACCES
        if number is None or number in _TRANSIENT_NUMBERS:
            return None
        return StoreError(f"can't {action} in {url}: {_os_reason(number)}")
    if "169.254.169.254" in text or "metadata.google" in text or "MissingAccount" in text:
        # The last place where a client looks for credentials; on a machine that has it, it may fail for a moment.
        return (
            None if answered else NoCredentialsError(f"{url}: there are no credentials: set {CREDENTIALS[scheme]}")
        )
    if "invalid peer certificate" in text or "UnknownIssuer" in text:
        return StoreError(
            f"{url}: the endpoint's certificate is not trusted: set SSL_CERT_FILE to the PEM file of its authority"
        )
    if code in _NO_BUCKET:
        return StoreError(f"{url}: there is no such bucket: create it, or correct its name ({code})")
    if code in ("RequestTimeTooSkewed", "RequestExpired"):
        return StoreError(f"{url}: the store refuses this computer's signatures: set its clock ({code})")
    if code in _WRONG_CREDENTIALS or status == 401 or isinstance(error, obstore_errors.UnauthenticatedError):
        return StoreError(
            f"{url}: the store refuses the credentials ({code or status}): check {CREDENTIALS[scheme]}"
        )
    if status == 403 or code in _DENIED or isinstance(error, obstore_errors.PermissionDeniedError):
        return StoreError(f"{where}: permission denied: give these credentials the right to it ({code or status})")
    if isinstance(error, obstore_errors.NotSupportedError) or status == 501:
        return StoreError(f"{where}: the store can't create an object only if it is absent: take another store")
    if (
        isinstance(error, FileNotFoundError)
        or code in _TRANSIENT_CODES
        or status in _TRANSIENT_STATUS
        or status is None
        or status >= 500
    ):
        return None
    return StoreError(f"{where}: {first_line(error)}")


def _code(text: str) -> str:
    match = re.search(r"<Code>(\w{1,60})</Code>|\(code: (\w{1,60})\)", text)
    return match[1] or match[2] if match else ""


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def _os_reason(number: int) -> str:
    reason = os.strerror(number)
    return reason[:1].lower() + reason[1:]


LARGE_BYTES = 1 << 16
"""Size above which an object waits for its turn."""
MOST_BYTES_AT_ONCE = 1 << 25
"""Size of all objects that travel at once; a larger one travels alone."""


class Turns:
    """The large objects on their way to a store, or from it.

    Sent all at once, they would share a slow link's rate until each was out of time, and begin again for ever.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of the objects on their way."""
        self._first = asyncio.Lock()
        self._has_room = asyncio.Event()

    def is_free(self, num_bytes: int) -> bool:
        """True if an object of this size would have its turn at once."""
        has_room = not self.num_bytes or self.num_bytes + num_bytes <= MOST_BYTES_AT_ONCE
        return num_bytes <= LARGE_BYTES or (has_room and not self._first.locked())

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[int]:
        """A context in which an object travels; in the order of the calls, and at once for a small one.

        Its value is the number of bytes for which it needs time: all that travel, or a small object's own.
        """
        if num_bytes <= LARGE_BYTES:
            yield num_bytes
            return
        async with self._first:
            while self.num_bytes and self.num_bytes + num_bytes > MOST_BYTES_AT_ONCE:
                self._has_room.clear()
                await self._has_room.wait()
            self.num_bytes += num_bytes
        try:
            yield self.num_bytes
        finally:
            self.num_bytes -= num_bytes
            self._has_room.set()


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
    "hf": ("HF_S3_ENDPOINT",),
}
_ALLOW_HTTP = {
    "s3": "AWS_ALLOW_HTTP",
    "gs": "GOOGLE_ALLOW_HTTP",
    "az": "AZURE_ALLOW_HTTP",
    "hf": "AWS_ALLOW_HTTP",
}
_HUGGING_FACE = "https://s3.hf.co"
"""The S3 gateway of Hugging Face: https://huggingface.co/docs/hub/storage-buckets-s3."""
_BUCKET_IN_ENDPOINT = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"
"""The variable with which the endpoint of S3 has to name the bucket."""
_CERTIFICATES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE")
_FOR_EVER = "1day"
"""Time limit of the client's own; `Store` has others, which depend on the size."""


def client_of(url: str) -> "tuple[str, ObjectStore]":
    """The URL, for a directory its path, and a client.

    A directory is made if its parent is there.

    Raises:
        UserError: for a URL, or an environment variable, that can't be right.
        FileWriteError: if the directory can't be made.
    """
    parts = urlsplit(url)
    if "://" not in url or parts.scheme == "file":
        if parts.netloc:
            raise UserError(f"{url}: a directory's URL has three slashes, file:///directory", "url")
        return _directory(unquote(parts.path) if parts.scheme == "file" and "://" in url else url)
    if parts.scheme not in CREDENTIALS:
        raise UserError(f"{url}: give a directory, or s3://bucket/prefix, gs://…, az://… or hf://buckets/…", "url")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"{parts.scheme}://…: give no credentials or options in the URL: set {CREDENTIALS[parts.scheme]}",
            "url",
        )
    if not parts.netloc:
        raise UserError(f"{url}: the bucket's name is missing: {parts.scheme}://bucket/prefix", "url")
    url = url.rstrip("/")
    bucket, client = parts.netloc, partial(from_url, url)
    if parts.scheme == "hf":
        bucket, client = _of_hugging_face(url, os.environ)
    options = _client_options(parts.scheme, bucket, os.environ)
    retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    try:
        return url, client(client_options=options, retry_config=retries)
    except (BaseError, ValueError, OSError) as error:
        if any(name in str(error) for name in ("MissingAccount", "MissingAccessKeyId", "MissingSecretAccessKey")):
            needed = CREDENTIALS[parts.scheme]
            raise UserError(f"{url}: there are no credentials, or half of them: set {needed}", "url") from None
        raise UserError(f"{url}: {first_line(error)}", "url") from None


def _of_hugging_face(url: str, environment: Mapping[str, str]) -> "tuple[str, Callable[..., ObjectStore]]":
    """The namespace, which ends the endpoint's path, and a function that makes the client of Hugging Face's S3.

    The endpoint and the region stand above those of the environment, which may be another store's.
    """
    match = re.fullmatch(r"hf://buckets/([^/]+)/([^/]+)((?:/[^/]+)*)", url)
    if match is None:
        raise UserError(f"{url}: the URL of a bucket is hf://buckets/NAMESPACE/BUCKET/prefix", "url")
    namespace, bucket, prefix = match.groups()
    endpoint = environment.get("HF_S3_ENDPOINT") or _HUGGING_FACE
    config: S3Config = {
        "endpoint": f"{endpoint.rstrip('/')}/{namespace}",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
    }
    return namespace, partial(S3Store.from_url, f"s3://{bucket}{prefix}", config=config)


def _directory(path: str) -> "tuple[str, ObjectStore]":
    """The directory as a store, made if its parent exists; refuse what is no directory."""
    if not path or "\0" in path:
        raise UserError("give the directory, or the URL, of the store", "url")
    if scheme := re.match(f"({'|'.join(CREDENTIALS)}):/?(?!/)", path):
        bucket = "buckets/NAMESPACE/BUCKET" if scheme[1] == "hf" else "bucket"
        raise UserError(f"{path}: a bucket's URL has two slashes: {scheme[1]}://{bucket}/prefix", "url")
    refuse_host(path)
    directory = expanded(path).absolute()
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: give a directory", "url")
    if not directory.parent.is_dir():
        bucket = "" if path.startswith(("/", ".", "~")) else "; a bucket is s3://bucket/prefix"
        raise UserError(f"{directory.parent} does not exist: make it, or mount it, first{bucket}", "url")
    make_directory(directory)
    try:
        return str(directory), LocalStore(directory, automatic_cleanup=True)  # of empty directories
    except BaseError as error:
        raise UserError(f"{directory}: {first_line(error)}", "url") from None


def refuse_host(url: str) -> None:
    """Refuse an address of a machine, which would be taken for a directory; `./HOST:PORT` is one.

    Raises:
        UserError: for one.
    """
    if re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}", url):
        raise UserError(
            f"{url} is a host: machines that reach each other are joined by torchrun --master-addr or "
            "diloco.connect; a store is a directory, or a URL such as s3://bucket/run",
            "url",
        )


def _client_options(scheme: str, bucket: str, environment: Mapping[str, str]) -> "ClientConfig":
    """The options of the client that the environment sets; refuse an endpoint that is not encrypted."""
    options: ClientConfig = {"timeout": _FOR_EVER, "connect_timeout": "10s", "user_agent": "diloco"}
    variable = next((name for name in _ENDPOINTS[scheme] if environment.get(name)), "")
    endpoint = environment.get(variable, "")
    if endpoint:
        parts = _endpoint_parts(variable, endpoint)
        may_name_it = scheme == "az" or _is_true(environment, _BUCKET_IN_ENDPOINT)  # Azure's path is the account
        if parts.path.strip("/") == bucket and not may_name_it:
            bare = parts._replace(path="", query="", fragment="").geturl()
            raise UserError(
                f"the endpoint {variable}={endpoint} already names {bucket}: leave it out of the "
                f"endpoint: {variable}={bare}"
            )
    if endpoint.lower().startswith("http://"):
        host = urlsplit(endpoint).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        if not is_here and not _is_true(environment, _ALLOW_HTTP[scheme]):
            raise UserError(
                f"{endpoint} is not encrypted: take an https endpoint, or set {_ALLOW_HTTP[scheme]}=true on a "
                "network in which you trust everybody",
                "url",
            )
        options["allow_http"] = True
    authority = next((environment[name] for name in _CERTIFICATES if environment.get(name)), None)
    if authority is not None:
        try:
            options["root_certificate"] = Path(authority).read_bytes()
        except OSError as error:
            raise UserError(f"SSL_CERT_FILE={authority} can't be read: {error.strerror}") from None
    return options


def _is_true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("1", "true")


def _endpoint_parts(variable: str, endpoint: str) -> SplitResult:
    """The parts of an endpoint's URL; the client would panic at one that is none."""
    if "://" not in endpoint:
        host = re.sub("^https?:/?", "", endpoint)
        raise UserError(f"{variable}={endpoint} does not begin with https://: write https://{host}")
    try:
        parts = urlsplit(endpoint)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # the port is no number, or a bracket is not closed
        pass
    raise UserError(f"{variable}={endpoint} is no URL of an endpoint: write https://HOST, or https://HOST:PORT")


SLOWEST_BYTES_S = 1 << 17
"""Lowest rate of a link's bytes, about 1 Mbit/s: a request has the time for them beside the store's time limit."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 3.0
_SECONDS_TO_WARNING = 30.0
_SECONDS_TO_DOUBT = 1.0
"""Time without an answer from a directory, after which a name's kind is looked at."""


@dataclass(frozen=True)
class Outage:
    """A read or a create that fails again and again."""

    since: float
    """Time of the first failure, by `time.monotonic`."""
    trouble: str
    """The object and the reason."""

    @property
    def seconds(self) -> float:
        """Time since then."""
        return time.monotonic() - self.since


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
        self.keeps_versions = False
        """True once S3 has given an object's version: what is deleted stays there, and is paid for."""
        self._client = client
        self._uploads, self._downloads = Turns(), Turns()
        self._link = SlowLink.of(os.environ)
        self._timeout_seconds = timeout_seconds
        self._has_answered = False
        self._sweeps_at = -math.inf
        self._under_way: set[_Retry] = set()
        """The reads and creates that are not over; housekeeping, which can wait, is not among them."""

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float = 30.0) -> "Store":
        """A store by its URL: a path, or a bucket's.

        These are file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix and
        hf://buckets/namespace/bucket/prefix. Credentials, endpoint and region are those of the ordinary
        environment variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION, AZURE_*,
        GOOGLE_*), of which hf:// takes the two keys alone; SSL_CERT_FILE or AWS_CA_BUNDLE names the certificate of
        a private authority. No request is made.

        Args:
            url: of the store.
            timeout_seconds: time limit of one request; one that carries many bytes has more.

        Raises:
            UserError: for a wrong URL or scheme, or a directory whose parent does not exist.
            FileWriteError: for a directory that can't be made.
            MissingLibraryError: without the extra `store`.
        """
        require("obstore", extra="store")
        url, client = client_of(url)
        _let_threads_end()
        return cls(url, client, timeout_seconds=timeout_seconds)

    @property
    def is_directory(self) -> bool:
        """True for a directory, False for a bucket."""
        return "://" not in self.url or self.url.startswith("file:")

    @property
    def outage(self) -> Outage | None:
        """The read or create that has failed for the longest time; None if none fails.

        What succeeds meanwhile does not end it: a store that takes payloads, and not the next entry, is of no use.
        """
        # Another thread asks, while the loop's adds and removes some.
        outages = [outage for retry in list(self._under_way) if (outage := retry.outage) is not None]
        return min(outages, key=lambda outage: outage.since, default=None)

    async def get(self, name: str, *, most_bytes: int, patience_seconds: float = 60.0) -> "obstore.Bytes | None":
        """The bytes of an object, in the memory into which they were received; None if it is absent.

        Raises:
            BadObjectError: if it has more than `most_bytes`, none of which is received then, or is a pipe; other
                kinds that are no file count as absent.
        """
        with _Retry(self, f"read {name}", patience_seconds) as retry:
            return await retry.until_done(lambda: self._get(name, most_bytes, retry))

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

        Raises:
            BadObjectError: if what somebody else has put there is far too large, or no file.
        """
        with _Retry(self, f"create {name}", patience_seconds) as retry:
            return await self._created(name, _parts(data), retry)

    async def _created(self, name: str, parts: "Sequence[memoryview]", retry: "_Retry") -> bytes | None:
        """Try until the object, or another's under its name, is there; the other's bytes, None for ours."""
        num_bytes = sum(part.nbytes for part in parts)
        while True:
            is_taken = False
            try:
                async with self._uploads.turn(num_bytes) as num_sharing:
                    await self._request("create", lambda: self._put(name, parts), retry, num_sharing)
                self.bytes_up += num_bytes
                return None
            except (AlreadyExistsError, PreconditionError):
                self.bytes_up += num_bytes
                is_taken = True
            except FileNotFoundError as error:
                raise StoreError(f"{self.url}: there is no such bucket ({first_line(error)})") from None
            except _Again:
                pass
            try:
                # Our attempt, whose answer was lost, has succeeded, or somebody else's has.
                there = await self._get(name, max(MOST_ENTRY_BYTES, num_bytes), retry)
                if there is not None:
                    return None if _same(there, parts, num_bytes) else bytes(there)
                if is_taken:
                    await self.check_kind(name)
                    retry.fails("the store says that it exists, and then that it does not")
            except _Again:
                pass
            await retry.pause()

    async def delete(self, names: Sequence[str], *, patience_seconds: float = 60.0) -> None:
        """Delete objects; absent ones are fine. In a directory also what killed processes left of others."""
        if self.is_directory and time.monotonic() > self._sweeps_at:
            self._sweeps_at = time.monotonic() + _SECONDS_TO_ABANDON
            sweep = partial(remove_abandoned, Path(self.url), seconds=_SECONDS_TO_ABANDON)
            with suppress(OSError):  # TimeoutError is one
                await asyncio.wait_for(_aside(sweep), self._timeout_seconds)
        if not names:
            return
        retry = _Retry(self, f"delete {names[0]}", patience_seconds)
        several = list(names)
        try:
            await retry.until_done(
                lambda: self._request("delete", lambda: obstore.delete_async(self._client, several), retry)
            )
        except FileNotFoundError:
            # Some stores stop at the first that is absent.
            for name in names if len(names) > 1 else ():
                await self.delete([name], patience_seconds=retry.seconds_left)

    async def list(
        self, prefix: str, *, after: str | None = None, patience_seconds: float = 60.0
    ) -> list[tuple[str, int]]:
        """Name and bytes of the objects below `prefix`, a name's leading parts such as "log", sorted.

        Args:
            prefix: of the names.
            after: a name: those up to it are left out.
            patience_seconds: how long passing trouble is borne.
        """
        retry = _Retry(self, f"list {prefix or 'objects'}", patience_seconds)

        async def names() -> "list[tuple[str, int]]":
            stream = obstore.list(self._client, prefix or None, offset=after)
            listed = [(meta["path"], meta["size"]) async for chunk in stream for meta in chunk]
            return [(name, size) for name, size in listed if name > (after or "")]  # servers may ignore `after`

        try:
            return sorted(await retry.until_done(lambda: self._request("list", names, retry)))
        except FileNotFoundError:
            return []

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
            data = await self._request("", partial(self._receive, result), retry, num_sharing)
        self.bytes_down += len(data)
        if len(data) != size:
            retry.fails("it was cut short")
            raise _Again
        return data

    async def _begun(self, name: str, most_bytes: int, retry: "_Retry") -> "obstore.GetResult | None":
        """The answer to a read, of which the bytes have not been received."""
        try:
            result = await self._request("get", lambda: self._open(name), retry)
        except FileNotFoundError:
            return None
        # Google Cloud Storage gives a version always.
        self.keeps_versions |= self.url.startswith("s3://") and result.meta["version"] not in (None, "null")
        if (size := result.meta["size"]) > most_bytes:
            raise BadObjectError(f"{name} in {self.url} has {size:,} bytes, and may have {most_bytes:,}")
        return result

    async def _receive(self, result: "obstore.GetResult") -> "obstore.Bytes":
        """The bytes of an answer."""
        if self._link is not None:
            await self._link.carry("down", result.meta["size"])
        return await result.bytes_async()

    async def _put(self, name: str, parts: "Sequence[memoryview]") -> None:
        """One attempt to create an object."""
        if self._link is not None:
            await self._link.carry("up", sum(part.nbytes for part in parts))
        if self.is_directory:
            await _aside(lambda: _create_file(Path(self.url, name), parts))
        else:
            # An empty list of buffers would be an upload of nothing that obstore refuses.
            await obstore.put_async(self._client, name, parts or b"", mode="create", use_multipart=False)

    async def _open(self, name: str) -> "obstore.GetResult":
        """One attempt to read an object."""
        answer = asyncio.ensure_future(obstore.get_async(self._client, name))
        try:
            if self.is_directory and not (await asyncio.wait([answer], timeout=_SECONDS_TO_DOUBT))[0]:
                await self.check_kind(name)  # a pipe would hold its reader for ever
            return await answer
        finally:
            answer.cancel()

    async def check_kind(self, name: str) -> None:
        """Refuse what is no file under a name in a directory.

        Raises:
            BadObjectError: saying what it is.
        """
        if self.is_directory and (kind := await _aside(lambda: _kind_of(Path(self.url, name)))):
            raise BadObjectError(f"{name} in {self.url} is {kind}, and no file: remove it")

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
                if kind and self._link is not None:
                    await self._link.answer()
                result = await request()
        except (BaseError, OSError) as error:  # TimeoutError is an OSError
            if kind == "create" and isinstance(error, AlreadyExistsError | PreconditionError):
                self._has_answered = True
                raise
            trouble = lasting(error, url=self.url, action=retry.action, answered=self._has_answered)
            if trouble is not None:
                raise trouble from None
            if isinstance(error, FileNotFoundError):
                self._has_answered = True
                raise
            number = os_error(error) if self.is_directory else None
            reason = _os_reason(number) if number is not None else first_line(error)
            retry.fails(f"no answer in {limit:.3g} s" if isinstance(error, TimeoutError) else reason, started)
            raise _Again from None
        self._has_answered = True
        return result


class SlowLink:
    """A link that is only pretended, on a machine whose own is faster: requests wait as long as it would take.

    Args:
        bytes_s: rate of each way, which all requests of a store share.
        round_trip_seconds: time that each request takes beside that of its bytes.
    """

    VARIABLE = "DILOCO_STORE_LINK"
    """The environment variable with rate and round trip, such as 5Mbit,60ms, of all stores of a process."""

    def __init__(self, bytes_s: float, round_trip_seconds: float) -> None:
        self._bytes_s, self._round_trip_seconds = bytes_s, round_trip_seconds
        self._free_at = {"up": 0.0, "down": 0.0}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "SlowLink | None":
        """The link that an environment asks for; None where it asks for none.

        Raises:
            UserError: if the variable can't be read.
        """
        if not (text := environment.get(cls.VARIABLE)):
            return None
        words = re.fullmatch(r"([^,]+),(\d+(?:\.\d+)?)ms", text)
        with suppress(ValueError):
            if words is not None and (bits_s := gbit_s(words[1]) * 1e9) > 0:
                return cls(bits_s / 8, float(words[2]) / 1e3)
        raise UserError(f"{cls.VARIABLE}={text} is no slow link: write 5Mbit,60ms, or leave it out")

    async def answer(self) -> None:
        """Wait for a round trip."""
        await asyncio.sleep(self._round_trip_seconds)

    async def carry(self, way: Literal["up", "down"], num_bytes: int) -> None:
        """Wait until bytes have passed, behind those that wait already."""
        now = time.monotonic()
        self._free_at[way] = max(now, self._free_at[way]) + num_bytes / self._bytes_s
        await asyncio.sleep(self._free_at[way] - now)


class _Again(Exception):  # noqa: N818
    """A request failed, and may succeed if it is made again."""


class _Retry:
    """The attempts at one request, with pauses, until patience is over; as a context, it is known to the store."""

    def __init__(self, store: Store, action: str, patience_seconds: float) -> None:
        self.action = action
        self.reason = ""
        """The reason why the last attempt has failed."""
        self.outage: Outage | None = None
        """The failures so far; None if no attempt has failed."""
        self._store = store
        self._patience_seconds = patience_seconds
        self._deadline = time.monotonic() + patience_seconds
        self._longest = _FIRST_PAUSE_SECONDS
        self._has_warned = False

    def __enter__(self) -> "_Retry":
        self._store._under_way.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._store._under_way.discard(self)

    def fails(self, reason: str, started: float | None = None) -> None:
        """Note why an attempt has failed, and when it started."""
        since = self.outage.since if self.outage is not None else started or time.monotonic()
        self.reason, self.outage = reason, Outage(since, f"can't {self.action} in {self._store.url}: {reason}")

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    async def until_done(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that does not fail for a passing reason."""
        while True:
            try:
                return await attempt()
            except _Again:
                await self.pause()

    async def pause(self) -> None:
        """Wait for a random time, longer after each failure; raise an error when the patience is over."""
        pause = random.uniform(0, self._longest)
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        if pause >= self.seconds_left:
            remedy = (
                "the directory" if self._store.is_directory else "the network, the store's endpoint and region"
            )
            raise StoreUnreachableError(
                f"can't {self.action} in {self._store.url} within {self._patience_seconds:g} s: check {remedy} "
                f"({self.reason})"
            )
        outage = self.outage
        if outage is not None and outage.seconds > _SECONDS_TO_WARNING and not self._has_warned:
            self._has_warned = True
            if outage == self._store.outage:  # one warning for all that fails
                _LOG.warning("%s, for %.0f s; it is tried again", outage.trouble, outage.seconds)
        await asyncio.sleep(pause)


_SECONDS_TO_ABANDON = 3600.0
"""Time without a write after which a file that `create` was to finish is nobody's; clocks differ by minutes."""
_THREADS = threading.BoundedSemaphore(512)
"""Bound of the threads that wait for a file server."""


async def _aside(function: Callable[[], T]) -> T:
    """The result of a function in a thread that keeps no process alive: a file server may never answer."""
    if not _THREADS.acquire(blocking=False):
        raise OSError(errno.EAGAIN, "too many threads wait for the file server")
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that gave up can't cancel it

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        finally:
            _THREADS.release()

    threading.Thread(target=run, name="diloco store", daemon=True).start()
    return await asyncio.wrap_future(future)


def _create_file(path: Path, parts: "Sequence[memoryview]") -> None:
    """Create an object in a directory, durably."""
    for is_last in (False, False, True):
        try:
            create(path, parts)
            return
        except FileExistsError as error:
            raise AlreadyExistsError(str(error)) from None
        except FileNotFoundError:  # its folder was empty, and was deleted a moment ago
            if is_last:
                raise


def _kind_of(path: Path) -> str:
    """The kind of what is no file; empty for a file, or nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else ""
    if stat.S_ISREG(mode):
        return ""
    return "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"


def _parts(data: "Buffer | Sequence[Buffer]") -> list[memoryview]:
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview | obstore.Bytes) else data
    return [memoryview(buffer).cast("B") for buffer in buffers]


def _same(there: "obstore.Bytes", parts: Sequence[memoryview], num_bytes: int) -> bool:
    """True if an object holds the parts, one after another."""
    if len(there) != num_bytes:
        return False
    whole, start = memoryview(there), 0
    for part in parts:
        if whole[start : start + part.nbytes] != part:
            return False
        start += part.nbytes
    return True


_SECONDS_TO_END = 0.1


@cache
def _let_threads_end() -> None:
    """Let the client library's threads return from Python before it ends, once in this process.

    A thread gives an answer to the loop, and then waits for Python's lock: one that does not get it before Python
    takes itself down aborts the process (SIGABRT), after all its work is done.
    """
    atexit.register(time.sleep, _SECONDS_TO_END)
