"""Gather: every replica receives every other's payload, and adds them up; one rounding (the paper's way)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.kernels.memory import empty
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average, weighted_sum
from diloco.wire.payload import Codec, Key


@dataclass(frozen=True)
class Gather:
    """One payload a replica, sent to all others: M − 1 payloads."""

    wire: Codec
    """The codec of the outer gradients."""
    spec = "gather"
    num_phases = 1
    second = None

    def encode(self, delta_N: Tensor, key: Key, cohort: Cohort, *, base: int = 0) -> tuple[Tensor, ...]:
        """One payload."""
        return (self.wire.encode(delta_N, key, base=base),)

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The payload's vector."""
        return self.wire.decode(payloads[0], num_elements, key)

    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The same payload for every member."""
        return dict.fromkeys(cohort.members, payloads[0])

    def relay(self, received: Mapping[int, Tensor], num_elements: int, key: Key, cohort: Cohort) -> Tensor:
        """Refuse to relay: there is one phase."""
        raise AssertionError("gather has one phase")

    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """Σ_m w_m decode(payload of m), undivided."""
        return weighted_sum(self.wire, received, to_N, key, cohort)

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Each payload, decoded again."""
        for member, payload in sorted(received.items()):
            to_N = empty(num_elements, torch.float32, device)
            yield self.wire.decode_into(to_N, payload, key._replace(replica=member))

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """M − 1 payloads."""
        return (num_replicas - 1) * self.wire.payload_bytes(num_elements)
