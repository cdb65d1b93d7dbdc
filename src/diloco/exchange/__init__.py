"""How the bytes of one fragment reach the other replicas: one file a transport.

Numbers live above this contract, sockets below it. A transport moves flat uint8 tensors and knows nothing of what
they mean.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class ExchangeError(RuntimeError):
    """Some replicas' payloads did not arrive; on gloo, the process group is of no use after that."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message, missing)
        self.missing = missing
        """The replicas whose payload is missing."""

    def __str__(self) -> str:
        return self.args[0]


class DisagreementError(ValueError):
    """The replicas differ in something that they must agree on."""


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, by replica, each as long as the one sent to it. Bounded in time.

        Raises:
            ExchangeError: naming the fragment, the round and the replicas that are missing.
        """
        ...


class Exchange(Protocol):
    """A way from every replica to every other."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        ...

    @property
    def num_replicas(self) -> int:
        """M."""
        ...

    def start(self, payloads: Mapping[int, Tensor], fragment: int, round: int, phase: int = 0) -> Pending:
        """Start sending each other replica its payload, and receiving one from each; returns at once.

        Every replica starts the same (fragment, round, phase), once, with payloads of the same lengths.

        Args:
            payloads: a flat uint8 tensor for each other replica; must not change until the exchange is over.
            fragment: index of the fragment, from 0; −1 is for messages about the run itself.
            round: how often the fragment has been sent, from 1.
            phase: which leg of an exchange that has several.
        """
        ...


ABOUT_THE_RUN = -1


def agree(exchange: Exchange, facts: Mapping[str, object], *, member: str = "replica") -> None:
    """Compare what every replica believes about the run; each replica must call it.

    Args:
        exchange: the way to the others.
        facts: a name and a JSON value each.
        member: what the exchange calls a replica, if that is something else.

    Raises:
        DisagreementError: on every replica, naming the first fact that differs, in their order, and both values.
    """
    mine = json.dumps(facts).encode()
    if len(set(_swap(exchange, hashlib.sha256(mine).digest()))) == 1:
        return
    # The values are long: they travel only when they are needed.
    believed: list[dict[str, object]] = share(exchange, facts)
    for name in dict.fromkeys(name for facts in believed for name in facts):
        values = [_short(facts[name]) if name in facts else "nothing of the kind" for facts in believed]
        for replica, theirs in enumerate(believed):
            if (name in theirs, theirs.get(name)) != (name in believed[0], believed[0].get(name)):
                raise DisagreementError(
                    f"the replicas disagree on {name}: {member} 0 has {values[0]}, {member} {replica} has "
                    f"{values[replica]}; start them with the same settings"
                )


def share(exchange: Exchange, value: Any) -> list[Any]:
    """Every replica's JSON value, in replica order; each replica must call it."""
    mine = json.dumps(value).encode()
    lengths = _swap(exchange, len(mine).to_bytes(8, "little"))
    longest = max(int.from_bytes(length, "little") for length in lengths)
    return [json.loads(text) for text in _swap(exchange, mine.ljust(longest))]


# How many messages about the run each exchange has carried: every replica sends them in the same order.
_NUM_MESSAGES: WeakKeyDictionary[Exchange, int] = WeakKeyDictionary()


def _swap(exchange: Exchange, message: bytes) -> list[bytes]:
    """Every replica's message of one length, in replica order."""
    _NUM_MESSAGES[exchange] = _NUM_MESSAGES.get(exchange, 0) + 1
    payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    others = {replica: payload for replica in range(exchange.num_replicas) if replica != exchange.replica}
    received = dict(exchange.start(others, ABOUT_THE_RUN, _NUM_MESSAGES[exchange]).wait())
    received[exchange.replica] = payload
    return [received[replica].cpu().numpy().tobytes() for replica in range(exchange.num_replicas)]


def _short(value: object, most: int = 200) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}…"
