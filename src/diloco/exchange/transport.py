"""The contracts of the exchange, their forms for a single replica, and messages about the run."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from diloco.errors import DisagreementError, ExchangeError
from diloco.schema import shown


class Channel(IntEnum):
    """The kinds of traffic between replicas; no two share a tag."""

    CONTROL = 0
    """Settings and other messages about the run."""
    PAYLOAD = 1
    """Outer gradients and their averages."""
    PROBE = 2
    """Measurements of the link."""
    LOSS = 3
    """Training losses, for logs."""


class Tag(NamedTuple):
    """The name of one exchange; every replica starts each tag once."""

    channel: Channel
    fragment: int = 0
    """Index of the fragment, from 0."""
    round: int = 0
    """The number of this use of the fragment, or of the channel, from 1."""
    phase: int = 0
    """The leg of an exchange that has several, 0 or 1."""
    shard: int = 0
    """The replica's process that sends, from 0."""
    step: int = 0
    """The inner step after which a payload is sent, for messages; 0 where there is none."""

    def __str__(self) -> str:
        if self.channel is Channel.PAYLOAD:
            return f"fragment {self.fragment}, round {self.round}"
        names = {Channel.CONTROL: "comparing settings", Channel.PROBE: "measuring the link"}
        return names.get(self.channel, "averaging the loss")


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, by replica, each as long as the one sent to it. Bounded in time.

        Raises:
            ExchangeError: naming the exchange and the replicas that are missing.
        """
        ...


class Transport(Protocol):
    """A way from every replica to every other, for a fixed set of replicas; hashable, one object per way."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        ...

    @property
    def num_replicas(self) -> int:
        """M."""
        ...

    @property
    def ordered(self) -> bool:
        """True if messages are matched by their order, so that all must be started by one thread."""
        ...

    @property
    def device(self) -> torch.device:
        """The device whose memory payloads are sent from; others are copied to it."""
        ...

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Start sending each other replica its payload, and receiving one from each; returns at once.

        Args:
            payloads: a flat uint8 tensor for each other replica; must not change until the exchange is over.
                Every replica starts the same tag with payloads of the same lengths.
            tag: the name of the exchange.
        """
        ...

    @property
    def failure(self) -> str | None:
        """The other replica that has failed, and its reason; None as far as this one knows."""
        ...

    def abort(self, reason: str) -> None:
        """Tell the others that this replica has failed, so that they need not wait for it; bounded in time."""
        ...

    def finishing(self, step: int) -> AbstractContextManager[None]:
        """A context in which the replica waits for the others to reach its last step.

        Meanwhile, a replica that waits for a payload of a later step ends its wait: that payload never comes.
        """
        ...


@dataclass(frozen=True, eq=False)
class LoopbackExchange:
    """The exchange of a single replica (M = 1): a variant of Lookahead, and a way to try the engine."""

    replica: int = 0
    num_replicas: int = 1
    ordered: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    failure: str | None = None

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Send nothing."""
        assert not payloads, "a replica alone has nobody to send to"
        return _Nothing()

    def abort(self, reason: str) -> None:
        """Tell nobody."""

    def finishing(self, step: int) -> AbstractContextManager[None]:
        """A context that waits for nobody."""
        return nullcontext()


class _Nothing:
    def wait(self) -> dict[int, Tensor]:
        """The payloads of nobody."""
        return {}


class Group(Protocol):
    """The processes of one replica; all of them call the same methods in the same order."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def broadcast(self, values: Tensor) -> Tensor:
        """The first process's values; those of the others have the same shape and dtype."""
        ...

    def broadcast_numbers(self, numbers: Sequence[int]) -> list[int]:
        """The first process's whole numbers, up to 2^53; those of the others are as many, and are not used."""
        ...

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """The sum of all processes' values, or the largest, element by element; a GPU is not waited for."""
        ...

    def barrier(self) -> None:
        """Wait until every process has called it."""
        ...

    def fail_together(self, another: str) -> AbstractContextManager[None]:
        """A context that fails in all processes if the work in it fails in one.

        Args:
            another: the words for another process in messages.
        """
        ...


class OneProcess:
    """A replica that is one process: there is nobody to talk to."""

    index, size = 0, 1

    def broadcast(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def broadcast_numbers(self, numbers: Sequence[int]) -> list[int]:
        """The numbers."""
        return list(numbers)

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """The values."""
        return values

    def barrier(self) -> None:
        """Wait for nobody."""

    def fail_together(self, another: str) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()


class Store(Protocol):
    """A store of torch.distributed, or a board."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """A value that is there."""
        ...

    def add(self, key: str, number: int, /) -> int:
        """Add to a number, which begins at 0, and return the sum."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """True if all keys are there."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the present one is as expected, "" for none; returns the value that is there then."""
        ...


SAME_NUMBER_OF_STEPS = (
    "let all replicas take the same number of steps; where training may stop early, let all stop for a reason "
    "that all share, such as the loss of the outer parameters, or meet in a store, where each may stop by itself"
)
"""The remedy for replicas that end after different steps."""


def agree(
    transport: Transport,
    facts: Mapping[str, object],
    *,
    member: str = "replica",
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compare the facts of all replicas; each replica must call it.

    Args:
        transport: the way to the others.
        facts: a JSON value by name.
        member: the word for a replica in messages, where the transport joins other processes.
        remedies: by the names of facts what the user can do where they differ.

    Raises:
        ExchangeError: if a replica sends no facts.
        DisagreementError: on every replica, naming the first fact that differs, in their order, and both values.
    """
    mine = json.dumps(facts).encode()
    if len(set(swap(transport, hashlib.sha256(mine).digest()))) == 1:
        return
    # The values are long: they travel only when they are needed.
    everyones = share(transport, facts, dict[str, Any])
    for name in dict.fromkeys(name for facts in everyones for name in facts):
        values = [shown(facts[name]) if name in facts else "nothing of the kind" for facts in everyones]
        for replica, theirs in enumerate(everyones):
            if (name in theirs, theirs.get(name)) != (name in everyones[0], everyones[0].get(name)):
                raise DisagreementError(
                    f"the replicas disagree on {name}: {member} 0 has {values[0]}, {member} {replica} has "
                    f"{values[replica]}; {remedies.get(name, 'start them with the same settings')}"
                )


def share(transport: Transport, value: object, kind: Any = object) -> list[Any]:
    """The JSON values of all replicas, in replica order; each replica must call it.

    Args:
        transport: the way to the others.
        value: this replica's, of at most 64 MiB.
        kind: the type of every value, such as `list[int]`.

    Raises:
        ExchangeError: if a replica sends a longer value, or one of another type.
    """
    mine = json.dumps(value).encode()
    assert len(mine) <= _MOST_BYTES, f"a value of {len(mine)} bytes is no message about the run"
    lengths = [int.from_bytes(length, "little") for length in swap(transport, len(mine).to_bytes(8, "little"))]
    for replica, length in enumerate(lengths):
        if length > _MOST_BYTES:
            raise ExchangeError(f"replica {replica} announces a message of {length} bytes", (replica,))
    texts = swap(transport, mine.ljust(max(lengths)))
    return [_value(replica, text, kind) for replica, text in enumerate(texts)]


def barrier(transport: Transport) -> None:
    """Wait until every replica has called it.

    Raises:
        ExchangeError: if one does not come.
    """
    swap(transport, b"\0")


def _value(replica: int, text: bytes, kind: Any) -> Any:
    try:
        return msgspec.convert(json.loads(text), kind)
    except (ValueError, RecursionError) as error:  # msgspec's and json's errors are ValueErrors
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ExchangeError(
            f"replica {replica} sent a message that this version can't read ({reason}): install the same version "
            "of diloco everywhere",
            (replica,),
        ) from None


class Abortable(Protocol):
    """A way to the other replicas on which a failure can be posted."""

    def abort(self, reason: str) -> None:
        """Tell the other replicas the reason of a failure."""
        ...


@contextmanager
def fail_together(transport: Abortable) -> Iterator[None]:
    """Tell the other replicas what went wrong in this context, so that they need not wait for this one."""
    try:
        yield
    except Exception as error:
        transport.abort(str(error) or type(error).__name__)
        raise


_MOST_BYTES = 1 << 26

# The number of control messages on each transport: every replica sends them in the same order.
_NUM_MESSAGES: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()


def swap(transport: Transport, message: bytes) -> list[bytes]:
    """The messages of all replicas, in replica order; all have the same length, and each replica must call it."""
    _NUM_MESSAGES[transport] = _NUM_MESSAGES.get(transport, 0) + 1
    payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    others = {replica: payload for replica in range(transport.num_replicas) if replica != transport.replica}
    received = dict(transport.start(others, Tag(Channel.CONTROL, round=_NUM_MESSAGES[transport])).wait())
    received[transport.replica] = payload
    return [received[replica].cpu().numpy().tobytes() for replica in range(transport.num_replicas)]


def wait_for_all(
    missing: Callable[[], str], *, begin: float, seconds: float, where: str = "", remedy: str
) -> None:
    """Wait until nobody is missing; log who is, after 3 s, and again every minute, or where that changes.

    Of the processes of a machine that a launcher has numbered, the first alone logs it.

    Args:
        missing: names those that have not come, in words, such as `replica 1`; empty once all have.
        begin: when the wait began, by `time.monotonic`; several waits in a row may share it.
        seconds: how long it may take.
        remedy: what the user can do about those that do not arrive.
        where: the place at which they arrive, in words, such as ` at host:port`.

    Raises:
        ExchangeError: naming those that did not arrive in time.
    """
    is_logged = os.environ.get("LOCAL_RANK", "0") == "0"
    last_names, last_log = "", 0.0
    while names := missing():
        waited = time.monotonic() - begin
        if waited > seconds:
            raise ExchangeError(f"{names} did not arrive{where} within {seconds:g} s: {remedy}")
        silence = SECONDS_OF_SILENCE if names != last_names else SECONDS_BETWEEN_LINES
        if is_logged and waited > last_log + silence:
            _LOG.warning("waiting for %s%s, up to %.0f s more …", names, where, seconds - waited)
            last_names, last_log = names, waited
        time.sleep(min(max(waited / 4, _SECONDS_TO_LOOK_AGAIN), _SECONDS_BETWEEN_LOOKS))


SECONDS_OF_SILENCE = 3.0
"""Time after which a wait for others is logged."""
SECONDS_BETWEEN_LINES = 60.0
"""Time after which the same wait is logged again."""
_SECONDS_TO_LOOK_AGAIN = 0.001
"""Time after the first look: processes that one launcher has started arrive together."""
_SECONDS_BETWEEN_LOOKS = 0.05
_LOG = logging.getLogger("diloco")
