"""The offline replay of a run's log in NumPy, from the objects in its directory; shares nothing with diloco.

Legend: Θ the outer parameters, v the momentum, Δ the outer gradient; a float32 vector for each fragment.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from tests.wire import reference as wire_reference

f32 = np.float32


class Replayed(NamedTuple):
    """A run as its log tells it."""

    outer: list[list[np.ndarray]]
    """Θ_p after each round, by fragment; the first is the initial one."""
    contributions: list[dict]
    """Every contribution of every outer entry, in the order of the log, with the entry's `fragment`."""
    entries: list[dict]


def replayed(
    folder: str | Path,
    theta0: Sequence[np.ndarray],
    *,
    wire: str = "fp32",
    seed: int = 0,
    eta: float = 0.4,
    mu: float = 0.9,
) -> Replayed:
    """Replay the log of a run, checking its chain and every Θ that it names."""
    outer = [[theta_p] for theta_p in theta0]
    v = [np.zeros_like(theta_p) for theta_p in theta0]
    entries = chain(folder)
    contributions: list[dict] = []
    for entry in entries:
        body = entry["body"]
        if entry["kind"] != "outer":
            continue
        p = body["fragment"]
        assert body["round"] == len(outer[p]), "rounds are consecutive"
        assert int(body["before"], 16) == xxhash.xxh3_64_intdigest(outer[p][-1].tobytes())
        most = max(c["tokens"] for c in body["contributions"])
        total, weight = None, 0.0
        for c in body["contributions"]:
            delta = f32(c["tokens"] / most) * _decoded(folder, c, wire, seed, p, len(theta0[p]))
            total = delta if total is None else total + delta
            weight += c["tokens"] / most
            contributions.append(c | {"fragment": p})
        assert total is not None
        average = total / f32(weight)
        v[p] = f32(mu) * v[p] + average
        outer[p].append(outer[p][-1] - f32(eta) * (average + f32(mu) * v[p]))
    told = [(c["replica"], c["seq"]) for c in contributions]
    assert len(told) == len(set(told)), "no payload is counted twice"
    return Replayed(outer, contributions, entries)


def chain(folder: str | Path) -> list[dict]:
    """The entries of a log without holes, each chained to the one before it."""
    paths = sorted(Path(folder, "log").glob("[0-9]" * 10))  # an entry that is being written has a longer name
    assert [path.name for path in paths] == [f"{k:010d}" for k in range(len(paths))]
    entries, previous = [], ""
    for path in paths:
        data = path.read_bytes()
        entries.append(json.loads(data.split(b"\n")[0]))
        assert entries[-1]["previous"] == previous
        previous = hashlib.sha256(data).hexdigest()
    return entries


def _decoded(folder: str | Path, c: dict, wire: str, seed: int, p: int, num_elements: int) -> np.ndarray:
    data = Path(folder, "payloads", str(c["replica"]), f"{c['seq']:08d}").read_bytes()
    magic, length, _ = struct.unpack_from("<4sI64s", data)
    line = data[72 : 72 + length]
    header = json.loads(line)
    assert magic == b"DLP1" and hashlib.sha256(line).hexdigest() == c["sha256"]
    assert header["replica"] == c["replica"] and header["fragment"] == p and header["tokens"] == c["tokens"]
    key = (seed, p, c["base_round"] + 1, c["replica"], 0)
    return wire_reference.decode(wire, data[72 + length :], num_elements, key)
