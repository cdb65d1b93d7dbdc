"""The check of a payload by whoever receives it, before it is counted: its codec's, its values, its norm.

Shapes: N elements of one fragment, or of a share of it.
"""

import math

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.kernels.memory import empty
from diloco.rendezvous.payloads import Header, body_tensor
from diloco.wire.payload import Codec, Key, base_of

_TOLERANCE = 1e-3
"""Largest relative difference between a norm in a header and the norm of the decoded values."""
_ELEMENTS_AT_ONCE = 1 << 18
"""So many that their squares in FP64 stay in a cache."""


def verified(
    header: Header,
    body: memoryview,
    *,
    codec: Codec,
    num_elements: int,
    key: Key,
    scratch_N: Tensor | None = None,
) -> float:
    """The norm of the outer gradient that a payload stands for, after all checks.

    Args:
        header: as `payloads.opened` gives it.
        body: the same.
        codec: the run's.
        num_elements: N.
        key: of the outer gradient: the fragment and the replica from which a payload is expected.
        scratch_N: a flat FP32 vector that is overwritten with the decoded values; left out, one is made.

    Raises:
        PayloadError: naming the payload, if it is of another fragment, replica, codec or length, is damaged, holds
            NaN or an infinity, or its norm is not the header's.
    """
    expected = {
        "fragment": key.fragment,
        "replica": key.replica,
        "wire": codec.format,
        "num_elements": num_elements,
    }
    for field, value in expected.items():
        if (actual := getattr(header, field)) != value:
            raise PayloadError(f"payload {header.name} has {field} {actual}, where {value} is expected")
    payload = body_tensor(body)
    decoded_N = empty(num_elements, torch.float32, torch.device("cpu")) if scratch_N is None else scratch_N
    try:
        codec.decode_into(decoded_N, payload, key)
    except PayloadError as error:
        raise PayloadError(f"payload {header.name}: {error}") from None
    if (base := base_of(payload)) and base != int(header.base, 16):
        raise PayloadError(
            f"payload {header.name} was taken against the outer parameters {base:016x}, and its header says "
            f"{header.base}"
        )
    norm = norm_of(decoded_N)
    if not math.isfinite(norm):
        raise PayloadError(f"payload {header.name} holds NaN or an infinity")
    if not math.isclose(norm, header.norm, rel_tol=_TOLERANCE):
        raise PayloadError(f"payload {header.name} has the norm {norm:.6g}, and its header says {header.norm:.6g}")
    return norm


def norm_of(vector_N: Tensor) -> float:
    """‖vector‖₂, summed in FP64: no finite FP32 vector makes it infinite."""
    pieces = vector_N.split(_ELEMENTS_AT_ONCE)
    return math.sqrt(math.fsum(float(piece.double().square_().sum()) for piece in pieces))
