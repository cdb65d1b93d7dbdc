"""The bill of a run in a store, by list prices.

They leave out storage, free tiers, discounts and taxes, and what the replicas' own providers take for egress.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The prices of a store's provider, in US dollars."""

    name: str
    per_million_creates: float
    """PUT and LIST."""
    per_million_gets: float
    per_gb_down: float
    """For each 10⁹ bytes that leave the provider's region."""


# S3 Standard in us-east-1, the first 10 TB a month to the internet: https://aws.amazon.com/s3/pricing/, 2026-11.
S3 = Prices(name="S3", per_million_creates=5.0, per_million_gets=0.4, per_gb_down=0.09)
# Class A and Class B operations: https://developers.cloudflare.com/r2/pricing/, 2026-11.
R2 = Prices(name="R2", per_million_creates=4.5, per_million_gets=0.36, per_gb_down=0.0)
PROVIDERS = (S3, R2)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests and bytes of all replicas."""

    creates: float
    gets: float
    bytes_up: float
    bytes_down: float

    def dollars(self, prices: Prices) -> float:
        """Its price.

        >>> traffic = Traffic(creates=1e6, gets=1e6, bytes_up=1e12, bytes_down=1e12)
        >>> traffic.dollars(S3), traffic.dollars(R2)
        (95.4, 4.86)
        """
        requests = self.creates * prices.per_million_creates + self.gets * prices.per_million_gets
        return round(requests / 1e6 + self.bytes_down / 1e9 * prices.per_gb_down, 6)


def polling(num_replicas: int, *, poll_seconds: float, seconds: float) -> Traffic:
    """The requests of replicas that look for something new: each asks for an entry and for the others' payloads.

    >>> polling(3, poll_seconds=0.5, seconds=86400).dollars(S3)
    0.62208
    """
    gets = num_replicas**2 * seconds / poll_seconds
    return Traffic(creates=0, gets=gets, bytes_up=0, bytes_down=0)
