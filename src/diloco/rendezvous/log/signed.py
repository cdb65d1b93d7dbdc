"""The one form of the objects that replicas sign: entries, indexes, payloads, averages.

    {"base":"0123…",…}      the header: compact JSON with sorted keys; this line is what is hashed and signed
    89abcdef…               its Ed25519 signature in hexadecimal, empty without keys, and spaces
    …                       the body, if this kind of object has one

The spaces make both lines together a multiple of 64 bytes, so that FP32 vectors can be read where a body lies.
What is signed begins with the kind's word: a header that was signed as one kind is worth nothing as another.
"""

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec

from diloco.errors import DilocoError, FileError
from diloco.rendezvous.log.keys import Signer, check
from diloco.schema import decoded

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ALIGNMENT = 64


_SIGNATURE = re.compile(r"([0-9a-f]{128})?")


_MOST_SIGNATURE_BYTES = 128 + _ALIGNMENT + 1
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
        return self.most_header_bytes + _MOST_SIGNATURE_BYTES

    def name(self, *numbers: int) -> str:
        """An object's name in the store."""
        return self.place.format(*numbers)

    def line(self, header: T) -> bytes:
        """The JSON of a header."""
        return json.dumps(self.fields(header), separators=(",", ":"), sort_keys=True, allow_nan=False).encode()

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
        return msgspec.to_builtins(header)

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

    def _message(self, line: bytes) -> bytes:
        return self.word.encode() + b"\n" + line


def _head(line: bytes, signature: str) -> bytes:
    """Both lines, padded."""
    head = line + b"\n" + signature.encode()
    return head + b" " * (-(len(head) + 1) % _ALIGNMENT) + b"\n"
