"""A storm of faults as the fleet simulator sees it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from diloco.simulator.description import Stragglers
from diloco.simulator.fleet import FleetRun, Machines

from .faults import VICTIMS, Fault

_STOP_SECONDS = 10.5
"""The mean of a stop."""


@dataclass(frozen=True, kw_only=True)
class Suffered:
    """The faults of one replica over a storm."""

    kills: int = 0
    down_seconds: float = 0.0
    """Time after kills in which it took no steps: until it had started again, which needs the store."""
    stopped_seconds: float = 0.0


def suffered(faults: Iterable[Fault], *, seconds: float, restart_seconds: float) -> dict[str, Suffered]:
    """The faults of each victim until a time, if a start takes so long once the store is there."""
    before = list(takewhile(lambda fault: fault.at_seconds < seconds, faults))
    return {victim: _suffered(before, victim, seconds, restart_seconds) for victim in VICTIMS}


def _suffered(faults: Iterable[Fault], victim: str, seconds: float, restart_seconds: float) -> Suffered:
    down_until = stopped_until = away_until = down = stopped = 0.0
    kills = 0
    for fault in faults:
        at, end = fault.at_seconds, fault.at_seconds + fault.seconds
        if fault.kind == "outage":
            away_until = end
        elif fault.victim == victim and fault.kind == "stop":
            begin = max(at, stopped_until, down_until)
            stopped, stopped_until = stopped + max(0.0, end - begin), max(stopped_until, end)
        elif fault.victim == victim:  # killed, which ends a stop
            stopped, stopped_until = stopped - max(0.0, stopped_until - max(at, down_until)), at
            up = max(at, away_until) + restart_seconds
            down, down_until, kills = down + up - max(at, down_until), max(up, down_until), kills + 1
    return Suffered(kills=kills, down_seconds=down, stopped_seconds=min(stopped, seconds))


def described(run: FleetRun, suffered: Mapping[str, Suffered], *, seconds: float) -> FleetRun:
    """The run on machines that fail and stop as often as in a storm.

    Args:
        run: without faults; a machine of the kind `slow`, and so on, is the victim of that name.
        suffered: by victim.
        seconds: length of the storm.
    """
    return replace(
        run, machines=tuple(_described(kind, suffered.get(kind.name), seconds) for kind in run.machines)
    )


def _described(kind: Machines, faults: Suffered | None, seconds: float) -> Machines:
    if faults is None:
        return kind
    up = seconds - faults.down_seconds
    stops_a_step = faults.stopped_seconds / (up - faults.stopped_seconds) * kind.step_seconds / _STOP_SECONDS
    stops = (
        Stragglers(stall_probability=stops_a_step, stall_seconds=_STOP_SECONDS) if stops_a_step else Stragglers()
    )
    return replace(
        kind,
        hours_between_failures=up / faults.kills / 3600 if faults.kills else math.inf,
        repair_seconds=faults.down_seconds / max(1, faults.kills),
        stragglers=stops,
    )
