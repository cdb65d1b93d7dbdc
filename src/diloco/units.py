"""Numbers as people write them: counts such as 124M, and rates of links such as 20Mbit."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_RATE = re.compile(r"([0-9.,_]+(?:e[+-]?[0-9]+)?)\s*([kKMGT]?)(?:(b|bit)(?:ps|/s)?|(B|Byte)(?:ps|/s))", re.ASCII)
_THOUSANDS = re.compile(r"(?<!^0),(?=[0-9]{3}(?![0-9]))")
"""A comma before three digits, but not after a 0 alone; any other may be a decimal one, which float refuses."""


def count(text: str) -> float:
    """The number that a text such as 124M, 1.3B, 1e9 or 1_000 means.

    Raises:
        ValueError: if it is none.

    >>> count("124M"), count("1.3b"), count("1,000")
    (124000000.0, 1300000000.0, 1000.0)
    """
    word = _THOUSANDS.sub("", text.strip().lower())
    unit = word[-1:] if word[-1:] in "kmgbt" and word[:-1] else ""
    return float(word.removesuffix(unit)) * _FACTORS[unit]


def amount(number: float) -> str:
    """A count as people write it.

    >>> amount(124e6), amount(2.48e9), amount(30e12), amount(4096)
    ('124M', '2.48B', '30T', '4,096')
    """
    for unit in "tbm":
        if number >= _FACTORS[unit]:
            return f"{number / _FACTORS[unit]:,.4g}{unit.upper()}"
    return f"{number:,.0f}"


def gbit_s(text: str) -> float:
    """The rate in Gbit/s that a text such as 20Mbit, 1Gbit/s, 20Mbps or 2.5MB/s means; a bare number has no
    unit, and 20MB may be meant for 20Mbit.

    Raises:
        ValueError: if it is none.

    >>> gbit_s("20Mbit"), gbit_s("1 Gbit/s"), gbit_s("2.5MB/s")
    (0.02, 1.0, 0.02)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no rate")
    bits = 8 if match[4] else 1
    return float(_THOUSANDS.sub("", match[1])) * _FACTORS[match[2].lower()] * bits / 1e9


def rate(gbit_s: float) -> str:
    """A rate of so many Gbit/s, as people write it.

    >>> rate(0.02), rate(3.97), rate(0.0002), rate(0.9999)
    ('20 Mbit/s', '3.97 Gbit/s', '0.2 Mbit/s', '0.9999 Gbit/s')
    """
    return f"{gbit_s:.4g} Gbit/s" if gbit_s >= 0.9995 else f"{1000 * gbit_s:.3g} Mbit/s"


@dataclass(frozen=True)
class Reader:
    """The way in which a command line reads a field's numbers."""

    read: Callable[[str], float]
    """The number that a word means; it raises ValueError for a word that is none."""
    expected: str
    """The words that it takes."""


_AMOUNT = Reader(count, "a number such as 124M, 1.3B or 1e9")
_RATE_OF_LINK = Reader(gbit_s, "a rate with its unit, such as 20Mbit, 1Gbit or 2.5MB/s")

Amount = Annotated[float, _AMOUNT]
"""A number of parameters, tokens or operations."""
Amounts = Annotated[tuple[float, ...], _AMOUNT]
"""Several of them."""
Rate = Annotated[float, _RATE_OF_LINK]
"""A rate in Gbit/s."""
Rates = Annotated[tuple[float, ...], _RATE_OF_LINK]
"""Several of them."""
