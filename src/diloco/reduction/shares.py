"""Shares: a fragment's vector cut into R equal parts, each encoded by itself, and joined again.

Shapes: N elements of one fragment, S = ⌈N/R⌉ of a share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.kernels.memory import empty
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import naming
from diloco.wire.payload import Codec, Key


def share_size(num_elements: int, num_shares: int) -> int:
    """S; at least one element, so that there is something to cut."""
    return max(1, -(-num_elements // num_shares))


def cut(vector_N: Tensor, num_shares: int) -> tuple[Tensor, ...]:
    """The R shares (S) of a vector, on its memory if it needs no zeros: the last ones are filled up with them."""
    size = share_size(vector_N.numel(), num_shares)
    if num_zeros := num_shares * size - vector_N.numel():
        vector_N = torch.nn.functional.pad(vector_N, (0, num_zeros))
    return vector_N.split(size)


def encode_shares(wire: Codec, delta_N: Tensor, num_shares: int, key: Key, *, base: int = 0) -> tuple[Tensor, ...]:
    """One payload a share."""
    shares = enumerate(cut(delta_N, num_shares))
    return tuple(wire.encode(share_S, key._replace(part=part), base=base) for part, share_S in shares)


def join_shares(
    wire: Codec, payloads: Sequence[Tensor], to_N: Tensor, key: Key, senders: Sequence[int] | None = None
) -> Tensor:
    """Decode one payload a share into a vector, and return it.

    Args:
        wire: their codec.
        payloads: in the order of the shares.
        to_N: the vector, flat FP32.
        key: of all; each has its own part.
        senders: the replica to name for each payload, if it is damaged; None is the key's.

    Raises:
        PayloadError: for a payload that is damaged.
    """
    size = share_size(to_N.numel(), len(payloads))
    for part, payload in enumerate(payloads):
        share_S, key = to_N[part * size : (part + 1) * size], key._replace(part=part)
        with naming(key.replica if senders is None else senders[part]):
            if share_S.numel() == size:
                wire.decode_into(share_S, payload, key)
            else:  # the last shares were filled up with zeros
                whole_S = wire.decode_into(empty(size, torch.float32, to_N.device), payload, key)
                share_S.copy_(whole_S[: share_S.numel()])
    return to_N


def key_of_average(key: Key, cohort: Cohort) -> Key:
    """The key of the average of a share, which is no member's own."""
    return key._replace(replica=cohort.members[-1] + 1)
