"""Reduce-scatter: each replica averages a share of the fragment, encodes the average and sends it to all.

A replica sends 2(M−1)/M payloads in the place of gather's M − 1, and the average is rounded a second time.

Shapes: N elements of one fragment, S = ⌈N/M⌉ of a share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.kernels.memory import empty
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average, check_complete, weighted_sum
from diloco.reduction.shares import encode_shares, join_shares, key_of_average, share_size
from diloco.wire.formats import VERY_LONG
from diloco.wire.payload import Codec, Key


@dataclass(frozen=True)
class ReduceScatter:
    """The j-th member averages share j, the j-th S elements; the last share is filled up with zeros."""

    wire: Codec
    """The codec of the outer gradients."""
    second: Codec
    """The codec of the averages."""
    num_phases = 2

    def __post_init__(self) -> None:
        """Refuse a codec that rescales, as DARE does, for the averages, which it would rescale again."""
        if self.second.gain(VERY_LONG) != 1:
            raise UserError(
                f"combine=reduce_scatter with {self.second.name} would rescale the averages, too: "
                "name another codec for them, such as reduce_scatter:feddropout",
                "combine",
            )

    @property
    def spec(self) -> str:
        """The name with the second codec, which may be the first."""
        return f"reduce_scatter:{self.second.spec}"

    def encode(self, delta_N: Tensor, key: Key, cohort: Cohort, *, base: int = 0) -> tuple[Tensor, ...]:
        """One payload a share."""
        return encode_shares(self.wire, delta_N, len(cohort.members), key, base=base)

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The vectors of the shares, joined."""
        return join_shares(self.wire, payloads, empty(num_elements, torch.float32, payloads[0].device), key)

    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The payload of share j for the j-th member."""
        return dict(zip(cohort.members, payloads, strict=True))

    def relay(self, received: Mapping[int, Tensor], num_elements: int, key: Key, cohort: Cohort) -> Tensor:
        """The payload of the average of this replica's share, from every member's payload of it."""
        size = share_size(num_elements, len(cohort.members))
        check_complete(received, key, cohort)
        total_S = empty(size, torch.float32, received[key.replica].device)
        key = key._replace(part=cohort.members.index(key.replica))
        average = weighted_sum(self.wire, received, total_S, key, cohort)
        return self.second.encode(average.divided(), key_of_average(key, cohort))

    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """The averages of the shares, joined."""
        check_complete(received, key, cohort)
        payloads = [received[member] for member in cohort.members]
        key = key_of_average(key, cohort)
        return Average(join_shares(self.second, payloads, to_N, key, senders=cohort.members), 1.0)

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """No vectors: a replica sees the others' outer gradients in its own share alone."""
        return iter(())

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """A share to each of the others, and an average to each."""
        size = share_size(num_elements, num_replicas)
        return (num_replicas - 1) * (self.wire.payload_bytes(size) + self.second.payload_bytes(size))
