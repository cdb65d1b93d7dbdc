"""The bill of a run in a store, by list prices, those of prices.toml or of a user's file.

They leave out storage, free tiers, discounts and taxes, and what the replicas' own providers take for egress.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from diloco.schema import converted, read_toml

_Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The prices of a store, in US dollars."""

    name: str
    cloud: str = ""
    """The provider; traffic with machines in the same cloud is free."""
    per_million_creates: _Price
    """The price of a million requests PUT and LIST."""
    per_million_gets: _Price
    per_gb_down: _Price
    """The price of 10⁹ bytes that leave the provider's region."""


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """The prices of several stores."""

    date: str
    """Year and month in which they were read."""
    stores: tuple[Prices, ...]


def read_prices(path: Path | None = None) -> PriceTable:
    """The price table of a TOML file; None is our own.

    Raises:
        FileError: if it is no such file, naming what is wrong.

    >>> [store.name for store in read_prices().stores]
    ['S3', 'R2']
    """
    path = path or Path(__file__).with_name("prices.toml")
    return converted(read_toml(path), PriceTable, source=str(path))


PROVIDERS = read_prices().stores
S3, R2 = PROVIDERS
# Lengths of what a run without keys writes; an index grows with the replicas that ever joined.
_BYTES_OF_AN_ENTRY, _BYTES_OF_A_MEMBER, _BYTES_OF_A_HEADER, _BYTES_OF_AN_INDEX = 240, 200, 384, 12_000
_LOOKS_IN_VAIN = 0.75
"""Looks for an average that is not there yet, before the one that gets it; more where links are slow."""
_BYTES_OF_A_SHARE_IN_A_HEADER = 90
"""Length of a share's digest and norm in a header."""
_LISTINGS_OF_AN_INDEX = 4
"""Listings after which the writer of an index deletes what nobody needs."""
_POLLS_PER_CHECK = 60
"""Looks for an entry, after which a replica sees whether the newest that it knows is there."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests and bytes of all replicas."""

    creates: float
    gets: float
    bytes_up: float
    bytes_down: float

    def dollars(self, prices: Prices) -> float:
        """The price of the traffic.

        >>> traffic = Traffic(creates=1e6, gets=1e6, bytes_up=1e12, bytes_down=1e12)
        >>> traffic.dollars(S3), traffic.dollars(R2)
        (95.4, 4.86)
        """
        requests = self.creates * prices.per_million_creates + self.gets * prices.per_million_gets
        return round(requests / 1e6 + self.bytes_down / 1e9 * prices.per_gb_down, 6)

    def __add__(self, other: "Traffic") -> "Traffic":
        """The sum of two traffics."""
        return Traffic(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def exchange(
    *,
    num_replicas: float,
    num_payloads: float,
    num_steps: float,
    payload_bytes: float,
    average_bytes: float = 0,
    num_shares: int = 1,
) -> Traffic:
    """The objects of outer steps: payloads, entries, and averages where there are shares; all replicas together.

    With one share each payload is read by all others. With R, its header is; each of its shares is read by the one
    that averages it, and each average by all. An entry is read by all but its author, who reads the one before it
    twice, to see that the log is there.

    Args:
        num_replicas: M, replicas that read.
        num_payloads: payloads of all outer steps.
        num_steps: outer steps.
        payload_bytes: of one payload, all its shares together.
        average_bytes: of the averages of an outer step, all shares together.
        num_shares: R.

    >>> exchange(num_replicas=8, num_payloads=8, num_steps=1, payload_bytes=1e6)
    Traffic(creates=9, gets=65, bytes_up=8004912.0, bytes_down=56038064.0)
    >>> of_shares = {"payload_bytes": 1e6, "average_bytes": 1e6, "num_shares": 8}
    >>> exchange(num_replicas=8, num_payloads=8, num_steps=1, **of_shares)
    Traffic(creates=81, gets=219.0, bytes_up=9013744.0, bytes_down=14099888.0)
    """
    others = max(0, num_replicas - 1)
    creates, gets = num_payloads + num_steps, (num_replicas + 1) * num_steps + others * num_payloads
    entry_bytes = _BYTES_OF_AN_ENTRY * num_steps + _BYTES_OF_A_MEMBER * num_payloads
    header_bytes = _BYTES_OF_A_HEADER * num_payloads
    bytes_down = (num_replicas + 1) * entry_bytes + others * header_bytes
    if num_shares == 1:
        sent = num_payloads * payload_bytes
        return Traffic(
            creates=creates,
            gets=gets,
            bytes_up=sent + entry_bytes + header_bytes,
            bytes_down=bytes_down + others * sent,
        )
    averaged = num_payloads - num_steps  # a replica that averages a share has its own payload of it
    average_bytes += num_shares * _BYTES_OF_A_HEADER
    header_bytes += num_payloads * num_shares * _BYTES_OF_A_SHARE_IN_A_HEADER
    return Traffic(
        creates=creates + num_shares * (num_payloads + num_steps),
        gets=gets + num_shares * (averaged + (1 + _LOOKS_IN_VAIN) * others * num_steps),
        bytes_up=num_payloads * payload_bytes + num_steps * average_bytes + entry_bytes + header_bytes,
        bytes_down=bytes_down
        + averaged * payload_bytes
        + others * (num_steps * average_bytes + num_payloads * num_shares * _BYTES_OF_A_SHARE_IN_A_HEADER),
    )


def longest_poll(poll_seconds: float, overlap_seconds: float) -> float:
    """The time between two looks for a payload that does not come, where τ inner steps take `overlap_seconds`."""
    return max(poll_seconds, min(overlap_seconds / 8, 30.0))


def polling(
    num_replicas: float,
    *,
    poll_seconds: float,
    seconds: float,
    longest_seconds: float = 0.0,
    num_payloads: float = 0,
    num_steps: float = 0,
    num_entries: float = 0,
    round_trip_seconds: float = 0.0,
) -> Traffic:
    """The requests of replicas that look for something new: each asks for an entry and for the others' payloads.

    A replica asks for an entry every p seconds, and whenever a payload or an entry comes: in a step n times,
    at random within the w seconds between two looks for a payload, which adds n / (1 − e^(−n p / w)) − w / p − 1/2
    requests. The time between two looks for a payload doubles from p to w, in
    whole p: if it comes after t seconds, it was looked for t / w + log₂(w/p) − 1 + p/w times. Each look takes a
    round trip longer.

    Args:
        num_replicas: M.
        poll_seconds: p.
        seconds: of the run.
        longest_seconds: w, from `longest_poll`.
        num_payloads: payloads of all replicas.
        num_steps: outer steps.
        num_entries: of the log; n is (num_payloads + num_entries) / num_steps.
        round_trip_seconds: of a request.

    >>> round(polling(3, poll_seconds=0.5, seconds=86400).dollars(S3), 3)
    0.626
    >>> round(
    ...     polling(1000, poll_seconds=0.5, seconds=3600, longest_seconds=15, num_payloads=36_000).dollars(R2), 1
    ... )
    140.0
    """
    ratio = max(1, round(longest_seconds / poll_seconds))  # w / p
    looks, seldom = (
        seconds / (poll_seconds + round_trip_seconds),
        seconds / (ratio * poll_seconds + round_trip_seconds),
    )
    again = 0.0
    if num_steps:
        events = (num_payloads + num_entries) / num_steps
        again = num_steps * (events / -math.expm1(-events / ratio) - ratio - 0.5)
    gets = num_replicas * (looks * (1 + 1 / _POLLS_PER_CHECK) + again)
    doubled = num_payloads * (math.log2(ratio) - 1 + 1 / ratio)
    gets += max(0, num_replicas - 1) * (num_replicas * seldom + doubled)
    return Traffic(creates=0, gets=gets, bytes_up=0, bytes_down=0)


def snapshots(
    *,
    num_replicas: float,
    num_fragments: int,
    num_steps: float,
    num_joins: float,
    state_bytes: float,
    payload_bytes: float,
    snapshot_rounds: int,
) -> Traffic:
    """The objects from which joiners start, and what joiners read.

    Of each fragment every S-th round is uploaded, with an entry; with the first fragment's an index is written,
    and the store is listed for what nobody needs any more. A joiner lists the store twice, reads the newest index,
    the newest snapshots, the S P / 2 entries after them with their payloads or averages, and writes an entry.

    Args:
        num_replicas: M.
        num_fragments: P.
        num_steps: outer steps.
        num_joins: replicas that join after the start.
        state_bytes: of Θ and the outer momentum.
        payload_bytes: that are read for an outer step.
        snapshot_rounds: S.
    """
    written = num_steps / snapshot_rounds
    indexes, replayed = written / num_fragments, num_joins * num_fragments * snapshot_rounds / 2
    entries = written + num_joins
    return Traffic(
        creates=2 * written + (1 + _LISTINGS_OF_AN_INDEX) * indexes + 3 * num_joins,
        gets=(num_replicas + 1) * entries + num_joins * (3 + num_fragments) + replayed * (1 + num_replicas),
        bytes_up=written * state_bytes / num_fragments
        + indexes * _BYTES_OF_AN_INDEX
        + entries * _BYTES_OF_AN_ENTRY,
        bytes_down=(num_replicas + 1) * entries * _BYTES_OF_AN_ENTRY
        + num_joins * (state_bytes + _BYTES_OF_AN_INDEX)
        + replayed * payload_bytes,
    )


def run_traffic(
    *,
    num_replicas: float,
    num_fragments: int,
    num_payloads: float,
    num_steps: float,
    payload_bytes: float,
    seconds: float,
    poll_seconds: float,
    longest_seconds: float,
    round_trip_seconds: float = 0.0,
    num_shares: int = 1,
    num_joins: float = 0,
    state_bytes: float = 0,
    snapshot_rounds: int = 8,
) -> Traffic:
    """All traffic of a run, as `exchange`, `polling` and `snapshots` count it; averages have a payload's size."""
    is_gather = num_shares == 1
    steps = {"num_replicas": num_replicas, "num_steps": num_steps}
    return (
        exchange(
            **steps,
            num_payloads=num_payloads,
            payload_bytes=payload_bytes,
            average_bytes=0 if is_gather else payload_bytes,
            num_shares=num_shares,
        )
        + polling(
            **steps,
            poll_seconds=poll_seconds,
            seconds=seconds,
            longest_seconds=longest_seconds,
            num_payloads=num_payloads,
            num_entries=num_steps * (1 + 1 / snapshot_rounds) + num_joins,
            round_trip_seconds=round_trip_seconds,
        )
        + snapshots(
            **steps,
            num_fragments=num_fragments,
            num_joins=num_joins,
            state_bytes=state_bytes,
            payload_bytes=payload_bytes * (num_payloads / max(num_steps, 1e-9) if is_gather else 1),
            snapshot_rounds=snapshot_rounds,
        )
    )
