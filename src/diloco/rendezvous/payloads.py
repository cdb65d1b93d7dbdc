"""The payload objects of the store: a signed header, and a codec's payload.

The payload is the object's body. Where a fragment is cut into several shares, each share's payload is an object of
its own, uploaded before: the header lists them, and its object has no body. Whoever decides reads headers alone.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from diloco.files import sha256
from diloco.rendezvous.entries import (
    MOST_NORM,
    MOST_SHARES,
    Checksum,
    Contribution,
    Digest,
    Norm,
    Positive,
)
from diloco.rendezvous.keys import Signer
from diloco.rendezvous.signed import Kind, line_of
from diloco.schema import Count

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KIND = Kind("payload", b"DLP1")
_OfShares = msgspec.Meta(min_length=1, max_length=MOST_SHARES)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts about one payload, by the replica that sent it."""

    run: Digest
    """SHA-256 of the run's entry 0."""
    replica: Count
    seq: Count
    """The number of the payload among its replica's, from 0."""
    fragment: Count
    base_round: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]
    """The round after which Θ_p was what the outer gradient was taken against."""
    base: Checksum
    """Digest of that Θ_p."""
    tokens: Positive
    """Tokens read since the replica's last send of the fragment that was counted."""
    steps: Positive
    """Inner steps since then."""
    position: Count
    """The replica's place in its slot of the text, in tokens."""
    wire: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_:=,.+-]{0,199}\Z")]
    """The codec with its options, as its `format` has them."""
    num_elements: Count
    """N, the length of the outer gradient."""
    num_bytes: Positive
    """Size of each share's payload; with one share, of the body."""
    norms: Annotated[tuple[Norm, ...], _OfShares]
    """For each share ‖Δ‖₂ as decoded."""
    sha256: Annotated[tuple[Digest, ...], _OfShares]
    """For each share the SHA-256 of its payload."""

    def __post_init__(self) -> None:
        """Refuse lists of two lengths, and a norm that no entry may hold."""
        if len(self.norms) != len(self.sha256):
            raise ValueError(f"{len(self.norms)} norms and {len(self.sha256)} digests")
        if self.norm > MOST_NORM:
            raise ValueError(f"the norm of all shares is {self.norm:.4g}, more than {MOST_NORM:.4g}")

    @property
    def name(self) -> str:
        """The payload's name in the store."""
        return name_of(self.replica, self.seq)

    @property
    def num_shares(self) -> int:
        """R."""
        return len(self.sha256)

    @property
    def norm(self) -> float:
        """‖Δ‖₂ of all shares together."""
        return math.hypot(*self.norms)

    def line(self) -> bytes:
        """The padded JSON, which is what is hashed and signed."""
        return line_of(self)


def name_of(replica: int, seq: int, share: int | None = None) -> str:
    """The name of a replica's payload in the store, or of one share of several."""
    return f"payloads/{replica}/{seq:08d}" + ("" if share is None else f"-{share}")


def sealed(header: Header, signer: Signer) -> bytes:
    """The head of a payload object; its body, if there is one share, is uploaded behind it."""
    return _KIND.sealed(header.line(), signer)


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
    line, signature, body = _KIND.split(data, name)
    _KIND.check_signature(public, signature, line, name)
    header = _KIND.header(line, Header, name)
    if header.name != name:
        _KIND.refuse(name, f"it is the payload {header.name}, put in another's place")
    if header.run != run:
        _KIND.refuse(name, f"it is of another run, {header.run:.8}, and this is {run:.8}")
    if header.num_shares == 1:
        check_share(header, 0, body)
    elif body:
        _KIND.refuse(name, f"its shares are objects of their own, and it has a body of {len(body):,} bytes")
    return header, body


def check_share(header: Header, share: int, payload: "Buffer") -> None:
    """Check the length and the digest of the payload of a share.

    Raises:
        PayloadError: naming the object, if they are not the header's.
    """
    name = name_of(header.replica, header.seq, share if header.num_shares > 1 else None)
    whole = memoryview(payload).cast("B")
    if len(whole) != header.num_bytes:
        _KIND.refuse(name, f"its body should have {header.num_bytes:,} bytes, and has {len(whole):,}")
    if sha256(whole) != header.sha256[share]:
        _KIND.refuse(name, "its body does not match the SHA-256 in its header: it was damaged or changed")


def contribution(header: Header) -> Contribution:
    """The place of a payload in an outer entry; `sha256` is that of the header, which holds its shares' own."""
    return Contribution(
        replica=header.replica,
        seq=header.seq,
        sha256=sha256(header.line()),
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
