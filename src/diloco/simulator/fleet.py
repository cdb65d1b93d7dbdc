"""A fleet of machines that fail and come back, each one replica, and the run that they are to train."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError
from diloco.rendezvous.log.entries import Quorum, Rules
from diloco.rendezvous.prices import Prices, Traffic, longest_poll
from diloco.schedule import Schedule
from diloco.schema import converted, read_toml
from diloco.simulator.description import Stragglers
from diloco.simulator.wall_clock import step_seconds as seconds_of_step

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines of one kind.

    Raises:
        UserError: if a number is out of range.
    """

    name: str
    """The kind, such as `4090`."""
    count: int
    """Machines of it."""
    up_mbit_s: float
    """Bandwidth to the internet."""
    down_mbit_s: float
    """Bandwidth from it."""
    step_seconds: float = 0.0
    """Compute time of an inner step, on average; 0 is 6·N·`step_tokens` operations at `flops_per_second`."""
    flops_per_second: float = 0.0
    """In its place, the floating-point operations that a machine does in a second of training."""
    latency_seconds: float = 0.02
    """Latency one way."""
    hours_between_failures: float = math.inf
    """Mean time that a machine runs until it fails or is preempted; the times are exponentially distributed."""
    repair_seconds: float = 60.0
    """Time from then until a replica starts again on it or on another of its kind."""
    notice_seconds: float = 0.0
    """Time between a preemption's notice and its end, in which the replica sends its work and leaves."""
    dollars_per_hour: float = 0.0
    """The price of one machine while it runs."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    """The distribution of its step times."""
    memory_gib: float = math.inf
    """Memory of its accelerator; a plan refuses models that do not fit, activations aside."""
    cloud: str = ""
    """The provider, such as aws: traffic with a store in the same cloud is free."""
    dollars_per_gb_up: float = 0.0
    """The price of 10⁹ bytes that leave its provider."""
    has_open_port: bool = True
    """False behind a NAT, where machines meet in a store alone."""

    def __post_init__(self) -> None:
        positive = ("count", "up_mbit_s", "down_mbit_s", "hours_between_failures", "memory_gib")
        others = ("latency_seconds", "repair_seconds", "notice_seconds", "dollars_per_hour", "dollars_per_gb_up")
        for name in (*positive, *others):
            value, may_be_infinite = getattr(self, name), name in positive[1:]
            if not (value >= 0 and (value > 0 or name not in positive) and (may_be_infinite or value < math.inf)):
                least = "above 0" if name in positive else "at least 0"
                least += "" if may_be_infinite else " and finite"
                raise UserError(f"{name} of {self.name} must be {least}, not {value}", name)
        for name in ("step_seconds", "flops_per_second"):
            if (value := getattr(self, name)) and not 0 < value < math.inf:
                raise UserError(f"{name} of {self.name} must be above 0 and finite, not {value}", name)
        if bool(self.step_seconds) == bool(self.flops_per_second):
            raise UserError(
                f"give the speed of {self.name} once: step_seconds, such as 1.5, or flops_per_second, such as "
                "60e12",
                *("step_seconds", "flops_per_second"),
            )

    @property
    def mean_step_seconds(self) -> float:
        """The mean time of a step, stalls included."""
        return self.step_seconds + self.stragglers.stall_probability * self.stragglers.stall_seconds


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """A run of Streaming DiLoCo, or of what it is compared with, on a fleet.

    Raises:
        UserError: if a number is out of range.
    """

    machines: tuple[Machines, ...]
    """The fleet."""
    num_params: float
    """N, of the model."""
    step_tokens: int
    """Tokens that a replica reads in an inner step."""
    num_tokens: float | None = None
    """Tokens of the whole run, for a plan; None is 20·N."""
    sync_every: int = 100
    """H."""
    num_fragments: int = 1
    """P, fragments of equal size."""
    overlap_steps: int = 5
    """τ."""
    bits_per_value: float = 4.0
    """Bits of a value of an outer gradient."""
    quorum: Quorum = "majority"
    """Replicas whose payloads a decision needs after τ."""
    patience: int | None = None
    """Inner steps after τ, after which a replica decides with what is there; None is H."""
    max_stale: int = Rules.max_stale
    """Rounds after which a late payload is not counted."""
    shares: int = 1
    """R, shares of a fragment, each averaged by one replica for all; 1 is gather: everybody reads everything."""
    poll_seconds: float = 0.5
    """Time between two looks of a replica into the store."""
    checkpoint_seconds: float = 600.0
    """Time between two checkpoints of a replica, or of the whole run where its members are fixed."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range; fill in the step times that follow from machines' speeds."""
        positive = ("num_params", "step_tokens", "sync_every", "num_fragments", "shares", "poll_seconds")
        for name in (*positive, "bits_per_value", "checkpoint_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {getattr(self, name)}", name)
        Schedule(num_fragments=1, sync_every=self.sync_every, overlap_steps=self.overlap_steps)  # refuses others
        for name in ("patience", "max_stale"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}", name)
        if self.num_tokens is not None and not 0 < self.num_tokens < math.inf:
            raise UserError(f"num_tokens must be above 0 and finite, not {self.num_tokens}", "num_tokens")
        if not self.machines:
            raise UserError("the fleet has no machines", "machines")
        object.__setattr__(self, "machines", tuple(self._with_step_time(kind) for kind in self.machines))

    def _with_step_time(self, kind: Machines) -> Machines:
        if kind.step_seconds:
            return kind
        seconds = seconds_of_step(
            num_params=self.num_params,
            batch_tokens=self.step_tokens,
            num_chips=1,
            flops_per_chip=kind.flops_per_second,
        )
        return replace(kind, step_seconds=seconds, flops_per_second=0.0)

    @property
    def num_replicas(self) -> int:
        """M."""
        return sum(kind.count for kind in self.machines)

    @property
    def longest_poll_seconds(self) -> float:
        """Time between two looks of a replica for a payload that does not come; the mean of all machines."""
        step_seconds = sum(kind.count * kind.mean_step_seconds for kind in self.machines) / self.num_replicas
        return longest_poll(self.poll_seconds, self.overlap_steps * step_seconds)

    @property
    def fragment_bytes(self) -> float:
        """Payload bytes of a fragment."""
        return self.num_params * self.bits_per_value / 8 / self.num_fragments

    @property
    def own_part(self) -> float:
        """The part of each fragment that a replica averages, at the most; the whole with gather."""
        return math.ceil(self.shares / self.num_replicas) / self.shares

    @property
    def state_bytes(self) -> float:
        """Bytes that a joiner reads: Θ and the outer momentum, in FP32."""
        return 8 * self.num_params

    def each(self, values: Sequence[float]) -> Floats:
        """For each replica the number of its kind, (M)."""
        return np.repeat(np.asarray(values, dtype=np.float64), [kind.count for kind in self.machines])

    @property
    def places(self) -> list[slice]:
        """The places of each kind's replicas among all."""
        ends = np.cumsum([kind.count for kind in self.machines]).tolist()
        return [slice(end - kind.count, end) for end, kind in zip(ends, self.machines, strict=True)]

    def join_seconds(self, kind: Machines) -> float:
        """Time until a joiner has Θ and the outer momentum."""
        return 8e-6 * self.state_bytes / kind.down_mbit_s + 10 * kind.latency_seconds

    def part_there(self, kind: Machines) -> float:
        """The part of the time in which a machine's replica trains: it is neither in repair nor reading Θ."""
        up_seconds = 3600 * kind.hours_between_failures
        return part_of_time(up_seconds, kind.repair_seconds + self.join_seconds(kind))

    @property
    def ideal_tokens_per_second(self) -> float:
        """The tokens that all machines would read together without failures and waits."""
        return sum(kind.count * self.step_tokens / kind.mean_step_seconds for kind in self.machines)


def part_of_time(on_seconds: float, off_seconds: float) -> float:
    """The part that one state has of a time in which two take turns.

    >>> part_of_time(3.0, 1.0), part_of_time(math.inf, 1.0)
    (0.75, 1.0)
    """
    return 1.0 if math.isinf(on_seconds) else on_seconds / (on_seconds + off_seconds)


def read_fleet(path: Path) -> FleetRun:
    """A fleet and its run from TOML: the fields of `FleetRun`, and those of `Machines` in each [[machines]].

    The tables `launch` are the launchers'.

    Raises:
        FileError: if it is no such file, naming what is wrong.
        UserError: if a number is out of range.
    """
    values = read_toml(path)
    values.pop("launch", None)
    kinds = values.get("machines")
    for kind in kinds if isinstance(kinds, list) else ():
        if isinstance(kind, dict):
            kind.pop("launch", None)
    return converted(values, FleetRun, source=str(path))


Method = Literal["data_parallel", "elastic_data_parallel", "fixed", "store", "regions"]
"""`fixed` is a group whose members stay, with the run's H; with τ = 0 and P = 1 that is DiLoCo."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A method on a fleet, over some time.

    Fewer or staler contributions than those of all replicas in time cost loss besides, which no number here holds.
    """

    method: Method
    seconds: float
    """Length of the simulated time."""
    goodput: float
    """Tokens that Θ has counted over those that all machines could have read without failures and waits."""
    tokens_per_hour: float
    """Tokens counted."""
    num_outer_steps: int = 0
    """Outer steps of all fragments."""
    contributors: float = math.nan
    """Mean number of replicas that an outer step counts."""
    staleness: float = math.nan
    """Mean number of rounds by which a contribution came late."""
    decided_seconds: tuple[float, float] = (math.nan, math.nan)
    """Time from a send to the outer step that counts it, as its replica knows it: median and 99th percentile."""
    lost: float = 0.0
    """Tokens read and never counted, over all tokens read."""
    traffic: Traffic | None = None
    """Requests and bytes of all replicas in the store; None without one."""
    machine_dollars: float = 0.0
    """The price of the machines that ran."""

    def dollars(self, prices: Prices | None) -> float:
        """The price of machines and store together."""
        return self.machine_dollars + (
            0.0 if prices is None or self.traffic is None else self.traffic.dollars(prices)
        )
