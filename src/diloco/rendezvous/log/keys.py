"""Ed25519 keys: one a replica, with which it signs its entries of the log and the headers of its payloads.

What is signed begins with `_DOMAIN`, so that a signature made for another program is worth nothing here. An entry
goes on with `{`, a payload's header with `payload`: neither can stand for the other.
"""

import os
import re
import stat
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from diloco.errors import FileError, UserError
from diloco.files import expanded, writing

VARIABLE = "DILOCO_KEY"
"""The environment variable that names this replica's key file."""


_DOMAIN = b"diloco log 1\n"


_MOST_BYTES = 1 << 14


class ForgedError(FileError):
    """A signature is missing, or was not made with the key that it should be of."""


class Signer(Protocol):
    """The holder of a replica's key."""

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits; empty without keys."""
        ...

    def sign(self, message: bytes) -> str:
        """The signature of a message, 128 hexadecimal digits; empty without keys."""
        ...


class NoKeys:
    """The signer of a run without keys, which trusts everybody who can write to the store."""

    public = ""

    def sign(self, message: bytes) -> str:
        """The empty text."""
        return ""


class KeyFile:
    """The signer with the private key of a file that `write_key` wrote.

    Args:
        path: the file; nobody but its owner may have rights to it.

    Raises:
        UserError: if the file can't be read, others have rights to it, or it holds no Ed25519 key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._key = _read_key(expanded(os.fspath(path)))
        self.public = self._key.public_key().public_bytes_raw().hex()
        """The public key in hexadecimal."""

    def sign(self, message: bytes) -> str:
        """The Ed25519 signature of a message in hexadecimal."""
        return self._key.sign(_DOMAIN + message).hex()


def signer_of_environment() -> Signer:
    """The signer that DILOCO_KEY names; one without a key if it is not set.

    Raises:
        UserError: as `KeyFile`.
    """
    path = os.environ.get(VARIABLE)
    return KeyFile(path) if path else NoKeys()


def write_key(path: Path) -> str:
    """Write a new private key, PEM (PKCS8) that its owner alone can read, and return its public key.

    Raises:
        UserError: if the file exists: a key that is lost can't be made again.
        FileWriteError: if it can't be written.
    """
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with writing(path, len(text)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
    except OSError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise UserError(f"{path} exists already: name a new file for the key", "file") from None
        raise
    return key.public_key().public_bytes_raw().hex()


def check(public: str, signature: str, message: bytes, *, source: str) -> None:
    """Check the signature of a message.

    Args:
        public: the key in hexadecimal; empty in a run without keys, whose signatures are empty.
        signature: in hexadecimal, lower case.
        message: that was signed.
        source: the message in words, for the error.

    Raises:
        ForgedError: if the signature is not that of the key and the message.
    """
    if not public:
        if signature:
            raise ForgedError(f"{source} is signed, in a run without keys")
        return
    if not signature:
        raise ForgedError(f"{source} is not signed: it should be by the key {public}")
    try:
        if not re.fullmatch("[0-9a-f]{128}", signature):
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(
            bytes.fromhex(signature), _DOMAIN + message
        )
    except (InvalidSignature, ValueError):
        raise ForgedError(f"{source} is forged: its signature is not that of the key {public}") from None


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        # Not blocking: a pipe that nobody writes to would hang.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"the key {path} is not a file")
            if status.st_mode & 0o077:
                raise UserError(
                    f"the key {path} can be read or changed by others (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"run chmod 600 {path}, and make a new key if anybody may have read this one"
                )
            text = file.read(_MOST_BYTES)
    except OSError as error:
        raise UserError(f"the key {path} can't be read: {error.strerror or error}") from None
    try:
        key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError):  # TypeError: it is encrypted
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is no key of diloco's: make one with diloco keys new")
    return key
