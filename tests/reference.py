"""Streaming DiLoCo (arXiv 2501.18512, Algorithm 1) in NumPy and in lock-step; shares nothing with the engine.

Legend: m of M replicas, p of P fragments, t of T steps, H sync period, τ overlap, α mixing, θ_m a replica's
parameters, Θ the outer parameters, v the momentum, Δ the outer gradient. Parameters are one float32 vector a
fragment. Every operation rounds to float32 on its own: nothing here is fused.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

f32 = np.float32
FirstSync = Literal["full_period", "early"]


def send_steps(H: int, P: int, offsets: Sequence[int] | None, first_sync: FirstSync, p: int, T: int) -> list[int]:
    """The steps t ≤ T that send fragment p: (t − t_p) mod H = 0, and t ≥ H unless the first sync is early."""
    t_p = p * H // P if offsets is None else offsets[p]
    earliest = {"full_period": H, "early": 1}[first_sync]
    return [t for t in range(1, T + 1) if t >= earliest and (t - t_p) % H == 0]


@dataclass
class Replica:
    """The state of one replica, lists over fragments: its parameters θ, and its own view of Θ and v."""

    theta: list[np.ndarray]
    Theta: list[np.ndarray]
    v: list[np.ndarray]


class History(NamedTuple):
    """steps[t][m] is replica m after step t (steps[0]: before the first), final[m] after the last drain."""

    steps: list[list[Replica]]
    final: list[Replica]


def run(
    theta0: list[np.ndarray],
    inner_step: Callable[[list[np.ndarray], int, int], list[np.ndarray]],
    T: int,
    H: int,
    P: int,
    taus: Sequence[int],
    alpha: float,
    M: int,
    eta: float,
    mu: float,
    codec: Callable[[np.ndarray, np.ndarray], np.ndarray],
    offsets: Sequence[int] | None = None,
    first_sync: FirstSync = "full_period",
    beta: float | None = None,
    second: Callable[[np.ndarray], np.ndarray] | None = None,
    amount: Callable[[int, range], float] = lambda m, steps: 1.0,
) -> History:
    """Train M replicas for T steps, then receive and apply what is in flight.

    inner_step(θ_m, m, t) returns the new θ_m; codec(Δ, Θ) is decode(encode(Δ)); β is that of error feedback; with
    a second codec, the averages of shares are sent in it (reduce_scatter). A replica's weight is in proportion
    to amount(m, steps) of the steps since the fragment's last send.
    """
    assert len(theta0) == P and len(taus) == M and all(0 <= tau < H for tau in taus)
    assert all(theta_p.dtype == f32 for theta_p in theta0)
    zeros = [np.zeros_like(theta_p) for theta_p in theta0]
    replicas = [Replica(deepcopy(theta0), deepcopy(theta0), deepcopy(zeros)) for _ in range(M)]
    sent_at = [send_steps(H, P, offsets, first_sync, p, T) for p in range(P)]
    errors = [deepcopy(zeros) for _ in range(M)]
    payloads = {}  # (sent step, fragment) -> the average of every replica's decoded Δ
    steps = [deepcopy(replicas)]

    for t in range(1, T + 1):
        for m, replica in enumerate(replicas):
            replica.theta = inner_step(replica.theta, m, t)
        for p in range(P):
            if t in sent_at[p]:
                sent, since = [], range(max([0, *(s for s in sent_at[p] if s < t)]) + 1, t + 1)
                for r, error in zip(replicas, errors, strict=True):
                    delta = r.Theta[p] - r.theta[p]
                    if beta is not None:
                        delta = delta + f32(beta) * error[p]
                    sent.append(_in_shares(codec, M, delta, r.Theta[p]) if second else codec(delta, r.Theta[p]))
                    error[p] = delta - sent[-1]
                payloads[t, p] = _average(sent, [amount(m, since) for m in range(M)])
                if second:
                    payloads[t, p] = _in_shares(second, M, payloads[t, p])
        for m, replica in enumerate(replicas):
            for sent, p in sorted(payloads):
                if sent == t - taus[m]:
                    _receive(replica, p, payloads[sent, p], alpha, eta, mu)
        steps.append(deepcopy(replicas))

    for m, replica in enumerate(replicas):
        for sent, p in sorted(payloads):
            if sent > T - taus[m]:
                _receive(replica, p, payloads[sent, p], alpha, eta, mu)
    return History(steps, replicas)


def _in_shares(codec: Callable[..., np.ndarray], M: int, *vectors: np.ndarray) -> np.ndarray:
    """Each of M shares of equal length through a codec of its own; zeros fill up the last."""
    num = len(vectors[0])
    zeros = np.zeros(M * max(1, -(-num // M)) - num, f32)
    shares = [np.split(np.concatenate([vector, zeros]), M) for vector in vectors]
    return np.concatenate([codec(*parts) for parts in zip(*shares, strict=True)])[:num]


def _average(deltas: list[np.ndarray], amounts: list[float]) -> np.ndarray:
    """Σ_m w_m Δ_m / Σ_m w_m, added up in replica order; the largest weight is 1."""
    weights = [amount / max(amounts) for amount in amounts]
    total, *others = (f32(w) * delta for w, delta in zip(weights, deltas, strict=True))
    for other in others:
        total = total + other
    return total / f32(sum(weights))


def _receive(replica: Replica, p: int, delta: np.ndarray, alpha: float, eta: float, mu: float) -> None:
    """v ← μ·v + Δ; Θ ← Θ − η·(Δ + μ·v); θ ← α·θ + (1 − α)·Θ."""
    replica.v[p] = f32(mu) * replica.v[p] + delta
    replica.Theta[p] = replica.Theta[p] - f32(eta) * (delta + f32(mu) * replica.v[p])
    replica.theta[p] = f32(alpha) * replica.theta[p] + f32(1 - alpha) * replica.Theta[p]
