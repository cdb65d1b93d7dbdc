"""The contract of a reduction: from one payload or several of each member to one average.

A reduction is pure: it says what is sent to whom, and the engine's rounds send it. The bits of the average are the
same on every replica.

Shapes: N elements of one fragment.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from diloco.errors import DisagreementError, ExchangeError, PayloadError
from diloco.kernels.memory import empty
from diloco.reduction.cohort import Cohort
from diloco.wire.payload import Codec, Key, base_of


class Average(NamedTuple):
    """Δ_p = total / weight, left undivided, so that the outer step divides in the pass that reads it."""

    total_N: Tensor
    """Flat FP32 (N)."""
    weight: float
    """The divisor: Σ_m w_m, or 1 if the total is an average already."""

    def divided(self) -> Tensor:
        """Δ_p, flat FP32 (N), with the same bits on every device."""
        # Not by a Python number: CUDA would multiply by its reciprocal, which rounds differently.
        return self.total_N / torch.full((), self.weight, dtype=torch.float32, device=self.total_N.device)


class Reduction(Protocol):
    """The way from payloads to an average."""

    @property
    def spec(self) -> str:
        """The names of the reduction and of its second codec, as `reduction_of` reads them."""
        ...

    @property
    def second(self) -> Codec | None:
        """The codec of averages of shares; None if there are none."""
        ...

    @property
    def num_phases(self) -> int:
        """1 if each member sends all others its payloads, 2 if it relays something after that."""
        ...

    def encode(self, delta_N: Tensor, key: Key, cohort: Cohort, *, base: int = 0) -> tuple[Tensor, ...]:
        """The payloads of a replica's outer gradient: one for all, or one for each member.

        Args:
            delta_N: the outer gradient, flat FP32 (N).
            key: whose it is.
            cohort: the members that share the fragment.
            base: the digest of the outer parameters against which it was taken; 0 where it is not known.

        Raises:
            NonFiniteError: if the outer gradient is not finite.
        """
        ...

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The flat FP32 vector (N) that these payloads, all of one replica, stand for."""
        ...

    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The payload for each member, the sender included."""
        ...

    def relay(self, received: Mapping[int, Tensor], num_elements: int, key: Key, cohort: Cohort) -> Tensor:
        """In two phases: the payload that goes to every member, made of those received in the first.

        Raises:
            DisagreementError: if a member's outer gradient was taken against other outer parameters.
            PayloadError: for a payload that is damaged.
        """
        ...

    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """The average of the last phase's payloads, one a member; its total is written to `to_N`.

        Raises:
            DisagreementError: if a member's outer gradient was taken against other outer parameters.
            ExchangeError: if a member's payload is missing.
            PayloadError: for a payload that is damaged.
        """
        ...

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Each member's decoded outer gradient, in the order of the members; nothing where none has all."""
        ...

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """Payload bytes that a replica sends, and receives, for N elements; each destination counted."""
        ...


def weighted_sum(wire: Codec, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
    """Σ_m w_m · decode(payload of m): FP32, in the order of the members, one pass over memory for each.

    Raises:
        DisagreementError: if a member's outer gradient was taken against other outer parameters.
        ExchangeError: if a member's payload is missing.
        PayloadError: for a payload that is damaged.
    """
    check_complete(received, key, cohort)
    keys = [key._replace(replica=member) for member in cohort.members]
    average = add_up(wire, received, to_N, keys, cohort)
    _check_bases(received, key, cohort)  # last: now every header is known to be sound
    return average


def add_up(
    wire: Codec, received: Mapping[int, Tensor], to_N: Tensor, keys: Sequence[Key], cohort: Cohort
) -> Average:
    """`weighted_sum` of payloads that are all there, each with the key that it was encoded with.

    Raises:
        PayloadError: for a payload that is damaged.
    """
    for index, (member, weight, key) in enumerate(zip(cohort.members, cohort.weights, keys, strict=True)):
        with naming(member):
            if weight == 1:
                wire.decode_into(to_N, received[member], key, add=index > 0)
                continue
            part_N = empty(to_N.numel(), torch.float32, to_N.device)
            wire.decode_into(part_N, received[member], key).mul_(weight)
            to_N.copy_(part_N) if index == 0 else to_N.add_(part_N)
    return Average(to_N, cohort.total_weight)


def check_complete(received: Mapping[int, Tensor], key: Key, cohort: Cohort) -> None:
    """Refuse to average anything but one payload of each member.

    Raises:
        ExchangeError: naming the members whose payload is missing.
    """
    missing = tuple(member for member in cohort.members if member not in received)
    if missing:
        names = ", ".join(f"replica {member}" for member in missing)
        raise ExchangeError(f"fragment {key.fragment}, round {key.round}: no payload of {names}", missing)
    assert len(received) == len(cohort.members), "nobody else's payload is averaged"


def _check_bases(received: Mapping[int, Tensor], key: Key, cohort: Cohort) -> None:
    """Refuse outer gradients that were taken against different outer parameters.

    Raises:
        DisagreementError: naming the members whose outer parameters are not this replica's.
    """
    bases = {member: base_of(received[member]) for member in cohort.members}
    own = bases.get(key.replica, 0)
    differing = [f"replica {member}" for member, base in bases.items() if base and own and base != own]
    if differing:
        raise DisagreementError(
            f"the outer parameters of {' and '.join(differing)} are no longer those of this replica, "
            f"{key.replica}: since the last round of this fragment a replica's memory changed, or its outer step "
            "gave other bits; nothing was merged: end all replicas, and resume them from a checkpoint before that"
        )


@contextmanager
def naming(member: int) -> Iterator[None]:
    """Say whose payload is damaged."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"replica {member}: {error}") from None
