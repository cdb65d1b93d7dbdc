"""The checks of a payload by whoever receives it, before it is counted: its form, its values, its norm.

Shapes: N elements of one fragment, or of a share of it.
"""

import math

import torch
from torch import Tensor

from diloco.errors import NonFiniteError, PayloadError
from diloco.kernels.memory import empty
from diloco.reduction.shares import cut
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import MOST_NORM
from diloco.rendezvous.payloads import Header, name_of
from diloco.wire.payload import Codec, Key, base_of

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
    name = name_of(header.replica, header.seq, share if form.num_shares > 1 else None)
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
