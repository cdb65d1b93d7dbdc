"""Changes of files and JSON that an attacker, or a bad disk, might make; a pickle that shows if it is loaded."""

import copy
import pickle
import random
from pathlib import Path
from typing import Any

from hypothesis import settings

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 1 << 40, 1 << 63, -(1 << 70), 0.5, -0.0, 1e308),
    *("", "x", "../../x", "/etc/passwd", "\0", [], {}, [[]], [1, 2], ["a"], {"a": 1}, {"": {}}),
)


class Hostile:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def hostile_pickle(marker: Path) -> bytes:
    return pickle.dumps(Hostile(marker))


def generator(seed: int = 0) -> random.Random:
    """The source of a test's mutations: the same ones in every run, and with --hostile-examples other ones."""
    return random.Random(seed if settings.get_profile("hostile").derandomize else None)


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip bits, cut, repeat or insert."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(changed) + 1) if rng.random() < 0.5 else rng.randrange(min(len(changed), 600) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + rng.choice((1, 8, 1 << 20))]
        elif kind == 2:
            changed[at:at] = changed[at : at + 20]
        else:
            changed[at:at] = rng.choice(
                (b"\0", b"{", b"[" * 2000, b"\xff", b'"', b"9" * 400, b"NaN", b"-1", b"1e999", b"null")
            )
    return bytes(changed)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Replace, remove or add one value somewhere."""
    value = copy.deepcopy(value)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return value
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and rng.random() < 0.8:
            at = at[key]
            continue
        kind = rng.randrange(6)
        if kind == 0:
            del at[key]
        elif kind == 1 and isinstance(at, dict):
            at[rng.choice(("", "x", "__metadata__", "../x"))] = rng.choice(VALUES)
        else:
            at[key] = rng.choice(VALUES)
        return value
