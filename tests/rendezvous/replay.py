"""The offline replay of a run's log in NumPy, from the objects in its directory; shares nothing with diloco.

Legend: Θ the outer parameters, v the momentum, Δ the outer gradient; a float32 vector for each fragment.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.outer import reference as outer_reference
from tests.wire import reference as wire_reference

f32 = np.float32


class Replayed(NamedTuple):
    """A run as its log tells it."""

    outer: list[list[np.ndarray]]
    """Θ_p after each round, by fragment; the first is the initial one."""
    contributions: list[dict]
    """Every contribution of every outer entry, in the order of the log, with the fragment and round."""
    entries: list[dict]


def replayed(
    folder: str | Path,
    theta0: Sequence[np.ndarray],
    *,
    wire: str = "fp32",
    second: str | None = None,
    seed: int = 0,
    eta: float = 0.4,
    mu: float = 0.9,
    restarts: Callable[[int, int], bool] = lambda p, number: False,
) -> Replayed:
    """Replay the log of a run, checking its chain, every Θ that it names, and every average of a share.

    Args:
        folder: of the run.
        theta0: the initial Θ.
        wire: the codec.
        second: the codec of averages; the first by default.
        seed: of the run.
        eta: outer learning rate.
        mu: outer momentum.
        restarts: true for the fragments and rounds in which v restarts at 0.
    """
    outer = [[theta_p] for theta_p in theta0]
    v = [np.zeros_like(theta_p) for theta_p in theta0]
    entries = chain(folder)
    joins = (entry for entry in entries if entry["kind"] == "join")
    bridges = {e["author"] for e in joins if e["body"]["name"] == entries[0]["body"]["rules"]["bridge"]}
    contributions: list[dict] = []
    for k, entry in enumerate(entries):
        body = entry["body"]
        if entry["kind"] != "outer":
            continue
        p = body["fragment"]
        assert body["round"] == len(outer[p]), "rounds are consecutive"
        assert int(body["before"], 16) == outer_reference.digest(outer[p][-1])
        contributions += [c | {"fragment": p, "round": body["round"]} for c in body["contributions"]]
        num_shares, N = entries[0]["body"]["rules"]["num_shares"], len(theta0[p])
        if num_shares == 1:
            average = _average([(c, payload_of(folder, c, wire, seed, p, N)) for c in body["contributions"]], N)
        else:
            shares = (_share(folder, k, body, r, wire, second or wire, seed, N) for r in range(num_shares))
            average = np.concatenate([*shares])[:N]
        if bridges & {c["replica"] for c in body["contributions"]}:
            assert len(body["contributions"]) == 1, "a shift is the bridge's alone"
            outer[p].append(outer[p][-1] - average)
            continue
        v[p] = (0 if restarts(p, body["round"]) else f32(mu)) * v[p] + average
        outer[p].append(outer[p][-1] - f32(eta) * (average + f32(mu) * v[p]))
    pairs = [(c["replica"], c["seq"]) for c in contributions]
    assert len(pairs) == len(set(pairs)), "no payload is counted twice"
    return Replayed(outer, contributions, entries)


def _average(deltas: Sequence[tuple[dict, np.ndarray]], num_elements: int) -> np.ndarray:
    """Weighted by tokens, summed in the order of the replicas."""
    most = max((c["tokens"] for c, _ in deltas), default=1)
    total, weight = None, 0.0
    for c, decoded in deltas:
        delta = f32(c["tokens"] / most) * decoded
        total = delta if total is None else total + delta
        weight += c["tokens"] / most
    return np.zeros(num_elements, f32) if total is None else total / f32(weight)


def _share(
    folder: str | Path, k: int, body: dict, r: int, wire: str, second: str, seed: int, num_elements: int
) -> np.ndarray:
    """The decoded average of one share, which is that of the store if it has one."""
    num_shares = len(_header(folder, body["contributions"][0])[0]["sha256"])
    S = max(1, -(-num_elements // num_shares))
    deltas, p = [], body["fragment"]
    for c in body["contributions"]:
        header, _ = _header(folder, c)
        path = Path(folder, "payloads", str(c["replica"]), f"{c['seq']:08d}-{r}")
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == header["sha256"][r]:
            key = (seed, p, c["base_round"] + 1, c["replica"], r)
            deltas.append((c, wire_reference.decode(wire, path.read_bytes(), S, key)))
    key = (seed, p, body["round"], body["contributions"][-1]["replica"] + 1, r)
    payload = wire_reference.encode(second, _average(deltas, S), key)
    stored = Path(folder, "averages", f"{k:010d}", str(r))
    assert not stored.exists() or stored.read_bytes().endswith(payload)
    return wire_reference.decode(second, payload, S, key)


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


def _header(folder: str | Path, c: dict) -> tuple[dict, bytes]:
    """The header and the body of a payload object."""
    data = Path(folder, "payloads", str(c["replica"]), f"{c['seq']:08d}").read_bytes()
    line, _, body = data.split(b"\n", 2)
    header = json.loads(line)
    assert hashlib.sha256(line).hexdigest() == c["sha256"]
    assert header["replica"] == c["replica"] and header["tokens"] == c["tokens"]
    return header, body


def payload_of(folder: str | Path, c: dict, wire: str, seed: int, p: int, num_elements: int) -> np.ndarray:
    """A contribution's outer gradient, decoded."""
    header, body = _header(folder, c)
    assert header["fragment"] == p
    return wire_reference.decode(wire, body, num_elements, (seed, p, c["base_round"] + 1, c["replica"], 0))
