"""Methods to compare a store's log with, on the same fleet: fixed members, and Data-Parallel.

`data_parallel` all-reduces every gradient, `fixed` exchanges outer gradients in a group: both stop at each failure
until the machine is back, and go on from the last checkpoint. `elastic_data_parallel` goes on without the machine,
after all have agreed on who is left and have the parameters again, and takes it back in the same way.

Time passes from one failure or return to the next; between them steps take the time of the slowest machine and of
what of the exchange is not hidden.

Shapes: M replicas.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from diloco.simulator.fleet import FleetRun, Mask, Method, Outcome

WITH_MEMBERS: tuple[Method, ...] = ("fixed", "elastic_data_parallel", "data_parallel")
AGREE_SECONDS = 30.0
"""Time until machines know that one has failed and have agreed on who is left; elastic launchers take as long."""
_GRADIENT_BITS = 16
"""Bits of a gradient's value in Data-Parallel."""


def with_members(run: FleetRun, method: Method, *, seconds: float, seed: int = 0) -> Outcome:
    """A method with members that are agreed on, for some time.

    >>> from diloco.simulator.fleet import Machines
    >>> chips = Machines(
    ...     name="H100",
    ...     count=64,
    ...     step_seconds=1.0,
    ...     up_mbit_s=1e5,
    ...     down_mbit_s=1e5,
    ...     hours_between_failures=50,
    ...     latency_seconds=1e-5,
    ... )
    >>> run = FleetRun(machines=(chips,), num_params=1e9, step_tokens=4096)
    >>> [round(with_members(run, method, seconds=1e5).goodput, 2) for method in WITH_MEMBERS]
    [0.86, 0.98, 0.86]
    """
    is_elastic = method == "elastic_data_parallel"
    load_M = run.each([run.join_seconds(kind) for kind in run.machines])
    prices_M = run.each([kind.dollars_per_hour for kind in run.machines])
    ready = tokens = lost = dollars = 0.0  # nobody computes before `ready`
    for begin, end, is_up_M, replica, returns in _stretches(run, seconds, seed):
        num_up, start = int(is_up_M.sum()), max(begin, ready)
        dollars += float(prices_M[is_up_M].sum() * (end - begin) / 3600)
        if end > start and (is_up_M.all() or (is_elastic and num_up)):
            rate, kept = _tokens_per_second(run, method, is_up_M), end - start
            if not is_elastic and replica is not None:  # what came after its last checkpoint is lost
                kept = math.floor(kept / run.checkpoint_seconds) * run.checkpoint_seconds
            tokens, lost = tokens + rate * kept, lost + rate * (end - start - kept)
        if replica is not None and (is_elastic or returns):
            ready = end + AGREE_SECONDS + float(load_M[replica] if is_elastic and returns else load_M.max())
    return Outcome(
        method=method,
        seconds=seconds,
        goodput=float(tokens / (run.ideal_tokens_per_second * seconds)),
        tokens_per_hour=tokens * 3600 / seconds,
        contributors=float(run.num_replicas),
        staleness=0.0,
        lost=lost / max(tokens + lost, 1e-9),
        machine_dollars=dollars,
    )


def _stretches(run: FleetRun, seconds: float, seed: int) -> Iterator[tuple[float, float, Mask, int | None, bool]]:
    """Begin, end and who is up of each time without a change; the replica that changes, and if it returns."""
    random = np.random.default_rng(seed)
    mean_M = run.each([3600 * kind.hours_between_failures for kind in run.machines])
    pause_M = run.each([kind.repair_seconds for kind in run.machines])
    events = [(time, m, False) for m, time in enumerate(random.exponential(1.0, len(mean_M)) * mean_M)]
    heapq.heapify(events)
    is_up_M, now = np.ones(len(mean_M), dtype=bool), 0.0
    while events[0][0] < seconds:
        time, replica, returns = heapq.heappop(events)
        yield now, time, is_up_M, replica, returns
        is_up_M[replica], now = returns, time
        delay = random.exponential(1.0) * mean_M[replica] if returns else pause_M[replica]
        heapq.heappush(events, (now + delay, replica, not returns))
    yield now, seconds, is_up_M, None, False


def group_tokens_per_second(run: FleetRun) -> float:
    """Tokens that a fixed group reads in a second while all its machines are up."""
    return _tokens_per_second(run, "fixed", np.ones(run.num_replicas, dtype=bool))


def _tokens_per_second(run: FleetRun, method: Method, is_up_M: Mask) -> float:
    """Tokens that the machines which are up read together in a second."""
    num_up = int(is_up_M.sum())
    kinds = [kind for kind, place in zip(run.machines, run.places, strict=True) if is_up_M[place].any()]
    slowest = max(kind.mean_step_seconds for kind in kinds)
    mbit_s = min(min(kind.up_mbit_s, kind.down_mbit_s) for kind in kinds)
    latency = max(kind.latency_seconds for kind in kinds)
    if method == "fixed":
        return num_up * run.step_tokens * run.sync_every / _fixed_seconds(run, num_up, slowest, mbit_s, latency)
    ring = 2 * (num_up - 1)
    exchange = ring / num_up * run.num_params * _GRADIENT_BITS / 1e6 / mbit_s + ring * latency
    # The backward pass, two thirds of a step, hides as much of it.
    return num_up * run.step_tokens / (slowest + max(0.0, exchange - slowest * 2 / 3))


def _fixed_seconds(run: FleetRun, num_up: int, slowest: float, mbit_s: float, latency: float) -> float:
    """The time of H inner steps in which each fragment is exchanged once: all wait for the slowest."""
    copies = num_up - 1 if run.shares == 1 else 2 * (num_up - 1) / num_up
    fragment = copies * run.fragment_bytes * 8e-6 / mbit_s + latency * (1 if run.shares == 1 else 2)
    compute = run.sync_every * slowest
    waits = run.num_fragments * max(0.0, fragment - run.overlap_steps * slowest)
    return max(compute + waits, run.num_fragments * fragment)
