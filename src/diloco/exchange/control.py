"""Messages between replicas about the run itself: compare what they believe, share values."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diloco.errors import DisagreementError
from diloco.exchange.transport import ABOUT_THE_RUN, Exchange


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
