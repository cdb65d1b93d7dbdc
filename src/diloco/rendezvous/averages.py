"""The averages of shares in the store: a signed header, and the average in the second codec.

    A_r = encode(Σ_m w_m decode(share r of m) / Σ_m w_m)      over the entry's members whose share is sound

An average is a pure function of an outer entry and of the bytes of its members' shares: each of them may make it,
and whoever comes later can make it again. The first in the store is everybody's.

Shapes: N elements of one fragment, S of a share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from torch import Tensor

from diloco.files import sha256
from diloco.kernels.memory import empty
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average, add_up
from diloco.reduction.shares import join_shares, key_of_average
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import Digest, Outer, Positive
from diloco.rendezvous.keys import Signer
from diloco.rendezvous.payloads import body_tensor
from diloco.rendezvous.signed import MOST_HEAD_BYTES, Kind, line_of
from diloco.rendezvous.state import OuterRef, RunRecord
from diloco.rendezvous.verify import checked_norm, norm_of
from diloco.schema import Count
from diloco.wire.payload import Codec, Key

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KIND = Kind("average", b"DLA1")


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


def name_of(entry: int, share: int) -> str:
    """The name of the average of a share in the store."""
    return f"averages/{entry:010d}/{share}"


def most_bytes(form: Form, fragment: int) -> int:
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


def joined(
    form: Form, fragment: int, last_round: int, cohort: Cohort, averages: Sequence[Tensor], to_N: Tensor
) -> Average:
    """Δ_p of a round, from the averages of all its shares; the total is written to `to_N`."""
    key = _key(form, fragment, last_round, cohort)
    return Average(join_shares(second_codec(form), averages, to_N, key), 1.0)


def sealed(header: AverageHeader, signer: Signer) -> bytes:
    """The head of an average's object; its body is uploaded behind it."""
    return _KIND.sealed(line_of(header), signer)


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


def opened(
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
    name = name_of(ref.number, share)
    line, signature, body = _KIND.split(data, name)
    header = _KIND.header(line, AverageHeader, name)
    members = [c.replica for c in ref.body.contributions]
    if header.replica not in members:
        _KIND.refuse(name, f"it is by replica {header.replica}, which is not in the outer step")
    _KIND.check_signature(state.members[header.replica].key, signature, line, name)
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
            _KIND.refuse(name, f"it has {field} {actual}, where {value} is expected")
    if len(body) != header.num_bytes or sha256(body) != header.sha256:
        _KIND.refuse(name, "its body does not match its header: it was cut short, damaged or changed")
    key = _key(form, ref.body.fragment, ref.body.round, state.cohort(ref.body.contributions))._replace(part=share)
    payload, to_S = body_tensor(body), empty(size, torch.float32, torch.device("cpu"))
    checked_norm(second, payload, to_S, key, source=f"average {name}", norm=header.norm)
    most = state.rules.norm_bound * max(c.norm for c in ref.body.contributions)
    if header.norm > most:
        _KIND.refuse(name, f"its norm is {header.norm:.4g}, more than {most:.4g}")
    return header, payload


def _key(form: Form, fragment: int, last_round: int, cohort: Cohort) -> Key:
    return key_of_average(Key(form.seed, fragment, last_round), cohort)
