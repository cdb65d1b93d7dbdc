"""Closed forms of a run on a fleet in its steady state: tokens and dollars per hour, in a store and in a group.

In a store nobody waits, and a machine counts for the part of the time that `simulator.churn.part_counted` gives.
A fixed group stops at each failure, of which there are λ = Σ 1/U per second, U between those of a machine, for
D = repair + agreement + reading Θ, and goes on from the last of the checkpoints, C seconds apart;
C / (e^{λC} − 1) is the mean of what an uptime keeps:

    goodput = e · λ C / (e^{λC} − 1) / (1 + λ D)                        e: compute time over compute and waits

`simulated` gives the same numbers by the event simulation.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from diloco.rendezvous.log.entries import Rules
from diloco.rendezvous.prices import Prices, Traffic, run_traffic
from diloco.simulator.churn import in_store, part_counted
from diloco.simulator.fixed_members import AGREE_SECONDS, group_tokens_per_second, with_members
from diloco.simulator.fleet import FleetRun, Machines, part_of_time
from diloco.simulator.link_planner import MOST_LOAD, decided_seconds

_HOUR_SECONDS = 3600.0
_ROUNDS, _NUM_FAILURES = (50, 150), 100


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The progress and the price of an hour."""

    goodput: float
    """Tokens that Θ counts over those that all machines could read without failures and waits."""
    tokens_per_hour: float
    """Tokens counted."""
    machine_dollars_per_hour: float
    """The price of the machines."""
    traffic_per_hour: Traffic | None
    """Requests and bytes of all replicas in the store; None without one."""
    bytes_up_per_hour: float
    """Bytes that all machines send."""


def store_overlap(run: FleetRun) -> int | None:
    """The least τ with which an outer step is there in time in a store; None if the links or H do not allow any.

    Args:
        run: with any τ.
    """
    fastest = min(kind.mean_step_seconds for kind in run.machines)
    is_shared, seconds = run.shares > 1, 0.0
    reads = run.own_part * (run.num_replicas - 1) + (1 - run.own_part)
    sends = 1 + run.own_part if is_shared else 1
    snapshot_mbit = 8e-6 * run.state_bytes / run.num_fragments / Rules.snapshot_rounds / run.num_replicas
    for kind in run.machines:
        up = sends * _mbit(run) / kind.up_mbit_s
        down = reads * _mbit(run) / kind.down_mbit_s
        period = MOST_LOAD * run.sync_every / run.num_fragments
        busy = up + snapshot_mbit / kind.up_mbit_s
        if busy > period * kind.mean_step_seconds or down > period * fastest:
            return None
        decided = decided_seconds(
            is_gather=not is_shared,
            upload_seconds=up,
            download_seconds=down,
            latency_seconds=kind.latency_seconds,
            poll_seconds=run.poll_seconds,
        )
        seconds = max(seconds, decided)
    overlap_steps = max(1, math.ceil(seconds / fastest))
    return overlap_steps if 2 * overlap_steps <= run.sync_every else None


def group_overlap(run: FleetRun) -> int:
    """The least τ that hides an exchange of a fixed group; half of H if none does."""
    slowest = max(kind.mean_step_seconds for kind in run.machines)
    others = run.num_replicas - 1
    copies = others if run.shares == 1 else 2 * others / run.num_replicas
    mbit_s = min(min(kind.up_mbit_s, kind.down_mbit_s) for kind in run.machines)
    latency = max(kind.latency_seconds for kind in run.machines) * (1 if run.shares == 1 else 2)
    seconds = copies * _mbit(run) / mbit_s + latency
    return max(1, min(math.ceil(seconds / slowest), run.sync_every // 2))


def in_a_store(run: FleetRun) -> Forecast:
    """The forecast of a run over a store."""
    seconds = _HOUR_SECONDS
    fastest = min(kind.mean_step_seconds for kind in run.machines)
    counted = ideal = dollars = members = joins = 0.0
    for kind in run.machines:
        there, rate = run.part_there(kind), kind.count / kind.mean_step_seconds
        counted, ideal = counted + rate * part_counted(run, kind), ideal + rate
        members += kind.count * there
        joins += kind.count * there / kind.hours_between_failures
        dollars += kind.count * kind.dollars_per_hour * _part_paid(run, kind)
    rounds = seconds / (run.sync_every * fastest)
    traffic = run_traffic(
        num_replicas=max(1.0, members),
        num_fragments=run.num_fragments,
        num_payloads=members * run.num_fragments * rounds,
        num_steps=run.num_fragments * rounds,
        payload_bytes=run.fragment_bytes,
        state_bytes=run.state_bytes,
        num_joins=joins,
        num_shares=run.shares,
        seconds=seconds,
        poll_seconds=run.poll_seconds,
        longest_seconds=run.longest_poll_seconds,
        round_trip_seconds=sum(2 * kind.latency_seconds * kind.count for kind in run.machines) / run.num_replicas,
    )
    return Forecast(
        goodput=counted / ideal,
        tokens_per_hour=counted * run.step_tokens * seconds,
        machine_dollars_per_hour=dollars,
        traffic_per_hour=traffic,
        bytes_up_per_hour=traffic.bytes_up,
    )


def in_a_group(run: FleetRun) -> Forecast:
    """The forecast of a run whose members stay."""
    rate = group_tokens_per_second(run)
    failures = _failures_per_second(run)
    down = sum(
        kind.count / (_HOUR_SECONDS * kind.hours_between_failures) * kind.repair_seconds for kind in run.machines
    ) + failures * (AGREE_SECONDS + max(run.join_seconds(kind) for kind in run.machines))
    between = failures * run.checkpoint_seconds
    kept = (between / math.expm1(between) if between < 700 else 0.0) if between else 1.0
    tokens_per_hour = rate * kept / (1 + down) * _HOUR_SECONDS
    copies = run.num_replicas - 1 if run.shares == 1 else 2 * (run.num_replicas - 1) / run.num_replicas
    periods = tokens_per_hour / (run.num_replicas * run.step_tokens * run.sync_every)
    return Forecast(
        goodput=tokens_per_hour / (run.ideal_tokens_per_second * _HOUR_SECONDS),
        tokens_per_hour=tokens_per_hour,
        machine_dollars_per_hour=sum(
            kind.count
            * kind.dollars_per_hour
            * part_of_time(kind.hours_between_failures * _HOUR_SECONDS, kind.repair_seconds)
            for kind in run.machines
        ),
        traffic_per_hour=None,
        bytes_up_per_hour=periods * run.num_replicas * copies * run.num_fragments * run.fragment_bytes,
    )


@lru_cache(maxsize=256)
def simulated(run: FleetRun, *, is_in_store: bool, seed: int = 0) -> Forecast:
    """The same by the event simulation: of 100 outer steps of each fragment, or of 100 failures of a fixed group.

    In a store 50 outer steps of each fragment come before them: at the start nothing is counted yet.

    Args:
        run: the fleet and its settings.
        is_in_store: False for a fixed group.
        seed: of failures.

    Raises:
        UserError: if no outer step follows, since machines fail too often.
    """
    if not is_in_store:
        forecast, between = in_a_group(run), 1 / max(_failures_per_second(run), 1e-9)
        outcome = with_members(run, "fixed", seconds=_NUM_FAILURES * between, seed=seed)
        per_hour = _HOUR_SECONDS / outcome.seconds
        return replace(
            forecast,
            goodput=outcome.goodput,
            tokens_per_hour=outcome.tokens_per_hour,
            machine_dollars_per_hour=outcome.machine_dollars * per_hour,
        )
    start, end = (in_store(run, num_outer_steps=n * run.num_fragments, seed=seed) for n in _ROUNDS)
    assert start.traffic is not None and end.traffic is not None, "a store has traffic"
    part = start.seconds / end.seconds

    def rate(before: float, after: float) -> float:
        return (after - part * before) / (1 - part)

    per_hour = _HOUR_SECONDS / (end.seconds - start.seconds)
    begun = vars(start.traffic)
    traffic = {name: per_hour * (value - begun[name]) for name, value in vars(end.traffic).items()}
    return Forecast(
        goodput=rate(start.goodput, end.goodput),
        tokens_per_hour=rate(start.tokens_per_hour, end.tokens_per_hour),
        machine_dollars_per_hour=per_hour * (end.machine_dollars - start.machine_dollars),
        traffic_per_hour=Traffic(**traffic),
        bytes_up_per_hour=traffic["bytes_up"],
    )


def egress_dollars_per_hour(run: FleetRun, store: Prices | None, forecast: Forecast) -> float:
    """The price of the bytes that leave a cloud; those of machines in the store's own cloud leave none."""
    clouds = {kind.cloud for kind in run.machines}
    total = 0.0
    for kind in run.machines:
        if store is None:
            is_free = clouds == {kind.cloud} != {""}
        else:
            is_free = bool(kind.cloud) and kind.cloud == store.cloud
        if not is_free:
            part = kind.count / run.num_replicas / 1e9
            total += part * forecast.bytes_up_per_hour * kind.dollars_per_gb_up
            if store is not None and forecast.traffic_per_hour is not None:
                total += part * forecast.traffic_per_hour.bytes_down * store.per_gb_down
    return total


def _failures_per_second(run: FleetRun) -> float:
    return sum(kind.count / (_HOUR_SECONDS * kind.hours_between_failures) for kind in run.machines)


def _mbit(run: FleetRun) -> float:
    """The size of a fragment's payload."""
    return 8e-6 * run.fragment_bytes


def _part_paid(run: FleetRun, kind: Machines) -> float:
    """The part of the time in which a machine runs, reading Θ included."""
    up_seconds = _HOUR_SECONDS * kind.hours_between_failures
    return part_of_time(up_seconds + run.join_seconds(kind), kind.repair_seconds)
