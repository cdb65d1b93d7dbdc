"""Ed25519 keys, one per replica, and the one form of what they sign: entries, indexes, payloads, averages.

    {"replica":2,…}         the header: compact JSON in one form; this line is what is hashed and signed
    89abcdef…               its Ed25519 signature in hexadecimal, empty without keys, and spaces
    …                       the body, if this kind of object has one

The spaces make both lines together a multiple of 64 bytes, so that FP32 vectors can be read where a body lies.
What is signed begins with the kind's word: a header that was signed as one kind is worth nothing as another.
All that is signed begins with `_DOMAIN`, so that a signature made for another program is worth nothing here.
"""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec

from diloco.errors import DilocoError, FileError, UserError
from diloco.files import expanded, requiring, writing
from diloco.schema import decoded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from typing_extensions import Buffer

VARIABLE = "DILOCO_KEY"
"""The environment variable that names this replica's key file."""
_DOMAIN = b"diloco log 1\n"
_MOST_BYTES = 1 << 14


class ForgedError(FileError):
    """A signature is missing, or was made with another key than it should be."""


class Signer:
    """Signs with a replica's key; without a key, in a run that trusts all who can write to its store, not at all.

    Args:
        key: the private key.
    """

    def __init__(self, key: "Ed25519PrivateKey | None" = None) -> None:
        self._key = key
        self.public = "" if key is None else key.public_key().public_bytes_raw().hex()
        """The public key, 64 hexadecimal digits; empty without one."""

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> "Signer":
        """The signer with the private key of a file that `write_key` wrote.

        Raises:
            UserError: if the file can't be read, others than its owner have rights to it, or it holds no Ed25519
                key.
        """
        return cls(_read_key(expanded(os.fspath(path))))

    def sign(self, message: bytes) -> str:
        """The signature of a message, 128 hexadecimal digits; empty without a key."""
        return "" if self._key is None else self._key.sign(_DOMAIN + message).hex()


def signer_of_environment() -> Signer:
    """The signer that DILOCO_KEY names; one without a key if it is not set.

    Raises:
        UserError: as `Signer.of_file`.
    """
    path = os.environ.get(VARIABLE)
    return Signer.of_file(path) if path else Signer()


def write_key(path: Path) -> str:
    """Write a new private key, PEM (PKCS8) that its owner alone can read, and return its public key.

    Raises:
        UserError: if the file exists: a key that is lost can't be made again.
        FileWriteError: if it can't be written.
    """
    with requiring("cryptography", extra="store"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

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
    with requiring("cryptography", extra="store"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        if not re.fullmatch("[0-9a-f]{128}", signature):
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(
            bytes.fromhex(signature), _DOMAIN + message
        )
    except (InvalidSignature, ValueError):
        raise ForgedError(f"{source} is forged: its signature is not that of the key {public}") from None


def _read_key(path: Path) -> "Ed25519PrivateKey":
    with requiring("cryptography", extra="store"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

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


_ALIGNMENT = 64
_SIGNATURE = re.compile(r"([0-9a-f]{128})?")
MOST_SIGNATURE_BYTES = 128 + _ALIGNMENT + 1
"""Size of the longest second line."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Opened(Generic[T]):
    """An object whose form is right; nobody has checked its signature yet."""

    header: T
    message: bytes
    """The bytes that were signed."""
    signature: str
    """The signature in hexadecimal; empty without keys."""
    body: memoryview
    """The rest of the object, not copied."""


@dataclass(frozen=True, kw_only=True)
class Signed(Generic[T]):
    """A kind of objects with a signed header."""

    word: str
    """The kind in errors and in signatures."""
    place: str
    """The pattern of its names in the store."""
    form: type[T]
    """The header's dataclass."""
    most_header_bytes: int
    """Length of the longest header that is read."""
    has_body: bool
    error: type[DilocoError]
    """The error for an object that is damaged or forged."""

    @property
    def most_head_bytes(self) -> int:
        """Size of the largest object without its body."""
        return self.most_header_bytes + MOST_SIGNATURE_BYTES

    def name(self, *numbers: int) -> str:
        """An object's name in the store."""
        return self.place.format(*numbers)

    def line(self, header: T) -> bytes:
        """The JSON of a header."""
        return json.dumps(self.fields(header), separators=(",", ":"), allow_nan=False).encode()

    def seal(self, header: T, signer: Signer) -> bytes:
        """The head of an object with this header; the body is uploaded behind it, as a buffer of its own."""
        line = self.line(header)
        return _head(line, signer.sign(self._message(line)))

    def open(self, data: "Buffer", source: str) -> Opened[T]:
        """An object, from bytes that nobody has checked.

        Args:
            data: the whole object.
            source: the object in words, for errors.

        Raises:
            FileError: the kind's, if `seal` does not write these bytes, to the last one before the body.
        """
        whole = memoryview(data).cast("B")
        head = bytes(whole[: self.most_head_bytes])
        end = head.find(b"\n")
        stop = head.find(b"\n", end + 1) + 1
        if end < 0 or not stop:
            self.refuse(source, "its header is cut short, damaged or too long, or was made by another version")
        line, mark = head[:end], head[end + 1 : stop - 1]
        try:
            signature = mark.rstrip(b" ").decode("ascii")
            header = self.read(line, source)
            is_canonical = self.line(header) == line and _head(line, signature) == head[:stop]
        except (FileError, ValueError, RecursionError) as error:
            text = str(error) if isinstance(error, FileError) else f"{source} can't be read: {error}"
            raise self.error(text) from None
        if not is_canonical or not _SIGNATURE.fullmatch(signature):
            self.refuse(source, "its header is not in the form in which diloco writes it")
        if not self.has_body and stop < whole.nbytes:
            self.refuse(source, "something follows its header")
        return Opened(header=header, message=self._message(line), signature=signature, body=whole[stop:])

    def check(self, opened: Opened[T], public: str, source: str) -> None:
        """Check that the holder of a key has signed a header; in a run without keys, that nobody has.

        Raises:
            FileError: the kind's, if not.
        """
        try:
            check(public, opened.signature, opened.message, source=source)
        except FileError as error:
            raise self.error(str(error)) from None

    def fields(self, header: T) -> Any:
        """The JSON value of a header."""
        return msgspec.to_builtins(header, order="deterministic")

    def read(self, line: bytes, source: str) -> T:
        """The header of a line of JSON.

        Raises:
            FileError: if it is none.
        """
        return decoded(line, self.form, source=source)

    def refuse(self, source: str, reason: str) -> NoReturn:
        """Refuse an object.

        Raises:
            FileError: the kind's, always.
        """
        raise self.error(f"{source} can't be used: {reason}")

    def expect(self, header: T, source: str, **fields: Any) -> None:
        """Refuse an object whose header has other values than these.

        Raises:
            FileError: the kind's, naming the first field that differs.
        """
        for name, value in fields.items():
            if (actual := getattr(header, name)) != value:
                self.refuse(source, f"it has {name} {actual}, where {value} is expected")

    def _message(self, line: bytes) -> bytes:
        return self.word.encode() + b"\n" + line


def _head(line: bytes, signature: str) -> bytes:
    """Both lines, padded."""
    head = line + b"\n" + signature.encode()
    return head + b" " * (-(len(head) + 1) % _ALIGNMENT) + b"\n"
