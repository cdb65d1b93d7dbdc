"""The errors of a store: which of them last, and one sentence for each of those.

A client library answers with text. In it stand the HTTP status and the store's own code, which S3, GCS and Azure
all write as `<Code>…</Code>`, or the number of the operating system's error.
"""

import errno
import os
import re

import obstore.exceptions as obstore_errors

from diloco.errors import DilocoError, UserError

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
}
"""Numbers of the operating system's errors that a network's file system gives while it recovers."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL and AWS_REGION if the store is not AWS",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The environment variables of each kind of store."""


class StoreError(DilocoError):
    """A store refuses what a run needs of it: no permission, no bucket, no credentials, or an object too large."""


class NoCredentialsError(StoreError):
    """A store needs credentials, and there are none."""

    exit_code = UserError.exit_code


class TooLargeError(StoreError):
    """An object is larger than what can lie under its name."""


class StoreUnreachableError(StoreError):
    """A store has not answered for as long as the caller would wait."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the store's own code instead of the body that stands in it."""
    text = str(error)
    line = text.partition("\n")[0].partition(": <")[0].strip().rstrip(":")
    if (code := _code(text)) and code not in line:
        line += f" ({code})"
    return line or type(error).__name__


def lasting(error: Exception, *, url: str, action: str, answered: bool) -> StoreError | None:
    """The error to raise for a failure that another try would not mend; None for one that it may.

    Args:
        error: the client library's.
        url: the store's.
        action: the failed request, such as "read log/0000000000".
        answered: whether the store has answered a request before: credentials were there then.
    """
    if isinstance(error, TimeoutError):
        return None
    text, scheme = str(error), url.partition("://")[0]
    code, status, number = (
        _code(text),
        _number(r"status code: (\d{3})", text),
        _number(r"\(os error (\d+)\)", text),
    )
    where = f"can't {action} in {url}"
    if scheme not in CREDENTIALS:
        if isinstance(error, obstore_errors.PermissionDeniedError):
            number = number or errno.EACCES
        if number is None or number in _TRANSIENT_NUMBERS:
            return None
        reason = os.strerror(number)
        return StoreError(f"can't {action} in {url}: {reason[:1].lower()}{reason[1:]}")
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
