"""The faults of a storm, and when they happen."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

VICTIMS = ("slow", "third")
"""The replicas that are killed and stopped."""
SECONDS_BETWEEN_OUTAGES = 60.0
Kind = Literal["kill", "stop", "outage"]


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule."""

    at_seconds: float
    """Time from the storm's beginning."""
    kind: Kind
    victim: str
    """The replica; an outage is everybody's."""
    seconds: float
    """Duration of the fault; a kill is over at once."""


def schedule(faults_an_hour: float, seed: int, outage_seconds: float) -> Iterator[Fault]:
    """The faults without end: one at a random time in each interval of 3600 / `faults_an_hour` seconds."""
    draw, last_outage = random.Random(seed), -SECONDS_BETWEEN_OUTAGES
    interval = 3600 / faults_an_hour if faults_an_hour else float("inf")
    kinds: list[Kind] = []
    short: tuple[Kind, ...] = ("kill", "stop")
    for number in range(1 << 30 if faults_an_hour else 0):
        kinds = kinds or draw.sample(("kill", "stop", "outage"), 3)
        at, kind = (number + draw.random()) * interval, kinds.pop()
        if kind == "outage" and at < last_outage + outage_seconds + SECONDS_BETWEEN_OUTAGES:
            kind = draw.choice(short)
        if kind == "outage":
            last_outage = at
        seconds = {"kill": 0.0, "stop": draw.uniform(1, 20), "outage": outage_seconds}[kind]
        yield Fault(at, kind, draw.choice(VICTIMS), seconds)
