"""The objects of the store besides entries: payloads, averages of shares, snapshots.

A payload or an average is a signed header, and a codec's payload as the body. Where a fragment is cut into
several shares, each share's payload is an object of its own, uploaded before: the header lists them, and its
object has no body.

    A_r = encode(Σ_m w_m decode(share r of m) / Σ_m w_m)      over the entry's members whose share is sound

An average is a pure function of an outer entry and of the bytes of its members' shares: every member may
compute it, and a later replica can compute it again. The first one stored is used.

A snapshot holds Θ_p and the outer rule's slots after a round, as safetensors bytes, which are a pure function
of the vectors: sorted names, FP32, one length, no metadata.

Shapes: N elements of one fragment, S of a share.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from diloco.errors import FileError, PayloadError
from diloco.rendezvous.log.keys import Signer, check
from diloco.schema import decoded

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import Buffer
import math
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from diloco.files import sha256
from diloco.rendezvous.log.entries import MOST_NORM, MOST_SHARES, Checksum, Contribution, Digest, Norm, Positive
from diloco.schema import Count

if TYPE_CHECKING:
    from typing_extensions import Buffer
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from diloco.wire.payload import is_finite, plain

if TYPE_CHECKING:
    from typing_extensions import Buffer
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.errors import NonFiniteError
from diloco.outer.averages import Average, add_up, cut, join_shares, key_of_average
from diloco.outer.cohort import Cohort
from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.entries import Outer
from diloco.rendezvous.log.run import OuterRef, RunRecord
from diloco.wire.kernels.memory import empty
from diloco.wire.payload import Codec, Key, base_of

if TYPE_CHECKING:
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


_PAYLOAD = Kind("payload", b"DLP1")


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
        return payload_name(self.replica, self.seq)

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


def payload_name(replica: int, seq: int, share: int | None = None) -> str:
    """The name of a replica's payload in the store, or of one share of several."""
    return f"payloads/{replica}/{seq:08d}" + ("" if share is None else f"-{share}")


def seal_payload(header: Header, signer: Signer) -> bytes:
    """The head of a payload object; its body, if there is one share, is uploaded behind it."""
    return _PAYLOAD.sealed(header.line(), signer)


def open_payload(data: "Buffer", *, name: str, run: str, public: str) -> tuple[Header, memoryview]:
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
    line, signature, body = _PAYLOAD.split(data, name)
    _PAYLOAD.check_signature(public, signature, line, name)
    header = _PAYLOAD.header(line, Header, name)
    if header.name != name:
        _PAYLOAD.refuse(name, f"it is the payload {header.name}, put in another's place")
    if header.run != run:
        _PAYLOAD.refuse(name, f"it is of another run, {header.run:.8}, and this is {run:.8}")
    if header.num_shares == 1:
        check_share(header, 0, body)
    elif body:
        _PAYLOAD.refuse(name, f"its shares are objects of their own, and it has a body of {len(body):,} bytes")
    return header, body


def check_share(header: Header, share: int, payload: "Buffer") -> None:
    """Check the length and the digest of the payload of a share.

    Raises:
        PayloadError: naming the object, if they are not the header's.
    """
    name = payload_name(header.replica, header.seq, share if header.num_shares > 1 else None)
    whole = memoryview(payload).cast("B")
    if len(whole) != header.num_bytes:
        _PAYLOAD.refuse(name, f"its body should have {header.num_bytes:,} bytes, and has {len(whole):,}")
    if sha256(whole) != header.sha256[share]:
        _PAYLOAD.refuse(name, "its body does not match the SHA-256 in its header: it was damaged or changed")


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


_MOST_VECTORS = 16


_MOST_HEAD_BYTES = 1 << 14


_LENGTH = struct.Struct("<Q")


_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]


class SnapshotError(FileError):
    """A snapshot is damaged, forged, or of another model or outer rule."""


def snapshot_name(fragment: int, round: int, sha256: str) -> str:
    """The name of a snapshot in the store.

    Args:
        fragment: p.
        round: outer steps of the fragment so far.
        sha256: of the object.
    """
    return f"snapshots/{fragment}/{round}-{sha256}"


def most_snapshot_bytes(num_elements: int) -> int:
    """Size of the largest snapshot of N elements that is read."""
    return _MOST_HEAD_BYTES + _MOST_VECTORS * 4 * num_elements


def seal_snapshot(vectors: Mapping[str, Tensor]) -> tuple[list[memoryview], str]:
    """The buffers of a snapshot, to be uploaded one after another, and the SHA-256 of all.

    Args:
        vectors: by name: Θ_p as `outer`, and the outer rule's slots; flat FP32 (N). On a CPU their memory is not
            copied: it must not change until the upload is over.
    """
    (num_elements,) = {vector.numel() for vector in vectors.values()}
    assert len(vectors) <= _MOST_VECTORS, "an outer rule has few slots"
    assert all(vector.dtype == torch.float32 and vector.dim() == 1 for vector in vectors.values())
    contents = (vectors[name].detach().cpu().contiguous().view(torch.uint8) for name in sorted(vectors))
    buffers = [memoryview(_head(vectors, num_elements)), *(vector.numpy().data for vector in contents)]
    return buffers, sha256(*buffers)


def open_snapshot(data: "Buffer", *, name: str, num_elements: int) -> dict[str, Tensor]:
    """The vectors of a snapshot, from bytes that nobody has checked, on the same memory: not to be written to.

    Args:
        data: the object.
        name: the object's, which ends with its SHA-256.
        num_elements: N.

    Raises:
        SnapshotError: naming the object, if the bytes are not those of its name, are not what `sealed` writes for
            vectors of N elements, or hold NaN or an infinity.
    """
    whole = memoryview(data).cast("B")
    if sha256(whole) != name[-64:]:
        _refuse(name, "it does not match the SHA-256 in its name: it was cut short, damaged or changed")
    names = _names(whole, name)
    head = _head(names, num_elements)
    if whole.nbytes != len(head) + len(names) * 4 * num_elements or whole[: len(head)] != head:
        _refuse(name, f"it does not hold FP32 vectors of {num_elements:,} elements: it is of another model")
    vectors: dict[str, Tensor] = {}
    for index, key in enumerate(names):
        start = len(head) + index * 4 * num_elements
        content = plain(body_tensor(whole[start : start + 4 * num_elements]), torch.device("cpu"))
        vectors[key] = content.view(torch.float32)
        if not is_finite(vectors[key]):
            _refuse(name, f"its vector {key} holds NaN or an infinity")
    return vectors


def read_into(vectors: Mapping[str, Tensor], data: "Buffer", *, name: str) -> None:
    """Copy a snapshot into vectors on any device; they change only if all of it is sound.

    Args:
        vectors: as for `sealed`.
        data: the object.
        name: the object's, which ends with its SHA-256.

    Raises:
        SnapshotError: as `opened`, and if it holds vectors of other names.
    """
    (num_elements,) = {vector.numel() for vector in vectors.values()}
    saved = open_snapshot(data, name=name, num_elements=num_elements)
    if saved.keys() != vectors.keys():
        ours, theirs = ", ".join(sorted(vectors)), ", ".join(saved)
        _refuse(name, f"it holds {theirs}, and this run's outer rule needs {ours}: take the same outer rule")
    for key, vector in vectors.items():
        vector.copy_(saved[key])


def _names(whole: memoryview, name: str) -> list[str]:
    """The names of the vectors in a snapshot, in order."""
    length = _LENGTH.unpack_from(whole)[0] if whole.nbytes >= _LENGTH.size else 0
    if not 0 < length <= min(_MOST_HEAD_BYTES - _LENGTH.size, whole.nbytes - _LENGTH.size):
        _refuse(name, "it does not begin as a snapshot")
    header = bytes(whole[_LENGTH.size : _LENGTH.size + length])
    try:
        names = sorted(decoded(header, dict[_Name, dict[str, Any]], source=name))
    except FileError as error:
        raise SnapshotError(str(error)) from None
    if not 0 < len(names) <= _MOST_VECTORS:
        _refuse(name, f"it has {len(names)} vectors")
    return names


def _head(names: Iterable[str], num_elements: int) -> bytes:
    """The length of the header, uint64 little-endian, and the header, padded to a multiple of 8 bytes."""
    size = 4 * num_elements
    entries = {
        name: {"dtype": "F32", "shape": [num_elements], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(sorted(names))
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _refuse(name: str, reason: str) -> NoReturn:
    raise SnapshotError(f"{name} can't be used: {reason}")


_TOLERANCE = 1e-3
"""Largest relative difference between a norm in a header and the norm of the decoded values."""


_ELEMENTS_AT_ONCE = 1 << 18
"""Elements of a piece, whose squares in FP64 stay in a cache."""


def check_header(header: Header, *, form: Form, fragment: int, replica: int) -> None:
    """Check that a header describes an outer gradient of the run.

    Args:
        header: as `payloads.opened` gives it.
        form: the run's.
        fragment: from which a payload is expected.
        replica: the same.

    Raises:
        PayloadError: naming the payload, if it is of another fragment, replica, codec or length, or is cut into
            another number of shares.
    """
    expected = {
        "fragment": fragment,
        "replica": replica,
        "wire": form.codec.format,
        "num_elements": form.sizes[fragment],
        "num_shares": form.num_shares,
        "num_bytes": form.share_bytes(fragment),
    }
    for field, value in expected.items():
        if (actual := getattr(header, field)) != value:
            raise PayloadError(f"payload {header.name} has {field} {actual}, where {value} is expected")


def verified(
    header: Header, payload: Tensor, *, form: Form, share: int = 0, scratch_N: Tensor | None = None
) -> float:
    """The norm of the outer gradient, or of the share of it, that a payload stands for, after all checks.

    Args:
        header: after `check_header`.
        payload: flat uint8, after `payloads.check_share`.
        form: the run's.
        share: its index.
        scratch_N: a flat FP32 vector that is overwritten with the decoded values; left out, one is made.

    Raises:
        PayloadError: naming the payload, if it is damaged, holds NaN or an infinity, or its norm is not the
            header's.
    """
    name = payload_name(header.replica, header.seq, share if form.num_shares > 1 else None)
    source, size = f"payload {name}", form.share_size(header.fragment)
    to_S = empty(size, torch.float32, torch.device("cpu")) if scratch_N is None else scratch_N[:size]
    key = form.key(header.fragment, header.base_round, header.replica, share)
    norm = checked_norm(form.codec, payload, to_S, key, source=source, norm=header.norms[share])
    if (base := base_of(payload)) and base != int(header.base, 16):
        raise PayloadError(
            f"{source} was taken against the outer parameters {base:016x}, and its header says {header.base}"
        )
    return norm


def checked_norm(codec: Codec, payload: Tensor, to_S: Tensor, key: Key, *, source: str, norm: float) -> float:
    """The norm of the values that a payload stands for.

    Args:
        codec: of the payload.
        payload: flat uint8.
        to_S: a vector that is overwritten with the values, flat FP32 (S).
        key: of the payload.
        source: the payload in words, for errors.
        norm: the norm in its header.

    Raises:
        PayloadError: if it is no payload of the codec and of S elements, is damaged, holds NaN or an infinity, or
            has another norm.
    """
    try:
        codec.decode_into(to_S, payload, key)
    except PayloadError as error:
        raise PayloadError(f"{source}: {error}") from None
    actual = norm_of(to_S)
    if not math.isfinite(actual):
        raise PayloadError(f"{source} holds NaN or an infinity")
    if not math.isclose(actual, norm, rel_tol=_TOLERANCE):
        raise PayloadError(f"{source} has the norm {actual:.6g}, and its header says {norm:.6g}")
    return actual


def norm_of(vector_N: Tensor) -> float:
    """‖vector‖₂, summed in FP64: no finite FP32 vector makes it infinite."""
    pieces = vector_N.split(_ELEMENTS_AT_ONCE)
    return math.sqrt(math.fsum(float(piece.double().square_().sum()) for piece in pieces))


def norms_of(decoded_N: Tensor, form: Form, *, source: str) -> tuple[float, ...]:
    """‖Δ‖₂ of each share of an own outer gradient.

    Args:
        decoded_N: as its payloads stand for it, flat FP32.
        form: the run's.
        source: the outer gradient in words, for errors.

    Raises:
        NonFiniteError: if all shares together have a norm that no run can add up.
    """
    norms = tuple(norm_of(share_S.cpu()) for share_S in cut(decoded_N, form.num_shares))
    if (norm := math.hypot(*norms)) > MOST_NORM:
        raise NonFiniteError(
            f"{source} has the norm {norm:.3g}, and the run takes none above {MOST_NORM:g}: this replica's "
            "training has diverged; it was not sent"
        )
    return norms


_AVERAGE = Kind("average", b"DLA1")


@dataclass(frozen=True, kw_only=True)
class AverageHeader:
    """The facts about the average of one share, by the replica that made it."""

    run: Digest
    """SHA-256 of the run's entry 0."""
    entry: Count
    """The number of the outer entry."""
    share: Count
    replica: Count
    left_out: tuple[Count, ...]
    """The entry's members whose share was not sound, ascending."""
    wire: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_:=,.+-]{0,199}\Z")]
    """The second codec with its options, as its `format` has them."""
    num_elements: Count
    """S."""
    norm: Annotated[float, msgspec.Meta(ge=0, le=1e38)]
    """‖A_r‖₂ as decoded: the second codec may round it up, above the members' norms."""
    num_bytes: Positive
    """Size of the body."""
    sha256: Digest
    """SHA-256 of the body."""


def average_name(entry: int, share: int) -> str:
    """The name of the average of a share in the store."""
    return f"averages/{entry:010d}/{share}"


def most_average_bytes(form: Form, fragment: int) -> int:
    """Size of the largest object of an average that is read."""
    return MOST_HEAD_BYTES + form.average_bytes(fragment)


def second_codec(form: Form) -> Codec:
    """The codec of the averages."""
    assert form.second is not None, "a fragment is cut into shares"
    return form.second


def average_of(
    state: RunRecord, form: Form, body: Outer, share: int, payloads: Mapping[int, Tensor]
) -> tuple[Tensor, float]:
    """The payload of the average of a share, and its norm as decoded; no sum of members' norms overflows.

    Args:
        state: of the run, whose rules give the weights.
        form: of its payloads.
        body: the outer step.
        share: its index.
        payloads: of the share, by member, flat uint8, verified; of the members whose share is sound.
    """
    size, second = form.share_size(body.fragment), second_codec(form)
    average_S = torch.zeros(size)
    if counted := [c for c in body.contributions if c.replica in payloads]:
        keys = [form.key(body.fragment, c.base_round, c.replica, share) for c in counted]
        average_S = add_up(form.codec, payloads, average_S, keys, state.cohort(counted)).divided()
    key = _key(form, body.fragment, body.round, state.cohort(body.contributions))._replace(part=share)
    payload = second.encode(average_S, key)
    return payload, norm_of(second.decode_into(average_S, payload, key))


def join_averages(
    form: Form, fragment: int, last_round: int, cohort: Cohort, averages: Sequence[Tensor], to_N: Tensor
) -> Average:
    """Δ_p of a round, from the averages of all its shares; the total is written to `to_N`."""
    key = _key(form, fragment, last_round, cohort)
    return Average(join_shares(second_codec(form), averages, to_N, key), 1.0)


def seal_average(header: AverageHeader, signer: Signer) -> bytes:
    """The head of an average's object; its body is uploaded behind it."""
    return _AVERAGE.sealed(line_of(header), signer)


def header_of(
    state: RunRecord,
    form: Form,
    ref: OuterRef,
    share: int,
    payload: Tensor,
    *,
    norm: float,
    replica: int,
    left_out: Iterable[int],
) -> AverageHeader:
    """The header of an average that `average_of` has made."""
    return AverageHeader(
        run=state.run,
        entry=ref.number,
        share=share,
        replica=replica,
        left_out=tuple(sorted(left_out)),
        wire=second_codec(form).format,
        num_elements=form.share_size(ref.body.fragment),
        norm=norm,
        num_bytes=payload.numel(),
        sha256=sha256(payload.numpy().data),
    )


def open_average(
    data: "Buffer", *, state: RunRecord, form: Form, ref: OuterRef, share: int
) -> tuple[AverageHeader, Tensor]:
    """The header and the payload of an average, from bytes that nobody has checked; the payload is not copied.

    Args:
        data: the whole object.
        state: of the run.
        form: of its payloads.
        ref: the outer entry.
        share: the index of the share.

    Raises:
        PayloadError: naming the object, if it is not by a member of the entry, of another run, entry, share, codec
            or length, is damaged, or its norm is not its header's, or more than the entry's members can have made.
    """
    name = average_name(ref.number, share)
    line, signature, body = _AVERAGE.split(data, name)
    header = _AVERAGE.header(line, AverageHeader, name)
    members = [c.replica for c in ref.body.contributions]
    if header.replica not in members:
        _AVERAGE.refuse(name, f"it is by replica {header.replica}, which is not in the outer step")
    _AVERAGE.check_signature(state.members[header.replica].key, signature, line, name)
    size, second = form.share_size(ref.body.fragment), second_codec(form)
    expected = {
        "run": state.run,
        "entry": ref.number,
        "share": share,
        "left_out": tuple(member for member in members if member in header.left_out),
        "wire": second.format,
        "num_elements": size,
        "num_bytes": form.average_bytes(ref.body.fragment),
    }
    for field, value in expected.items():
        if (actual := getattr(header, field)) != value:
            _AVERAGE.refuse(name, f"it has {field} {actual}, where {value} is expected")
    if len(body) != header.num_bytes or sha256(body) != header.sha256:
        _AVERAGE.refuse(name, "its body does not match its header: it was cut short, damaged or changed")
    key = _key(form, ref.body.fragment, ref.body.round, state.cohort(ref.body.contributions))._replace(part=share)
    payload, to_S = body_tensor(body), empty(size, torch.float32, torch.device("cpu"))
    checked_norm(second, payload, to_S, key, source=f"average {name}", norm=header.norm)
    most = state.rules.norm_bound * max(c.norm for c in ref.body.contributions)
    if header.norm > most:
        _AVERAGE.refuse(name, f"its norm is {header.norm:.4g}, more than {most:.4g}")
    return header, payload


def _key(form: Form, fragment: int, last_round: int, cohort: Cohort) -> Key:
    return key_of_average(Key(form.seed, fragment, last_round), cohort)
