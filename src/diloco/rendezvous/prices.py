"""The bill of a run in a store, by list prices, those of prices.toml or of a user's file.

They leave out storage, free tiers, discounts and taxes, and what the replicas' own providers take for egress.
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from diloco.errors import FileError
from diloco.schema import converted, read_bytes

_Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The prices of a store, in US dollars."""

    name: str
    cloud: str = ""
    """Its provider; traffic with machines in the same cloud is free."""
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
    try:
        values = tomllib.loads(read_bytes(path, most_bytes=1 << 20).decode())
    except ValueError as error:
        raise FileError(f"{path} can't be read: {error}") from error
    return converted(values, PriceTable, source=str(path))


PROVIDERS = read_prices().stores
S3, R2 = PROVIDERS
_BYTES_OF_A_SHARE_IN_A_HEADER = 90
"""Length of a share's digest and norm in a header."""


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
    num_replicas: int,
    num_payloads: float,
    num_steps: float,
    payload_bytes: float,
    average_bytes: float = 0,
    num_shares: int = 1,
) -> Traffic:
    """The objects of outer steps: payloads, entries, and averages where there are shares; all replicas together.

    With one share each payload is read by all others. With R, its header is; each of its shares is read by the one
    that averages it, and each average by all.

    Args:
        num_replicas: M, replicas that read.
        num_payloads: payloads of all outer steps.
        num_steps: outer steps.
        payload_bytes: of one payload, all its shares together.
        average_bytes: of the averages of an outer step, all shares together.
        num_shares: R.

    >>> exchange(num_replicas=8, num_payloads=8, num_steps=1, payload_bytes=1e6)
    Traffic(creates=9, gets=64, bytes_up=8000000.0, bytes_down=56000000.0)
    >>> of_shares = {"payload_bytes": 1e6, "average_bytes": 1e6, "num_shares": 8}
    >>> exchange(num_replicas=8, num_payloads=8, num_steps=1, **of_shares)
    Traffic(creates=81, gets=176, bytes_up=9000000.0, bytes_down=14040320.0)
    """
    others = max(0, num_replicas - 1)
    creates, gets = num_payloads + num_steps, num_replicas * num_steps + others * num_payloads
    bytes_up = num_payloads * payload_bytes
    if num_shares == 1:
        return Traffic(creates=creates, gets=gets, bytes_up=bytes_up, bytes_down=others * bytes_up)
    averaged = num_payloads - num_steps  # who averages a share has its own
    return Traffic(
        creates=creates + num_shares * (num_payloads + num_steps),
        gets=gets + num_shares * (averaged + others * num_steps),
        bytes_up=bytes_up + num_steps * average_bytes,
        bytes_down=averaged * payload_bytes
        + others * (num_steps * average_bytes + num_payloads * num_shares * _BYTES_OF_A_SHARE_IN_A_HEADER),
    )


def longest_poll(poll_seconds: float, overlap_seconds: float) -> float:
    """The time between two looks for a payload that does not come, where τ inner steps take `overlap_seconds`."""
    return max(poll_seconds, min(overlap_seconds / 8, 30.0))


def polling(
    num_replicas: int,
    *,
    poll_seconds: float,
    seconds: float,
    longest_seconds: float = 0.0,
    num_payloads: float = 0,
) -> Traffic:
    """The requests of replicas that look for something new: each asks for an entry and for the others' payloads.

    Args:
        num_replicas: M.
        poll_seconds: time between two looks for an entry, and the first time after a payload.
        seconds: of the run.
        longest_seconds: time to which that between two looks for a payload doubles, from `longest_poll`.
        num_payloads: payloads of all replicas, after each of which it is short again.

    >>> polling(3, poll_seconds=0.5, seconds=86400).dollars(S3)
    0.62208
    >>> polling(1000, poll_seconds=0.5, seconds=3600, longest_seconds=15, num_payloads=36_000).dollars(R2)
    152.435309
    """
    longest = max(poll_seconds, longest_seconds)
    doubled = num_payloads * math.log2(longest / poll_seconds)
    gets = num_replicas * seconds / poll_seconds + (num_replicas - 1) * (
        num_replicas * seconds / longest + doubled
    )
    return Traffic(creates=0, gets=gets, bytes_up=0, bytes_down=0)
