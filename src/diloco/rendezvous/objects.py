"""The objects of the store besides entries, and the one way to fetch them: payloads, averages, snapshots.

A payload or an average is a signed header, and a codec's payload as the body. Where a fragment is cut into several
shares, each share's payload is an object of its own, uploaded before: the header lists them, and its object has no
body.

    A_r = encode(Σ_m w_m decode(share r of m) / Σ_m w_m)      over the entry's members whose share is sound

An average is a pure function of an outer entry and of the bytes of its members' shares: every member may compute
it, and a later replica can compute it again. The first one stored is used.

A snapshot holds Θ_p and the outer rule's slots after a round, as safetensors bytes, which are a pure function of
the vectors: sorted names, FP32, one length, no metadata. Its name holds its digest, and a signed entry names that.

Shapes: N elements of one fragment, S of a share.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from diloco.errors import FileError, NonFiniteError, PayloadError
from diloco.files import safetensors_head, safetensors_json, sha256
from diloco.outer.averages import Average, add_up, cut, join_shares, key_of_average, weigh_in
from diloco.outer.cohort import Cohort
from diloco.rendezvous.contract import Content, Decision, Form, Payload, StoredSnapshot
from diloco.rendezvous.log.entries import (
    MOST_NORM,
    MOST_SHARES,
    Checksum,
    Claim,
    Contribution,
    Digest,
    LogError,
    Norm,
    Outer,
    Positive,
)
from diloco.rendezvous.log.keys import Signed
from diloco.rendezvous.log.log import FOR_EVER, source_of
from diloco.rendezvous.log.run import OuterRef, RunState, SnapshotRef
from diloco.rendezvous.store import BadObjectError, Store
from diloco.schema import Count, decoded
from diloco.wire.kernels.memory import empty, widest
from diloco.wire.payload import Codec, Key, base_of, is_finite, plain

if TYPE_CHECKING:
    from typing_extensions import Buffer

_T = TypeVar("_T")
_MOST_HEADER_BYTES = 1 << 17
"""Length of the longest header: it may list 1024 shares."""
_OfShares = msgspec.Meta(min_length=1, max_length=MOST_SHARES)
_Wire = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_:=,.+-]{0,199}\Z")]
"""A codec with its options, as its `format` has them."""


@dataclass(frozen=True, kw_only=True)
class Header(Claim):
    """The facts about one payload, by the replica that sent it."""

    run: Digest
    """SHA-256 of the run's entry 0."""
    fragment: Count
    base: Checksum
    """Digest of the Θ_p that the outer gradient was taken against."""
    wire: _Wire
    num_elements: Count
    """N, the length of the outer gradient."""
    num_bytes: Positive
    """Size of each share's payload; with one share, of the body."""
    norms: Annotated[tuple[Norm, ...], _OfShares]
    """For each share ‖Δ‖₂ as decoded."""
    sha256: Annotated[tuple[Digest, ...], _OfShares]
    """For each share the SHA-256 of its payload."""

    def __post_init__(self) -> None:
        if len(self.norms) != len(self.sha256):
            raise ValueError(f"{len(self.norms)} norms and {len(self.sha256)} digests")
        if self.norm > MOST_NORM:
            raise ValueError(f"the norm of all shares is {self.norm:.4g}, more than {MOST_NORM:.4g}")

    @property
    def name(self) -> str:
        """The payload's name in the store."""
        return PAYLOAD.name(self.replica, self.seq)

    def share_name(self, share: int) -> str:
        """The name of a share's object in the store; of the only share, it is the payload's."""
        return f"{self.name}-{share}" if self.num_shares > 1 else self.name

    @property
    def num_shares(self) -> int:
        """R."""
        return len(self.sha256)

    @property
    def norm(self) -> float:
        """‖Δ‖₂ of all shares together."""
        return math.hypot(*self.norms)

    def contribution(self) -> Contribution:
        """The payload in an outer entry; `sha256` is that of the header's line, which holds its shares' own."""
        claim = {name: getattr(self, name) for name in Claim.__dataclass_fields__}
        return Contribution(**claim, sha256=sha256(PAYLOAD.line(self)), norm=self.norm)


PAYLOAD = Signed(
    word="payload",
    place="payloads/{}/{:08d}",
    form=Header,
    most_header_bytes=_MOST_HEADER_BYTES,
    has_body=True,
    error=PayloadError,
)


def open_payload(data: "Buffer", *, name: str, run: str, public: str) -> tuple[Header, memoryview]:
    """The header and the body of a payload's object, from bytes that nobody has checked; the body is not copied.

    Args:
        data: the whole object.
        name: its name in the store.
        run: SHA-256 of the run's entry 0.
        public: the key of its replica; empty in a run without keys.

    Raises:
        PayloadError: naming the object, if it is not what `PAYLOAD.seal` writes, with this name, run and key, or
            the body is not the header's.
    """
    source = f"payload {name}"
    opened = PAYLOAD.open(data, source)
    PAYLOAD.check(opened, public, source)
    header, body = opened.header, opened.body
    if header.name != name:
        PAYLOAD.refuse(source, f"it is the payload {header.name}, put in another's place")
    if header.run != run:
        PAYLOAD.refuse(source, f"it is of another run, {header.run:.8}, and this is {run:.8}")
    if header.num_shares == 1:
        check_share(header, 0, body)
    elif body:
        PAYLOAD.refuse(source, f"its shares are objects of their own, and it has a body of {len(body):,} bytes")
    return header, body


def check_share(header: Header, share: int, payload: "Buffer") -> None:
    """Check the length and the digest of the payload of a share.

    Raises:
        PayloadError: naming the object, if they are not the header's.
    """
    whole, source = memoryview(payload).cast("B"), f"payload {header.share_name(share)}"
    if len(whole) != header.num_bytes:
        PAYLOAD.refuse(source, f"its body should have {header.num_bytes:,} bytes, and has {len(whole):,}")
    if sha256(whole) != header.sha256[share]:
        PAYLOAD.refuse(source, "its body does not match the SHA-256 in its header: it was damaged or changed")


def check_header(header: Header, form: Form) -> None:
    """Check that a header describes an outer gradient of the run.

    Raises:
        PayloadError: naming the payload, if it is of no fragment of the run, of another codec or length, or is cut
            into another number of shares.
    """
    source = f"payload {header.name}"
    if header.fragment >= len(form.sizes):
        PAYLOAD.refuse(source, f"it is of fragment {header.fragment}, and there are {len(form.sizes)}")
    PAYLOAD.expect(
        header,
        source,
        wire=form.codec.format,
        num_elements=form.sizes[header.fragment],
        num_shares=form.num_shares,
        num_bytes=form.share_bytes(header.fragment),
    )


def checked_values(
    header: Header, payload: Tensor, form: Form, share: int = 0, to_S: Tensor | None = None
) -> Tensor:
    """The values of an outer gradient, or of a share of it, flat FP32 (S), after all checks of its payload.

    Args:
        header: after `check_header`.
        payload: flat uint8, after `check_share`.
        form: the run's.
        share: its index.
        to_S: a vector that is overwritten with the values; left out, one is made.

    Raises:
        PayloadError: naming the payload, if it is damaged, holds NaN or an infinity, or its norm or base is not
            the header's.
    """
    source, size = f"payload {header.share_name(share)}", form.share_size(header.fragment)
    to_S = empty(size, torch.float32, torch.device("cpu")) if to_S is None else to_S[:size]
    key = form.key(header.fragment, header.base_round, header.replica, share)
    _decode(form.codec, payload, to_S, key, source=source, norm=header.norms[share])
    if (base := base_of(payload)) and base != int(header.base, 16):
        raise PayloadError(
            f"{source} was taken against the outer parameters {base:016x}, and its header says {header.base}"
        )
    return to_S


_TOLERANCE = 1e-3
"""Largest relative difference between a norm in a header and the norm of the decoded values."""
_ELEMENTS_AT_ONCE = 1 << 18
"""Elements of a piece, whose squares in FP64 stay in a cache."""


def _decode(codec: Codec, payload: Tensor, to_S: Tensor, key: Key, *, source: str, norm: float) -> None:
    """Write the values of a payload, which are finite and have the norm in its header."""
    try:
        codec.decode_into(to_S, payload, key)
    except PayloadError as error:
        raise PayloadError(f"{source}: {error}") from None
    actual = norm_of(to_S)
    if not math.isfinite(actual):
        raise PayloadError(f"{source} holds NaN or an infinity")
    if not math.isclose(actual, norm, rel_tol=_TOLERANCE):
        raise PayloadError(f"{source} has the norm {actual:.6g}, and its header says {norm:.6g}")


def norm_of(vector_N: Tensor) -> float:
    """‖vector‖₂, summed in FP64: no finite FP32 vector makes it infinite."""
    has_fp64 = widest(vector_N.device) == torch.float64
    pieces = (vector_N if has_fp64 else vector_N.cpu()).split(_ELEMENTS_AT_ONCE)
    return math.sqrt(math.fsum(torch.stack([piece.double().square_().sum() for piece in pieces]).tolist()))


def norms_of(decoded_N: Tensor, form: Form, *, source: str) -> tuple[float, ...]:
    """‖Δ‖₂ of each share of an own outer gradient.

    Args:
        decoded_N: as its payloads stand for it, flat FP32 (N).
        form: the run's.
        source: the outer gradient in words, for errors.

    Raises:
        NonFiniteError: if all shares together have a norm that no run can add up.
    """
    norms = tuple(map(norm_of, cut(decoded_N, form.num_shares)))
    if (norm := math.hypot(*norms)) > MOST_NORM:
        raise NonFiniteError(
            f"{source} has the norm {norm:.3g}, and the run takes none above {MOST_NORM:g}: this replica's "
            "training has diverged; it was not sent"
        )
    return norms


def body_tensor(body: memoryview) -> Tensor:
    """A body as a flat uint8 tensor on the same memory, which must not be written to."""
    if not body.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.asarray(_Writable(np.frombuffer(body, np.uint8))))


class _Writable:
    """The memory, declared writable: torch warns where it makes a tensor of read-only memory."""

    def __init__(self, array: np.ndarray) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}
        self.owner = array


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
    wire: _Wire
    num_elements: Count
    """S."""
    norm: Annotated[float, msgspec.Meta(ge=0, le=1e38)]
    """‖A_r‖₂ as decoded: the second codec may round it up, above the members' norms."""
    num_bytes: Positive
    """Size of the body."""
    sha256: Digest
    """SHA-256 of the body."""


AVERAGE = Signed(
    word="average",
    place="averages/{:010d}/{}",
    form=AverageHeader,
    most_header_bytes=_MOST_HEADER_BYTES,
    has_body=True,
    error=PayloadError,
)


class MadeAverage(NamedTuple):
    """An average that was made here."""

    payload: Tensor
    """Flat uint8."""
    values: Tensor
    """Flat FP32 (S), as decoded."""
    norm: float
    """‖A_r‖₂."""
    unsound: dict[int, str]
    """The members that it leaves out, and why."""


def average_of(
    state: RunState, form: Form, body: Outer, share: int, shares: Mapping[int, tuple[Header, Tensor]]
) -> MadeAverage:
    """The average of a share over the members whose share is sound; no sum of members' norms overflows.

    Each share is decoded once, to be checked and to be added up; again if one is not sound.

    Args:
        state: of the run, whose rules give the weights.
        form: of its payloads.
        body: the outer step.
        share: its index.
        shares: by member its header and the share's payload, flat uint8, after `check_share`.
    """
    size, codec = form.share_size(body.fragment), _second(form)
    sound, unsound = {c.replica: c for c in body.contributions if c.replica in shares}, dict[int, str]()
    average_S, part_S = (torch.zeros(size, dtype=torch.float32, device="cpu") for _ in range(2))
    while sound:
        cohort, member = state.cohort(sound.values()), -1
        try:
            for member, weight in zip(cohort.members, cohort.weights, strict=True):
                checked_values(*shares[member], form, share, part_S)
                weigh_in(average_S, part_S, weight, is_first=member == cohort.members[0])
        except PayloadError as error:
            unsound[member] = str(error)
            del sound[member]
            average_S.zero_()
        else:
            average_S = Average(average_S, cohort.total_weight).divided()
            break
    key = _key(form, body.fragment, body.round, state.cohort(body.contributions))._replace(part=share)
    payload = codec.encode(average_S, key)
    values_S = codec.decode_into(part_S, payload, key)
    return MadeAverage(payload, values_S, norm_of(values_S), unsound)


def decided_average(form: Form, decision: Decision, content: Content, to_N: Tensor) -> Average:
    """Δ_p, added up in the members' order from their payloads, or joined from the averages of its shares.

    Values that are known are not decoded again.

    Args:
        form: of the run's payloads.
        decision: the outer step.
        content: its content.
        to_N: the total, flat FP32 (N), which is overwritten.
    """
    if content.averages:
        key = _key(form, decision.fragment, decision.round, decision.cohort)
        data, known = [x.data for x in content.averages], [x.values for x in content.averages]
        return Average(join_shares(_second(form), data, to_N, key, values=known), 1.0)
    payloads = {member: payload.data for member, payload in content.payloads.items()}
    values = {m: values_N for m, payload in content.payloads.items() if (values_N := payload.values) is not None}
    return add_up(form.codec, payloads, to_N, decision.keys(form), decision.cohort, values)


def header_of(
    state: RunState,
    form: Form,
    ref: OuterRef,
    share: int,
    made: MadeAverage,
    *,
    replica: int,
    left_out: Iterable[int],
) -> AverageHeader:
    """The header of an average that a replica has made."""
    return AverageHeader(
        run=state.run,
        entry=ref.number,
        share=share,
        replica=replica,
        left_out=tuple(sorted(left_out)),
        wire=_second(form).format,
        num_elements=form.share_size(ref.body.fragment),
        norm=made.norm,
        num_bytes=made.payload.numel(),
        sha256=sha256(made.payload.numpy().data),
    )


def open_average(
    data: "Buffer", *, state: RunState, form: Form, ref: OuterRef, share: int
) -> tuple[AverageHeader, Payload]:
    """The header, the payload and the values of an average, from bytes that nobody has checked.

    Args:
        data: the whole object; the payload lies on its memory.
        state: of the run.
        form: of its payloads.
        ref: the outer entry.
        share: the index of the share.

    Raises:
        PayloadError: naming the object, if it is not by a member of the entry, of another run, entry, share, codec
            or length, is damaged, or its norm is not its header's, or more than the entry's members can have made.
    """
    source = f"average {AVERAGE.name(ref.number, share)}"
    opened, members = AVERAGE.open(data, source), [c.replica for c in ref.body.contributions]
    header, body = opened.header, opened.body
    if header.replica not in members:
        AVERAGE.refuse(source, f"it is by replica {header.replica}, which is not in the outer step")
    AVERAGE.check(opened, state.members[header.replica].key, source)
    size, second = form.share_size(ref.body.fragment), _second(form)
    AVERAGE.expect(
        header,
        source,
        run=state.run,
        entry=ref.number,
        share=share,
        left_out=tuple(member for member in members if member in header.left_out),
        wire=second.format,
        num_elements=size,
        num_bytes=form.average_bytes(ref.body.fragment),
    )
    if len(body) != header.num_bytes or sha256(body) != header.sha256:
        AVERAGE.refuse(source, "its body does not match its header: it was cut short, damaged or changed")
    key = _key(form, ref.body.fragment, ref.body.round, state.cohort(ref.body.contributions))._replace(part=share)
    payload, to_S = body_tensor(body), empty(size, torch.float32, torch.device("cpu"))
    _decode(second, payload, to_S, key, source=source, norm=header.norm)
    most = state.rules.norm_bound * max(c.norm for c in ref.body.contributions)
    if header.norm > most:
        AVERAGE.refuse(source, f"its norm is {header.norm:.4g}, more than {most:.4g}")
    return header, Payload(payload, to_S)


def _second(form: Form) -> Codec:
    """The codec of the averages."""
    assert form.second is not None, "a fragment is cut into shares"
    return form.second


def _key(form: Form, fragment: int, last_round: int, cohort: Cohort) -> Key:
    return key_of_average(Key(form.seed, fragment, last_round), cohort)


_MOST_VECTORS = 16
_MOST_SNAPSHOT_HEAD_BYTES = 1 << 14
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
    return _MOST_SNAPSHOT_HEAD_BYTES + _MOST_VECTORS * 4 * num_elements


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
    buffers = [memoryview(_snapshot_head(vectors, num_elements)), *(vector.numpy().data for vector in contents)]
    return buffers, sha256(*buffers)


def open_snapshot(data: "Buffer", *, name: str, num_elements: int) -> dict[str, Tensor]:
    """The vectors of a snapshot, from bytes that nobody has checked, on the same memory: not to be written to.

    Args:
        data: the object.
        name: the object's, which ends with its SHA-256.
        num_elements: N.

    Raises:
        SnapshotError: naming the object, if the bytes are not those of its name, are not what `seal_snapshot`
            writes for vectors of N elements, or hold NaN or an infinity.
    """
    whole = memoryview(data).cast("B")
    if sha256(whole) != name[-64:]:
        _refuse(name, "it does not match the SHA-256 in its name: it was cut short, damaged or changed")
    names = _vector_names(whole, name)
    head = _snapshot_head(names, num_elements)
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


def _vector_names(whole: memoryview, name: str) -> list[str]:
    """The names of the vectors in a snapshot, in order."""
    if (header := safetensors_json(whole, most_bytes=_MOST_SNAPSHOT_HEAD_BYTES - 8)) is None:
        _refuse(name, "it does not begin as a snapshot")
    try:
        names = sorted(decoded(header, dict[_Name, dict[str, Any]], source=name))
    except FileError as error:
        raise SnapshotError(str(error)) from None
    if not 0 < len(names) <= _MOST_VECTORS:
        _refuse(name, f"it has {len(names)} vectors")
    return names


def _snapshot_head(names: Iterable[str], num_elements: int) -> bytes:
    return safetensors_head((name, "F32", (num_elements,), 4 * num_elements) for name in sorted(names))


def _refuse(name: str, reason: str) -> NoReturn:
    raise SnapshotError(f"{name} can't be used: {reason}")


class Fetched(NamedTuple):
    """A payload from the store, after all checks."""

    header: Header
    payload: Payload | None
    """The bytes and the values; None if its shares are objects."""


@dataclass(frozen=True, kw_only=True)
class Objects:
    """Downloads, checks and decodes the objects of a run: for a running replica, and for a replay."""

    store: Store
    form: Form
    """The form of payloads."""
    run: str
    """SHA-256 of the run's entry 0."""
    patience_seconds: float = FOR_EVER
    _working: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def work(self, function: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        """The result of a function that computes, in another thread, one at a time."""
        async with self._working:
            return await asyncio.to_thread(function, *arguments, **keywords)

    async def payload(self, replica: int, seq: int, public: str) -> "Fetched | None":
        """A payload; None if it is not there.

        Raises:
            PayloadError: naming the payload, if it is not sound.
            BadObjectError: if it is larger than a payload of the run.
        """
        form, name = self.form, PAYLOAD.name(replica, seq)
        is_whole = form.num_shares == 1
        most = PAYLOAD.most_head_bytes
        most += max(map(form.share_bytes, range(len(form.sizes)))) if is_whole else 0
        if (data := await self._get(name, most)) is None:
            return None

        def checked() -> Fetched:
            header, body = open_payload(data, name=name, run=self.run, public=public)
            check_header(header, form)
            payload = body_tensor(body)
            values_N = checked_values(header, payload, form) if is_whole else None
            return Fetched(header, Payload(payload, values_N) if is_whole else None)

        return await self.work(checked)

    async def counted(
        self, ref: OuterRef, part: Contribution, fetching: "Awaitable[Fetched | None]"
    ) -> "Fetched | None":
        """A payload that an outer entry counts; None if it is not there.

        Args:
            ref: the entry.
            part: its contribution.
            fetching: gives what `payload` gives.

        Raises:
            LogError: if what lies in the store is not sound, or not what was counted.
        """
        try:
            fetched = await fetching
        except (PayloadError, BadObjectError) as error:
            raise LogError(f"{source_of(ref.number)} counts a payload that is not sound: {error}") from None
        if fetched is not None and (fetched.header.fragment, fetched.header.contribution()) != (
            ref.body.fragment,
            part,
        ):
            raise LogError(f"{source_of(ref.number)} does not count {fetched.header.name} as it lies in the store")
        return fetched

    async def share(self, header: Header, share: int) -> Tensor:
        """The payload of a share with the digest in its header, flat uint8; `average_of` decodes and checks it.

        Raises:
            PayloadError: naming it, if it is not there, or not the header's.
        """
        name = header.share_name(share)
        try:
            data = await self._get(name, header.num_bytes)
        except BadObjectError as error:
            raise PayloadError(str(error)) from None
        if data is None:
            raise AbsentError(f"payload {name} is not in the store")
        await self.work(check_share, header, share, data)
        return body_tensor(memoryview(data))

    async def average(self, state: RunState, ref: OuterRef, share: int) -> tuple[AverageHeader, Payload] | None:
        """The average of a share; None if it is not there.

        Raises:
            LogError: if it is not sound.
        """
        most = AVERAGE.most_head_bytes + self.form.average_bytes(ref.body.fragment)
        data = await self._get(AVERAGE.name(ref.number, share), most)
        return None if data is None else await self.opened_average(data, state, ref, share)

    async def opened_average(
        self, data: "Buffer", state: RunState, ref: OuterRef, share: int
    ) -> tuple[AverageHeader, Payload]:
        """An average, from the bytes of its object; errors as those of `average`."""
        try:
            return await self.work(open_average, data, state=state, form=self.form, ref=ref, share=share)
        except PayloadError as error:
            raise LogError(f"{source_of(ref.number)}: {error}") from None

    async def snapshot(self, fragment: int, ref: SnapshotRef) -> StoredSnapshot:
        """A snapshot that an entry names.

        Raises:
            LogError: if it is not in the store, or not sound.
        """
        size, name = self.form.sizes[fragment], snapshot_name(fragment, ref.round, ref.sha256)
        data = await self._get(name, most_snapshot_bytes(size))
        if data is None:
            raise LogError(f"{source_of(ref.number)} names {name}, which is not in the store")
        try:
            vectors = await self.work(open_snapshot, data, name=name, num_elements=size)
        except SnapshotError as error:
            raise LogError(f"{source_of(ref.number)}: {error}") from None
        return StoredSnapshot(round=ref.round, name=name, vectors=vectors)

    async def _get(self, name: str, most_bytes: int) -> "Buffer | None":
        return await self.store.get(name, most_bytes=most_bytes, patience_seconds=self.patience_seconds)


class AbsentError(PayloadError):
    """A share is not in the store."""
