"""How the replicas' outer gradients become one average: gather, or reduce_scatter.

Gather sends each replica's payload to all others, and every replica adds up the M of them: one rounding. In
reduce_scatter each replica averages a share of the fragment, of which it receives the others' payloads, encodes
the average and sends it to all: 2(M−1)/M payloads a replica in the place of M−1, and a second rounding. The bits
of the average are the same on every replica either way.

Shapes: N elements of one fragment.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from diloco.errors import PayloadError, UserError
from diloco.exchange.transport import Exchange, Pending
from diloco.kernels.memory import empty
from diloco.outer.nesterov import divide
from diloco.wire import Codec, Key, codec


class Combine(Protocol):
    """One of the two ways."""

    def encode(self, delta_N: Tensor, key: Key, num_replicas: int) -> tuple[Tensor, ...]:
        """What a replica sends of its outer gradient: one payload for all, or one for each replica.

        Raises:
            NonFiniteError: if the outer gradient is not finite.
        """
        ...

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The flat FP32 vector that these payloads, all of one replica, stand for."""
        ...

    def start(self, exchange: Exchange, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Pending:
        """Start to bring every replica what it needs; `wait()` then has a payload of every replica."""
        ...

    def total(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key) -> None:
        """Write `divisor` times the average, from what `wait()` returned, into a flat FP32 vector.

        Raises:
            PayloadError: for a payload that is damaged.
        """
        ...

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Each replica's decoded outer gradient, in replica order; none where none has seen them whole."""
        ...

    def divisor(self, num_replicas: int) -> int:
        """What `total` must be divided by."""
        ...

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """Payload bytes that a replica sends, and receives, for N elements; each destination counted."""
        ...

    @property
    def spec(self) -> str:
        """Its name and its second codec's, as `combine` reads it."""
        ...


def encode_with_feedback(
    way: Combine, delta_N: Tensor, error_N: Tensor, beta: float, key: Key, num_replicas: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Error feedback: e ← β e + Δ; send C(e); e ← e − C(e) (arXiv 1901.09847, with β).

    Args:
        way: how the payloads are combined, and C, its codec.
        delta_N: Δ, flat FP32.
        error_N: e, flat FP32; zero at the start.
        beta: β.
        key: whose outer gradient it is.
        num_replicas: M.

    Returns:
        What to send, and the new e; nothing is changed in place.

    Raises:
        NonFiniteError: if β e + Δ is not finite.
    """
    error_N = beta * error_N + delta_N
    payloads = way.encode(error_N, key, num_replicas)
    return payloads, error_N.sub_(way.decode(payloads, error_N.numel(), key))


def combine_by(spec: str, wire: Codec) -> Combine:
    """The way of a name: `gather`, `reduce_scatter`, or `reduce_scatter:bf16` with a second codec of its own.

    Raises:
        UserError: if there is none, or it can't be had with this codec.
    """
    name, _, second = spec.partition(":")
    if spec == "gather":
        return Gather(wire)
    if name == "reduce_scatter":
        return ReduceScatter(wire, codec(second) if second else wire)
    raise UserError(
        f"combine={spec!r} is neither gather nor reduce_scatter, "
        "nor reduce_scatter:CODEC, which sends the averages in another codec"
    )


@dataclass(frozen=True)
class Gather:
    """Every replica receives every other's payload: the paper's way."""

    wire: Codec
    spec = "gather"

    def encode(self, delta_N: Tensor, key: Key, num_replicas: int) -> tuple[Tensor, ...]:
        """One payload."""
        return (self.wire.encode(delta_N, key),)

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """What it stands for."""
        return self.wire.decode(payloads[0], num_elements, key)

    def start(self, exchange: Exchange, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Pending:
        """Send it to all."""
        others = {replica: payloads[0] for replica in range(exchange.num_replicas) if replica != exchange.replica}
        return _WithOwn(exchange.start(others, key.fragment, key.round), exchange.replica, payloads[0])

    def total(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key) -> None:
        """Σ_m decode(payload of m), in FP32 and in replica order."""
        _sum(self.wire, received, to_N, key)

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """Decoded again."""
        for replica, payload in sorted(received.items()):
            yield self.wire.decode(payload.to(device), num_elements, key._replace(replica=replica))

    def divisor(self, num_replicas: int) -> int:
        """M."""
        return num_replicas

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """M − 1 payloads."""
        return (num_replicas - 1) * self.wire.payload_bytes(num_elements)


@dataclass(frozen=True)
class ReduceScatter:
    """Replica j averages share j, the j-th ⌈N/M⌉ elements, the last filled up with zeros."""

    wire: Codec
    second: Codec
    """Codec of the averages."""

    def __post_init__(self) -> None:
        """Refuse to scale twice."""
        if self.second.name == "dare":
            raise UserError(
                "reduce_scatter with dare would rescale the averages, too: "
                "name another codec for them, such as reduce_scatter:feddropout"
            )

    @property
    def spec(self) -> str:
        """With the second codec, which may be the first."""
        return f"reduce_scatter:{self.second.spec}"

    def encode(self, delta_N: Tensor, key: Key, num_replicas: int) -> tuple[Tensor, ...]:
        """A payload of each share."""
        size = _share(delta_N.numel(), num_replicas)
        padded = torch.nn.functional.pad(delta_N, (0, num_replicas * size - delta_N.numel()))
        return tuple(
            self.wire.encode(share_S, key._replace(part=part)) for part, share_S in enumerate(padded.split(size))
        )

    def decode(self, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Tensor:
        """The shares together."""
        to_N = empty(num_elements, torch.float32, payloads[0].device)
        self._together(self.wire, payloads, to_N, key)
        return to_N

    def start(self, exchange: Exchange, payloads: Sequence[Tensor], num_elements: int, key: Key) -> Pending:
        """Send each replica its share; when its own has arrived, a thread averages it and sends that to all."""
        return _TwoPhases(self, exchange, payloads, num_elements, key)

    def total(self, received: Mapping[int, Tensor], to_N: Tensor, key: Key) -> None:
        """The averages together."""
        payloads = [received[replica].to(to_N.device) for replica in sorted(received)]
        self._together(self.second, payloads, to_N, _of_all(key, len(received)))

    def each(
        self, received: Mapping[int, Tensor], num_elements: int, key: Key, device: torch.device
    ) -> Iterator[Tensor]:
        """None: a replica sees the others' shares of its own part alone."""
        return iter(())

    def divisor(self, num_replicas: int) -> int:
        """1: what was sent is an average already."""
        return 1

    def bytes_sent(self, num_elements: int, num_replicas: int) -> int:
        """A share to each of the others, and an average to each."""
        size = _share(num_elements, num_replicas)
        return (num_replicas - 1) * (self.wire.payload_bytes(size) + self.second.payload_bytes(size))

    def reduce(self, received: Mapping[int, Tensor], num_elements: int, key: Key) -> Tensor:
        """The payload of the average of one share, from every replica's payload of it."""
        num_replicas = len(received)
        device = received[key.part].device
        size = _share(num_elements, num_replicas)
        _check(self.wire, received, size)
        total_S = empty(size, torch.float32, device)
        _sum(self.wire, received, total_S, key)
        return self.second.encode(divide(total_S, num_replicas), _of_all(key, num_replicas))

    def _together(self, wire: Codec, payloads: Sequence[Tensor], to_N: Tensor, key: Key) -> None:
        size = _share(to_N.numel(), len(payloads))
        for part, payload in enumerate(payloads):
            share_S, key = to_N[part * size : (part + 1) * size], key._replace(part=part)
            with _naming(part):
                if share_S.numel() == size:
                    wire.decode_into(share_S, payload, key)
                else:  # the last one was filled up with zeros
                    share_S.copy_(wire.decode(payload, size, key)[: share_S.numel()])


def _sum(wire: Codec, received: Mapping[int, Tensor], to_N: Tensor, key: Key) -> None:
    """Σ_m of the decoded payloads: FP32, in replica order, one pass over memory for each."""
    for index, (replica, payload) in enumerate(sorted(received.items())):
        with _naming(replica):
            wire.decode_into(to_N, payload.to(to_N.device), key._replace(replica=replica), add=index > 0)


def _check(wire: Codec, received: Mapping[int, Tensor], num_elements: int) -> None:
    for replica, payload in sorted(received.items()):
        with _naming(replica):
            wire.check(payload, num_elements)


@contextmanager
def _naming(replica: int) -> Iterator[None]:
    """Say whose payload is damaged."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"replica {replica}: {error}") from None


def _share(num_elements: int, num_replicas: int) -> int:
    """Elements of a share; at least one, so that there is something to cut."""
    return max(1, -(-num_elements // num_replicas))


def _of_all(key: Key, num_replicas: int) -> Key:
    """The key of an average, which is no replica's own."""
    return key._replace(replica=num_replicas)


class _WithOwn:
    """An exchange in flight, and this replica's own payload beside the others'."""

    def __init__(self, pending: Pending, replica: int, payload: Tensor) -> None:
        self._pending, self._replica, self._payload = pending, replica, payload

    def wait(self) -> dict[int, Tensor]:
        """Every replica's payload."""
        return {**self._pending.wait(), self._replica: self._payload}


class _TwoPhases:
    """reduce_scatter in flight. The second phase starts as soon as the first is over, in a thread of its own."""

    def __init__(
        self, way: ReduceScatter, exchange: Exchange, payloads: Sequence[Tensor], num_elements: int, key: Key
    ) -> None:
        shares = {m: payload for m, payload in enumerate(payloads) if m != exchange.replica}
        first = exchange.start(shares, key.fragment, key.round, 0)
        self._received: dict[int, Tensor] | None = None
        self._error: Exception | None = None
        own = payloads[exchange.replica]
        key = key._replace(part=exchange.replica)

        def run() -> None:
            try:
                average = way.reduce({**first.wait(), exchange.replica: own}, num_elements, key)
                others = {m: average for m in range(exchange.num_replicas) if m != exchange.replica}
                second = exchange.start(others, key.fragment, key.round, 1)
                self._received = {**second.wait(), exchange.replica: average}
            except Exception as error:  # raised again where the training loop waits
                self._error = error

        self._thread = Thread(target=run, name=f"fragment {key.fragment}, round {key.round}", daemon=True)
        self._thread.start()

    def wait(self) -> dict[int, Tensor]:
        """Every replica's average of its share; as long as both phases may take."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._received is not None, "the thread ended well"
        return self._received
