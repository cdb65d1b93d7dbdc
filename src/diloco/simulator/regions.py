"""Two levels: replicas of a region meet in a store of the region, and each region is one replica of an outer run.

So it is built (`diloco.training.bridge`):

1. A region is a run in a store of its own: its replicas average every H steps, and its Θ moves.
2. A process beside one of its machines, the bridge, is a replica of the outer run. It reads the region's log as a
   replica does. Every K-th round of a fragment it sends the outer Θ_p minus the region's.
3. By what the outer Θ_p moves the bridge shifts the region's: an entry of the region's log, which all of its
   replicas take as one that is not counted does.

Both levels are simulated by `in_store`, which holds the rules. A region of the outer run takes steps at the pace
of its replicas. Its link is what its machine and the bridge's own reading leave. It fails with its machine, and is
back when that is; nothing is lost by that, since the region's Θ holds the work.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from diloco.errors import UserError
from diloco.rendezvous.prices import Traffic
from diloco.simulator.churn import in_store
from diloco.simulator.fleet import FleetRun, Machines, Outcome

_MOST_SIMULATED = 4
"""Regions of the same machines that are simulated; they stand for the others."""
_LEAST_LINK = 0.05
"""The least share of a link that is left to a bridge."""


def in_regions(
    run: FleetRun, *, num_regions: int, num_outer_steps: int, rounds_apart: int = 1, seed: int = 0
) -> Outcome:
    """A fleet in regions, until each region, and the outer run, has taken so many outer steps.

    Args:
        run: with the shares of a region's store; an outer store has as many shares as there are regions, unless
            `shares` is 1, for gather in both.
        num_regions: R, into which the machines of each kind are dealt evenly.
        num_outer_steps: of all fragments in a region, and between regions.
        rounds_apart: K, rounds of a region between two exchanges with the others.
        seed: of failures, step times and polls.

    Returns:
        tokens that the outer Θ has counted; contributors, staleness and times of an outer step between regions.

    Raises:
        UserError: if there are fewer machines than regions.

    >>> home = Machines(name="4090", count=64, step_seconds=1.0, up_mbit_s=20, down_mbit_s=100)
    >>> run = FleetRun(machines=(home,), num_params=4e6, step_tokens=4096)
    >>> outcome = in_regions(run, num_regions=8, num_outer_steps=50)
    >>> round(outcome.goodput, 2), outcome.contributors
    (1.0, 64.0)
    """
    if not 1 <= num_regions <= run.num_replicas:
        raise UserError(f"num_regions={num_regions} must be at least 1, and at most {run.num_replicas} machines")
    regions = [_region(run, place, num_regions) for place in range(num_regions)]
    known: dict[FleetRun, list[Outcome]] = {}
    inner = list[Outcome]()
    for region in regions:
        outcomes = known.setdefault(region, [])
        if len(outcomes) < _MOST_SIMULATED:
            outcomes.append(in_store(region, num_outer_steps=num_outer_steps, seed=seed + len(inner)))
        inner.append(outcomes[len(inner) % len(outcomes)])
    bridges = tuple(_bridge(*pair) for pair in zip(regions, inner, strict=True))
    outer_run = replace(
        run,
        machines=bridges,
        sync_every=rounds_apart * run.sync_every,
        shares=1 if run.shares == 1 else num_regions,
        checkpoint_seconds=1e-9,
    )
    outer = in_store(outer_run, num_outer_steps=num_outer_steps, seed=seed)
    return _both(run, inner, outer, outer_run)


def _region(run: FleetRun, place: int, num_regions: int) -> FleetRun:
    """The machines of one region, each kind dealt evenly."""
    counts, dealt = list[int](), 0
    for kind in run.machines:  # as cards: each kind goes on where the one before it has ended
        counts.append((kind.count + num_regions - 1 - (place - dealt) % num_regions) // num_regions)
        dealt += kind.count
    kinds = tuple(replace(k, count=count) for k, count in zip(run.machines, counts, strict=True) if count)
    return replace(run, machines=kinds, shares=min(run.shares, sum(counts)))


def _bridge(region: FleetRun, outcome: Outcome) -> Machines:
    """A region as one machine of the outer run."""
    traffic, size, kinds = outcome.traffic, region.num_replicas, region.machines
    assert traffic is not None, "a store's"
    mbit = 8e-6 / size / outcome.seconds

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=[kind.count for kind in kinds]))

    up, down = mean([kind.up_mbit_s for kind in kinds]), mean([kind.down_mbit_s for kind in kinds])
    step_seconds = 1 / mean([1 / kind.mean_step_seconds for kind in kinds])
    rates = [1 / kind.hours_between_failures for kind in kinds]
    return Machines(
        name=f"region of {size}",
        count=1,
        step_seconds=step_seconds,
        up_mbit_s=max(_LEAST_LINK * up, up - mbit * traffic.bytes_up),
        # It reads what its machine reads, too.
        down_mbit_s=max(_LEAST_LINK * down, down - 2 * mbit * traffic.bytes_down),
        latency_seconds=mean([kind.latency_seconds for kind in kinds]),
        hours_between_failures=1 / mean(rates) if any(rates) else math.inf,
        repair_seconds=mean([kind.repair_seconds for kind in kinds]),
    )


def _both(run: FleetRun, inner: Sequence[Outcome], outer: Outcome, outer_run: FleetRun) -> Outcome:
    """The outcome of both levels together, per hour as the regions' and the outer store's have it."""
    assert outer.traffic is not None, "a store's"
    seconds = float(np.mean([outcome.seconds for outcome in inner]))
    counted = 1 - outer.lost
    tokens_per_hour = sum(outcome.tokens_per_hour for outcome in inner) * counted
    size = run.num_replicas / len(inner)
    known = outer.num_outer_steps * len(inner)
    traffic = _scaled(outer.traffic, seconds / outer.seconds) + _scaled(
        Traffic(
            creates=known,
            gets=known * size,
            bytes_up=known * run.fragment_bytes,
            bytes_down=known * size * run.fragment_bytes,
        ),
        seconds / outer.seconds,
    )
    for outcome in inner:
        assert outcome.traffic is not None, "a store's"
        reads = {name: getattr(outcome.traffic, name) / max(1, size - 1) for name in ("gets", "bytes_down")}
        traffic += _scaled(outcome.traffic + Traffic(creates=0, bytes_up=0, **reads), seconds / outcome.seconds)
    slowest = min(outer_run.machines, key=lambda kind: kind.up_mbit_s)
    fragment_mbit = 8e-6 * run.fragment_bytes
    to_members = fragment_mbit / slowest.up_mbit_s + fragment_mbit / slowest.down_mbit_s + 2 * run.poll_seconds
    return Outcome(
        method="regions",
        seconds=seconds,
        goodput=tokens_per_hour / 3600 / run.ideal_tokens_per_second,
        tokens_per_hour=tokens_per_hour,
        num_outer_steps=outer.num_outer_steps,
        contributors=outer.contributors * float(np.mean([outcome.contributors for outcome in inner])),
        staleness=outer.staleness,
        decided_seconds=(outer.decided_seconds[0] + to_members, outer.decided_seconds[1] + to_members),
        lost=1 - (1 - float(np.mean([outcome.lost for outcome in inner]))) * counted,
        traffic=traffic,
        machine_dollars=sum(outcome.machine_dollars * seconds / outcome.seconds for outcome in inner),
    )


def _scaled(traffic: Traffic, factor: float) -> Traffic:
    return Traffic(**{name: value * factor for name, value in vars(traffic).items()})
