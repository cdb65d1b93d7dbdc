"""The payload objects of the store: a signed header, and a codec's payload, or a share of it, as the body.

    magic "DLP1" | length of the header, uint32 little-endian | signature, 64 bytes | header | body

The signature is zeros without keys. The header is compact JSON, padded with spaces so that the body begins at a
multiple of 64 bytes. It holds the SHA-256 of the body: who hashes or signs the header does so for both.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from diloco.errors import FileError, PayloadError
from diloco.rendezvous.entries import Checksum, Contribution, Digest, Norm, Positive, digest
from diloco.rendezvous.keys import Signer, check
from diloco.schema import Count, decoded

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_HEAD_BYTES = 4096
"""Size of the largest head, which is everything before the body."""
_MAGIC = b"DLP1"
_PREFIX = struct.Struct("<4sI64s")
_ALIGNMENT = 64
_UNSIGNED = bytes(64)
_DOMAIN = b"payload\n"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts about one payload, by the replica that sent it."""

    run: Digest
    """SHA-256 of the run's entry 0."""
    replica: Count
    seq: Count
    """The number of the payload among its replica's, from 0."""
    fragment: Count
    base_round: Count
    """The round after which Θ_p was what the outer gradient was taken against."""
    base: Checksum
    """Checksum of that Θ_p."""
    tokens: Positive
    """Tokens read since the replica's last send of the fragment that was counted."""
    steps: Positive
    """Inner steps since then."""
    position: Count
    """Where the replica stood in its slot of the text, in tokens."""
    wire: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_:=,.+-]{0,199}\Z")]
    """The codec with its options, as its `format` has them."""
    num_elements: Count
    """N, the length of the outer gradient, or of the share."""
    norm: Norm
    """‖Δ‖₂ as decoded."""
    num_bytes: Positive
    """Size of the body."""
    sha256: Digest
    """SHA-256 of the body."""

    @property
    def name(self) -> str:
        """The payload's name in the store."""
        return name_of(self.replica, self.seq)

    def line(self) -> bytes:
        """The padded JSON, which is what is hashed and signed."""
        fields = asdict(self) | {"norm": float(self.norm)}
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        return text + b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)


def name_of(replica: int, seq: int) -> str:
    """The name of a replica's payload in the store."""
    return f"payloads/{replica}/{seq:08d}"


def sealed(header: Header, signer: Signer) -> bytes:
    """The head of a payload object; the body is uploaded behind it, as a buffer of its own."""
    line = header.line()
    assert _PREFIX.size + len(line) <= MOST_HEAD_BYTES, "the fields are bounded"
    signature = bytes.fromhex(signer.sign(_DOMAIN + line)) or _UNSIGNED
    return _PREFIX.pack(_MAGIC, len(line), signature) + line


def opened(data: "Buffer", *, name: str, run: str, public: str) -> tuple[Header, memoryview]:
    """The header and the body of a payload object, from bytes that nobody has checked; the body is not copied.

    Args:
        data: the whole object.
        name: its name in the store.
        run: SHA-256 of the run's entry 0.
        public: the key of its replica; empty in a run without keys.

    Raises:
        PayloadError: naming the object, if it is not what `sealed` writes, with this name, run and key, or the
            body is not the header's.
    """
    whole = memoryview(data).cast("B")
    head = bytes(whole[:MOST_HEAD_BYTES])
    if len(head) < _PREFIX.size or head[:4] != _MAGIC:
        _refuse(name, "it does not begin as a payload: it was cut short, damaged, or made by another version")
    _, length, signature = _PREFIX.unpack_from(head)
    start = _PREFIX.size + length
    if start > len(head):
        _refuse(name, f"its header of {length:,} bytes is cut short, or too long")
    line = head[_PREFIX.size : start]
    try:
        is_signed = signature != _UNSIGNED
        check(public, signature.hex() if is_signed else "", _DOMAIN + line, what=f"payload {name}")
        header = decoded(line, Header, source=f"payload {name}")
        is_canonical = header.line() == line
    except (FileError, ValueError) as error:
        raise PayloadError(str(error)) from None
    if not is_canonical:
        _refuse(name, "its header is not in the form in which diloco writes it")
    if header.name != name:
        _refuse(name, f"it is the payload {header.name}, put in another's place")
    if header.run != run:
        _refuse(name, f"it is of another run, {header.run:.8}, and this is {run:.8}")
    body = whole[start:]
    if len(body) != header.num_bytes:
        _refuse(name, f"its body should have {header.num_bytes:,} bytes, and has {len(body):,}")
    if digest(body) != header.sha256:
        _refuse(name, "its body does not match the SHA-256 in its header: it was damaged or changed")
    return header, body


def contribution(header: Header) -> Contribution:
    """The place of a payload in an outer entry; `sha256` is that of the header, which holds the body's."""
    return Contribution(
        replica=header.replica,
        seq=header.seq,
        sha256=digest(header.line()),
        base_round=header.base_round,
        tokens=header.tokens,
        steps=header.steps,
        position=header.position,
        norm=header.norm,
    )


def body_tensor(body: memoryview) -> Tensor:
    """A body as a flat uint8 tensor on the same memory, which must not be written to."""
    if not body.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(body, np.uint8))))


class _Writable:
    """Memory that NumPy takes for writable: of memory that is not, torch makes a tensor only with a warning."""

    def __init__(self, array: np.ndarray) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}
        self.owner = array


def _refuse(name: str, reason: str) -> NoReturn:
    raise PayloadError(f"payload {name} can't be used: {reason}")
