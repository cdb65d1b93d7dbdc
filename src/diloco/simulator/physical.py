"""The physical model: M replicas, each on a link of its own, exchange as the engine does.

Replica m starts step s at E_m(s − 1), with E_m(0) = 0, and computes for c_m(s) seconds:
C_m(s) = E_m(s − 1) + c_m(s). It then sends what is due to each other replica, on one lane for each. The lane from
m to j carries min(bandwidth_m, bandwidth_j)/(M − 1), one payload at a time in the schedule's order, and delays
each by the mean of both latencies. Replica j ends step s when it has received everything that it merges after s:
E_j(s) = max(C_j(s), arrivals at j of what j merges after s).

gather: each lane carries the fragment's payload, from C_m(s) on. reduce_scatter: each lane carries the payload of
a share, n/M elements; when replica j has its share from all, each of its lanes carries the average of that share.
A phase never waits for the other phase of another fragment, but the lane's rate limits both together.

Links are full duplex. Encoding, decoding and the outer step take no time here.

Shapes: B bandwidths, M replicas, S steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError, setting
from diloco.schedule import Schedule
from diloco.simulator.data_parallel import DataParallelRun
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical_run import PhysicalRun
from diloco.simulator.replicas import Replica, Stragglers
from diloco.simulator.steady import Times
from diloco.wire.formats import parse

_MOST_REPLICAS = 256  # more would fill the memory with lanes


@dataclass(frozen=True, kw_only=True)
class PhysicalModel:
    """A run on machines and links.

    Raises:
        UserError: if the fields contradict each other.

    >>> model = PhysicalModel(
    ...     settings=MethodSettings(method="streaming_overlapped_fp4"),
    ...     size=ModelSize(num_params=1e9, num_layers=24),
    ...     replicas=[Replica(step_seconds=0.1, latency_seconds=0.05)] * 2,
    ... )
    >>> model.compute_utilization([0.1, 1.0, 10.0]).round(3)
    array([0.201, 0.736, 1.   ])
    """

    settings: MethodSettings
    """Method, H, fragments and τ."""
    size: ModelSize
    """Parameters and layers."""
    replicas: Sequence[Replica]
    """The M machines."""
    wire: str | None = None
    """The codec of outer gradients, or of data_parallel's gradients; None is the method's own."""
    combine: str = "gather"
    """gather, reduce_scatter, or reduce_scatter:CODEC."""
    stragglers: Stragglers | None = None
    """The distribution of step times; None if they do not vary."""

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if not 1 <= len(self.replicas) <= _MOST_REPLICAS:
            raise UserError(
                f"num_replicas must be from 1 to {_MOST_REPLICAS}, not {len(self.replicas)}", "num_replicas"
            )
        overlaps = self.settings.overlap_steps
        if isinstance(overlaps, tuple) and len(overlaps) != len(self.replicas):
            raise UserError(
                f"overlap_steps={overlaps} must hold one number for each of {len(self.replicas)} replicas",
                "overlap_steps",
            )
        if self.settings.method == "data_parallel":
            if self.combine != "gather":
                raise UserError(
                    f"combine={self.combine}, but data_parallel reduces gradients in a ring: leave it out",
                    "combine",
                )
            if self.wire not in (None, "fp32", "bf16", "fp16"):
                raise UserError(
                    f"wire={self.wire}, but data_parallel adds gradients up: take fp32, bf16 or fp16", "wire"
                )
        _ = self.lane_bits, self.schedule, self.settings.layers(self.size.num_layers)

    @cached_property
    def fragment_params(self) -> tuple[float, ...]:
        """Parameters of each fragment, the one outside the blocks last."""
        if not self.settings.streams:
            return (self.size.num_params,)
        blocks = (len(layers) * self.size.block_params for layers in self.settings.layers(self.size.num_layers))
        return (*blocks, self.size.outside_params)

    @cached_property
    def schedule(self) -> Schedule:
        """The steps at which each fragment is sent and merged."""
        return self.settings.schedule(len(self.fragment_params))

    @cached_property
    def lane_bits(self) -> tuple[float, ...]:
        """Bits a parameter of a fragment puts on each lane, one number a phase of the exchange."""
        wire = self.wire if self.wire is not None else self.settings.wire
        name, _, second = self.combine.partition(":")
        with setting("wire", wire):
            bits = parse(wire).bits_per_value
        if self.combine == "gather":
            return (bits,)
        if name == "reduce_scatter":
            with setting("combine", self.combine):
                second_bits = parse(second).bits_per_value if second else bits
            return bits / len(self.replicas), second_bits / len(self.replicas)
        raise UserError(
            f"combine={self.combine!r} is neither gather nor reduce_scatter, nor reduce_scatter:CODEC", "combine"
        )

    @property
    def bytes_sent_per_sync(self) -> float:
        """Bytes that a replica sends for one sync of all fragments; for data_parallel, for one step."""
        num_others = len(self.replicas) - 1
        if self.settings.method == "data_parallel":
            return 2 * num_others / len(self.replicas) * self.size.num_params * self.lane_bits[0] / 8
        return num_others * self.size.num_params * sum(self.lane_bits) / 8

    def compute_utilization(self, gbit_s: ArrayLike, *, num_steps: int | None = None, seed: int = 0) -> Times:
        """Compute time as a part of all time, averaged over the replicas, for each bandwidth.

        Args:
            gbit_s: bandwidth of those links that have none of their own, (B,).
            num_steps: length of a run that ends when everything sent has been merged; None is the steady state.
                Stragglers have none: None is then a run of 10,000 steps, and at least 20·H.
            seed: of the stragglers' random numbers.

        Raises:
            UserError: if a bandwidth or `num_steps` is out of range.
        """
        compute_M = np.array([replica.step_seconds for replica in self.replicas])
        if num_steps is None and self.stragglers is None:
            share_B = compute_M.mean() * self.schedule.sync_every / self._period_seconds(gbit_s)
            return np.minimum(share_B, 1.0)  # rounding may exceed 1
        if num_steps is None:
            num_steps = max(10_000, 20 * self.schedule.sync_every)
        if num_steps < 1:
            raise UserError(f"num_steps must be at least 1, not {num_steps}", "num_steps")
        compute_SxM = np.broadcast_to(compute_M, (num_steps, len(compute_M)))
        if self.stragglers is not None:
            compute_SxM = self.stragglers.draw(compute_SxM, np.random.default_rng(seed))
        return compute_SxM.sum(0).mean() / self.run_seconds(gbit_s, compute_SxM)

    def run_seconds(self, gbit_s: ArrayLike, compute_SxM: NDArray[np.float64]) -> Times:
        """Duration of a run, its last merge included, (B,).

        Args:
            gbit_s: bandwidth of those links that have none of their own, (B,).
            compute_SxM: compute time of each step on each replica.

        Raises:
            UserError: if a bandwidth is out of range.
        """
        compute_SxM = np.asarray(compute_SxM, dtype=np.float64)
        if self.settings.method == "data_parallel":
            return self._data_parallel(gbit_s).run_seconds(compute_SxM.max(1))
        run = self.start(gbit_s)
        run.advance(compute_SxM)
        return run.end_seconds()

    def start(
        self, gbit_s: ArrayLike, on_transmit: Callable[[int, Times, Times], None] = lambda *_: None
    ) -> PhysicalRun:
        """The run of any method but data_parallel before its first step; arguments as in `PhysicalRun`."""
        return PhysicalRun(
            gbit_s,
            replicas=self.replicas,
            schedule=self.schedule,
            fragment_params=self.fragment_params,
            lane_bits=self.lane_bits,
            on_transmit=on_transmit,
        )

    def _period_seconds(self, gbit_s: ArrayLike) -> Times:
        compute_M = np.array([replica.step_seconds for replica in self.replicas])
        if self.settings.method == "data_parallel":
            return self._data_parallel(gbit_s).run_seconds(compute_M.max(keepdims=True))
        return self.start(gbit_s).period_seconds(compute_M)

    def _data_parallel(self, gbit_s: ArrayLike) -> DataParallelRun:
        return DataParallelRun(gbit_s, replicas=self.replicas, size=self.size, bits_per_param=self.lane_bits[0])
