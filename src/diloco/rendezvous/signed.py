"""Objects of the store with a signed header before their body: payloads, and averages of shares.

    magic | length of the header, uint32 little-endian | signature, 64 bytes | header | body

The signature is zeros without keys. The header is compact JSON, padded with spaces so that the body begins at a
multiple of 64 bytes. It holds the SHA-256 of the body: who hashes or signs the header does so for both.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from diloco.errors import FileError, PayloadError
from diloco.rendezvous.keys import Signer, check
from diloco.schema import decoded

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import Buffer

MOST_HEAD_BYTES = 1 << 17
"""Size of the largest head, which is everything before the body: a header may list 1024 shares."""
_PREFIX = struct.Struct("<4sI64s")
_ALIGNMENT = 64
_UNSIGNED = bytes(64)

_Header = TypeVar("_Header", bound="DataclassInstance")


@dataclass(frozen=True)
class Kind:
    """A kind of such objects: a header that was signed as one kind is worth nothing as another."""

    word: str
    """The kind in errors, and the first line of what is signed."""
    magic: bytes
    """The first four bytes."""

    def sealed(self, line: bytes, signer: Signer) -> bytes:
        """The head of an object with this header; the body is uploaded behind it, as a buffer of its own."""
        assert _PREFIX.size + len(line) <= MOST_HEAD_BYTES, "the fields are bounded"
        signature = bytes.fromhex(signer.sign(self._signed(line))) or _UNSIGNED
        return _PREFIX.pack(self.magic, len(line), signature) + line

    def split(self, data: "Buffer", name: str) -> tuple[bytes, bytes, memoryview]:
        """The header, its signature and the body of an object, from bytes that nobody has checked.

        Raises:
            PayloadError: naming the object, if it is not of this kind, or cut short.
        """
        whole = memoryview(data).cast("B")
        head = bytes(whole[:MOST_HEAD_BYTES])
        if len(head) < _PREFIX.size or head[:4] != self.magic:
            self.refuse(name, "it does not begin as one: it was cut short, damaged, or made by another version")
        _, length, signature = _PREFIX.unpack_from(head)
        start = _PREFIX.size + length
        if start > len(head):
            self.refuse(name, f"its header of {length:,} bytes is cut short, or too long")
        return head[_PREFIX.size : start], signature, whole[start:]

    def check_signature(self, public: str, signature: bytes, line: bytes, name: str) -> None:
        """Check that the holder of a key has signed a header.

        Raises:
            PayloadError: naming the object, if not.
        """
        text = signature.hex() if signature != _UNSIGNED else ""
        try:
            check(public, text, self._signed(line), source=f"{self.word} {name}")
        except FileError as error:
            raise PayloadError(str(error)) from None

    def header(self, line: bytes, form: type[_Header], name: str) -> _Header:
        """A header, from its line.

        Raises:
            PayloadError: naming the object, if `line_of` does not write this line.
        """
        try:
            header = decoded(line, form, source=f"{self.word} {name}")
            is_canonical = line_of(header) == line
        except (FileError, ValueError) as error:
            raise PayloadError(str(error)) from None
        if not is_canonical:
            self.refuse(name, "its header is not in the form in which diloco writes it")
        return header

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Refuse an object.

        Raises:
            PayloadError: always.
        """
        raise PayloadError(f"{self.word} {name} can't be used: {reason}")

    def _signed(self, line: bytes) -> bytes:
        return self.word.encode() + b"\n" + line


def line_of(header: "DataclassInstance") -> bytes:
    """The padded JSON of a header, which is what is hashed and signed."""
    fields: dict[str, Any] = asdict(header)
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return text + b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
