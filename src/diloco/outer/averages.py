"""From the replicas' payloads to one average: gather, reduce_scatter; chosen by name.

Shapes: N elements of one fragment, S of a share.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from diloco.errors import DisagreementError, ExchangeError, PayloadError, UserError
from diloco.outer.cohort import Cohort
from diloco.wire import codec
from diloco.wire.formats import VERY_LONG
from diloco.wire.kernels.memory import empty, empty_like
from diloco.wire.payload import Codec, Key, base_of


class Average(NamedTuple):
    """Δ_p = total / weight, left undivided, so that the outer step divides in the pass that reads it."""

    total_N: Tensor
    """Flat FP32 (N)."""
    weight: float
    """The divisor: Σ_m w_m, or 1 if the total is an average already."""
    deltas: Callable[[], Iterator[Tensor]] = lambda: iter(())
    """Makes each member's decoded outer gradient again, in the cohort's order: flat FP32 (N), read-only. There is
    none with reduce_scatter, where no replica has them whole."""

    def divided(self) -> Tensor:
        """Δ_p, flat FP32 (N), with the same bits on every device."""
        # Not by a Python number: CUDA would multiply by its reciprocal, which rounds differently.
        weight = torch.full((), self.weight, dtype=torch.float32, device=self.total_N.device)
        return torch.div(self.total_N, weight, out=empty_like(self.total_N))


@dataclass(frozen=True)
class Reduction(ABC):
    """The way from payloads to an average."""

    wire: Codec
    """The codec of the outer gradients."""
    second: Codec | None = None
    """The codec of averages of shares; None if there are none."""
    num_phases: ClassVar[int] = 1
    """1 if each member sends all others its payloads, 2 if it relays something after that."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The names of the reduction and of its second codec, as `reduction_of` reads them."""

    def with_wire(self, wire: Codec) -> Self:
        """The same reduction of outer gradients in another codec."""
        return replace(self, wire=wire)

    @abstractmethod
    def encode(
        self, delta_N: Tensor, key: Key, cohort: Cohort, *, outer_N: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The payloads of a replica's outer gradient: one for all, or one for each member.

        Args:
            delta_N: the outer gradient, flat FP32 (N).
            key: whose it is.
            cohort: the members that share the fragment.
            outer_N: the outer parameters against which it was taken, flat FP32 (N), for a codec that needs them.

        Raises:
            NonFiniteError: if the outer gradient is not finite.
        """

    def encode_with_feedback(
        self,
        delta_N: Tensor,
        error_N: Tensor,
        beta: float,
        key: Key,
        cohort: Cohort,
        *,
        outer_N: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """e ← β e + Δ; send C(e); e ← e − C(e): what a codec loses is sent with the next (arXiv 1901.09847).

        The new e is right if what was sent enters an outer step.

        Args:
            delta_N: Δ, flat FP32.
            error_N: e, flat FP32; zero at the start.
            beta: β.
            key: whose outer gradient it is.
            cohort: the members that share the fragment.
            outer_N: as `encode` takes it.

        Returns:
            The payloads, and the new e; nothing is changed in place.

        Raises:
            NonFiniteError: if β e + Δ is not finite.
        """
        error_N = beta * error_N + delta_N
        payloads = self.encode(error_N, key, cohort, outer_N=outer_N)
        return payloads, error_N.sub_(self.decode(payloads, error_N.numel(), key))

    @abstractmethod
    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The flat FP32 vector (N) that these payloads, all of one replica, stand for."""

    @abstractmethod
    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The payload for each member, the sender included."""

    def relay(self, received: Mapping[int, Tensor], num_elements: int, key: Key, cohort: Cohort) -> Tensor:
        """In two phases: the payload that goes to every member, made of those received in the first.

        Raises:
            DisagreementError: if a member's outer gradient was taken against other outer parameters.
            PayloadError: for a payload that is damaged.
        """
        raise AssertionError("there is one phase")

    @abstractmethod
    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """The average of the last phase's payloads, one per member; its total is written to `to_N`.

        Raises:
            DisagreementError: if a member's outer gradient was taken against other outer parameters.
            ExchangeError: if a member's payload is missing.
            PayloadError: for a payload that is damaged.
        """

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Each member's decoded outer gradient, in the order of the members; nothing where none has all."""
        return iter(())

    @abstractmethod
    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """Payload bytes that a replica sends, and receives, for N elements; each destination counted."""


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
    wire: Codec,
    received: Mapping[int, Tensor],
    to_N: Tensor,
    keys: Sequence[Key],
    cohort: Cohort,
    values: Mapping[int, Tensor] | None = None,
) -> Average:
    """`weighted_sum` of payloads that are all there, each with the key that it was encoded with.

    Args:
        wire: the payloads' codec.
        received: the payloads by member.
        to_N: the sum, flat FP32 (N).
        keys: in the order of the members.
        cohort: the members and their weights.
        values: what some of the payloads stand for, flat FP32 (N): these are not decoded again.

    Raises:
        PayloadError: for a payload that is damaged.
    """
    values = values or {}
    for index, (member, weight, key) in enumerate(zip(cohort.members, cohort.weights, keys, strict=True)):
        part_N = values.get(member)
        with naming(member):
            if part_N is not None:
                weigh_in(to_N, part_N, weight, is_first=index == 0)
            elif weight == 1:
                wire.decode_into(to_N, received[member], key, add=index > 0)
            else:
                part_N = wire.decode_into(empty(to_N.numel(), torch.float32, to_N.device), received[member], key)
                weigh_in(to_N, part_N, weight, is_first=index == 0)
    deltas = partial(decoded, wire, received, keys, to_N.numel(), to_N.device, values)
    return Average(to_N, cohort.total_weight, deltas)


def decoded(
    wire: Codec,
    received: Mapping[int, Tensor],
    keys: Sequence[Key],
    num_elements: int,
    device: torch.device,
    values: Mapping[int, Tensor] | None = None,
) -> Iterator[Tensor]:
    """Each member's outer gradient, flat FP32 (N), one after the other.

    Args:
        wire: the payloads' codec.
        received: the payloads by member.
        keys: with which they were encoded, in the order of the members.
        num_elements: N.
        device: the place where they are wanted.
        values: as in `add_up`.
    """
    for key in keys:
        if values and (known_N := values.get(key.replica)) is not None:
            yield known_N
        else:
            yield wire.decode_into(empty(num_elements, torch.float32, device), received[key.replica], key)


def weigh_in(to_N: Tensor, part_N: Tensor, weight: float, *, is_first: bool) -> None:
    """Add one member's values, with their weight, to a sum, or begin it; two rounded operations per element."""
    if is_first:
        torch.mul(part_N, weight, out=to_N) if weight != 1 else to_N.copy_(part_N)
    else:
        to_N.add_(part_N * weight if weight != 1 else part_N)


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


def share_size(num_elements: int, num_shares: int) -> int:
    """S; at least one element, so that there is something to cut."""
    return max(1, -(-num_elements // num_shares))


def cut(vector_N: Tensor, num_shares: int) -> tuple[Tensor, ...]:
    """The R shares (S) of a vector, on its memory if it needs no zeros: the last ones are filled up with them."""
    size = share_size(vector_N.numel(), num_shares)
    if num_zeros := num_shares * size - vector_N.numel():
        vector_N = torch.nn.functional.pad(vector_N, (0, num_zeros))
    return vector_N.split(size)


def encode_shares(
    wire: Codec, delta_N: Tensor, num_shares: int, key: Key, *, outer_N: Tensor | None = None
) -> tuple[Tensor, ...]:
    """One payload per share."""
    shares = cut(delta_N, num_shares)
    outer = [None] * num_shares if outer_N is None else cut(outer_N, num_shares)
    return tuple(
        wire.encode(share_S, key._replace(part=part), outer_N=outer_S)
        for part, (share_S, outer_S) in enumerate(zip(shares, outer, strict=True))
    )


def join_shares(
    wire: Codec,
    payloads: Sequence[Tensor],
    to_N: Tensor,
    key: Key,
    senders: Sequence[int] | None = None,
    values: Sequence[Tensor | None] = (),
) -> Tensor:
    """Decode one payload per share into a vector, and return it.

    Args:
        wire: their codec.
        payloads: in the order of the shares.
        to_N: the vector, flat FP32.
        key: of all; each has its own part.
        senders: the replica to name for each payload, if it is damaged; None is the key's.
        values: for each share its values, if they are known, flat FP32 (S): these are not decoded again.

    Raises:
        PayloadError: for a payload that is damaged.
    """
    size = share_size(to_N.numel(), len(payloads))
    for part, payload in enumerate(payloads):
        share_S, key = to_N[part * size : (part + 1) * size], key._replace(part=part)
        if values and (known_S := values[part]) is not None:
            share_S.copy_(known_S[: share_S.numel()])
            continue
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


@dataclass(frozen=True)
class Gather(Reduction):
    """One payload per replica, sent to all others: M − 1 payloads."""

    @property
    def spec(self) -> str:
        """The name."""
        return "gather"

    def encode(
        self, delta_N: Tensor, key: Key, cohort: Cohort, *, outer_N: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """One payload."""
        return (self.wire.encode(delta_N, key, outer_N=outer_N),)

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The payload's vector."""
        return self.wire.decode(payloads[0], num_elements, key)

    def addressed(self, payloads: Sequence[Tensor], cohort: Cohort) -> dict[int, Tensor]:
        """The same payload for every member."""
        return dict.fromkeys(cohort.members, payloads[0])

    def average(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key, cohort: Cohort) -> Average:
        """Σ_m w_m decode(payload of m), undivided."""
        return weighted_sum(self.wire, received, to_N, key, cohort)

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Each payload, decoded again."""
        keys = [key._replace(replica=member) for member in sorted(received)]
        return decoded(self.wire, received, keys, num_elements, device)

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """M − 1 payloads."""
        return (num_replicas - 1) * self.wire.payload_bytes(num_elements)


@dataclass(frozen=True)
class ReduceScatter(Reduction):
    """The j-th member averages share j, the j-th S elements; the last share is filled up with zeros."""

    second: Codec = field()  # required here: the default of the base is None
    num_phases = 2

    def __post_init__(self) -> None:
        """Refuse, for the averages, a codec that would rescale them again, as DARE, or that needs Θ."""
        if self.second.gain(VERY_LONG) != 1:
            raise UserError(
                f"combine=reduce_scatter with {self.second.name} would rescale the averages, too: "
                "name another codec for them, such as reduce_scatter:feddropout",
                "combine",
            )
        if self.second.needs_outer:
            raise UserError(
                f"combine=reduce_scatter with {self.second.name} would lose for ever what an average does not "
                "change in the model: name another codec for the averages, such as reduce_scatter:fp32",
                "combine",
            )

    @property
    def spec(self) -> str:
        """The name with the second codec, which may be the first."""
        return f"reduce_scatter:{self.second.spec}"

    def encode(
        self, delta_N: Tensor, key: Key, cohort: Cohort, *, outer_N: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """One payload per share."""
        return encode_shares(self.wire, delta_N, len(cohort.members), key, outer_N=outer_N)

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

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """A share to each of the others, and an average to each."""
        size = share_size(num_elements, num_replicas)
        return (num_replicas - 1) * (self.wire.payload_bytes(size) + self.second.payload_bytes(size))


def reduction_of(spec: str, wire: Codec) -> Reduction:
    """The reduction of a name: `gather`, `reduce_scatter`, or `reduce_scatter:bf16` with a codec for the averages.

    Raises:
        UserError: if there is none, or it does not work with this codec.
    """
    name, _, second = spec.partition(":")
    if spec == "gather":
        return Gather(wire)
    if name == "reduce_scatter":
        return ReduceScatter(wire, codec(second) if second else wire)
    raise UserError(
        f"combine={spec!r} is neither gather nor reduce_scatter, "
        "nor reduce_scatter:CODEC, which sends the averages in another codec",
        "combine",
    )
