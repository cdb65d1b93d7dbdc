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
from diloco.reduction.reduction import Average, check_complete, naming, weighted_sum
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
        """Refuse DARE for the averages: it would rescale them again."""
        if self.second.name == "dare":
            raise UserError(
                "combine=reduce_scatter with dare would rescale the averages, too: "
                "name another codec for them, such as reduce_scatter:feddropout",
                "combine",
            )

    @property
    def spec(self) -> str:
        """The name with the second codec, which may be the first."""
        return f"reduce_scatter:{self.second.spec}"

    def encode(self, delta_N: Tensor, key: Key, cohort: Cohort, *, base: int = 0) -> tuple[Tensor, ...]:
        """One payload a share."""
        num_shares = len(cohort.members)
        size = _share(delta_N.numel(), num_shares)
        padded = torch.nn.functional.pad(delta_N, (0, num_shares * size - delta_N.numel()))
        return tuple(
            self.wire.encode(share_S, key._replace(part=part), base=base)
            for part, share_S in enumerate(padded.split(size))
        )

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The vectors of the shares, joined."""
        to_N = empty(num_elements, torch.float32, payloads[0].device)
        self._join(self.wire, enumerate(payloads), len(payloads), to_N, key)
        return to_N

    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The payload of share j for the j-th member."""
        return dict(zip(cohort.members, payloads, strict=True))

    def relay(self, received: Mapping[int, Tensor], num_elements: int, key: Key, cohort: Cohort) -> Tensor:
        """The payload of the average of this replica's share, from every member's payload of it."""
        size = _share(num_elements, len(cohort.members))
        check_complete(received, key, cohort)
        total_S = empty(size, torch.float32, received[key.replica].device)
        key = key._replace(part=cohort.members.index(key.replica))
        average = weighted_sum(self.wire, received, total_S, key, cohort)
        return self.second.encode(average.divided(), _of_all(key, cohort))

    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """The averages of the shares, joined."""
        check_complete(received, key, cohort)
        payloads = [(member, received[member]) for member in cohort.members]
        self._join(self.second, payloads, len(payloads), to_N, _of_all(key, cohort))
        return Average(to_N, 1.0)

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Nothing: a replica sees the others' outer gradients in its own share alone."""
        return iter(())

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """A share to each of the others, and an average to each."""
        size = _share(num_elements, num_replicas)
        return (num_replicas - 1) * (self.wire.payload_bytes(size) + self.second.payload_bytes(size))

    def _join(
        self,
        wire: Codec,
        payloads: "Iterator[tuple[int, Tensor]] | Sequence[tuple[int, Tensor]]",
        num_shares: int,
        to_N: Tensor,
        key: Key,
    ) -> None:
        """Decode the shares' payloads, each with the member to name if it is damaged, into one vector."""
        size = _share(to_N.numel(), num_shares)
        for part, (member, payload) in enumerate(payloads):
            share_S, key = to_N[part * size : (part + 1) * size], key._replace(part=part)
            with naming(member):
                if share_S.numel() == size:
                    wire.decode_into(share_S, payload, key)
                else:  # the last share was filled up with zeros
                    whole_S = wire.decode_into(empty(size, torch.float32, to_N.device), payload, key)
                    share_S.copy_(whole_S[: share_S.numel()])


def _share(num_elements: int, num_shares: int) -> int:
    """S; at least one element, so that there is something to cut."""
    return max(1, -(-num_elements // num_shares))


def _of_all(key: Key, cohort: Cohort) -> Key:
    """The key of an average, which is no member's own."""
    return key._replace(replica=cohort.members[-1] + 1)
