"""The physical model: M replicas, each on a link of its own, exchange as the engine does.

Replica m starts step s at E_m(s − 1), E_m(0) = 0, and computes for c_m(s) seconds: C_m(s) = E_m(s − 1) + c_m(s).
What is due is then sent, to each other replica on a lane of its own. A lane from m to j has the rate
min(bandwidth_m, bandwidth_j)/(M − 1), carries one payload at a time, in the schedule's order, and delays each by
the mean of both latencies. Training goes on at E_j(s) = max(C_j(s), arrivals at j of everything that j merges
after s).

gather: a payload of the fragment on each lane, at C_m(s). reduce_scatter: a share of it, n/M elements, on each
lane; when replica j has all of its share, the average of the share on each lane. Neither phase of a fragment waits
for the other phase of another, but both together for what the lane can carry. Data-Parallel: a ring all-reduce of
each layer's gradients, one after the other, each when it is ready on all replicas; a step ends with the last.

Links are full duplex. Encoding, decoding and the outer step take no time here.

Shapes: B bandwidths, M replicas (of a lane: first the sender, then the receiver).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError
from diloco.schedule import Schedule
from diloco.simulator.bandwidth import checked_gbit_s
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.replicas import Replica, Stragglers
from diloco.simulator.steady import Times, growth_rate
from diloco.simulator.volume import bits_per_param

_MOST_REPLICAS = 256  # the lanes between more would fill the memory


@dataclass(frozen=True, kw_only=True)
class PhysicalModel:
    """A run on machines and links.

    Raises:
        UserError: if the fields contradict each other; the message names both values.

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
    """One for each of M."""
    wire: str | None = None
    """The codec; None is the method's, FP32 or E3M0. Of data_parallel: how wide a gradient is."""
    combine: str = "gather"
    """gather, reduce_scatter, or reduce_scatter:CODEC."""
    stragglers: Stragglers | None = None
    """How step times vary; None is not at all."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if not 1 <= len(self.replicas) <= _MOST_REPLICAS:
            raise UserError(f"num_replicas must be from 1 to {_MOST_REPLICAS}, not {len(self.replicas)}")
        overlaps = self.settings.overlap_steps
        if isinstance(overlaps, tuple) and len(overlaps) != len(self.replicas):
            raise UserError(
                f"overlap_steps={overlaps} must hold one number for each of {len(self.replicas)} replicas"
            )
        if self.settings.method == "data_parallel":
            if self.combine != "gather":
                raise UserError(
                    f"combine={self.combine}, but data_parallel reduces gradients in a ring: leave it out"
                )
            if self.wire not in (None, "fp32", "bf16", "fp16"):
                raise UserError(f"wire={self.wire}, but data_parallel adds gradients up: take fp32, bf16 or fp16")
        _ = self.lane_bits, self.schedule, self.settings.layers(self.size.num_layers)

    @cached_property
    def fragment_params(self) -> tuple[float, ...]:
        """Parameters of each fragment, the one outside the blocks last; where there is but one, of all."""
        if not self.settings.streams:
            return (self.size.num_params,)
        blocks = (len(layers) * self.size.block_params for layers in self.settings.layers(self.size.num_layers))
        return (*blocks, self.size.outside_params)

    @cached_property
    def schedule(self) -> Schedule:
        """When each fragment is sent and merged."""
        return self.settings.schedule(len(self.fragment_params))

    @cached_property
    def lane_bits(self) -> tuple[float, ...]:
        """Bits a parameter of a fragment puts on each lane: one number a phase of the exchange."""
        wire = self.wire if self.wire is not None else self.settings.wire
        name, _, second = self.combine.partition(":")
        if self.combine == "gather":
            return (bits_per_param(wire),)
        if name == "reduce_scatter":
            num_replicas = len(self.replicas)
            return bits_per_param(wire) / num_replicas, bits_per_param(second or wire) / num_replicas
        raise UserError(f"combine={self.combine!r} is neither gather nor reduce_scatter, nor reduce_scatter:CODEC")

    @property
    def bytes_sent_per_sync(self) -> float:
        """By one replica, for one sync of all fragments; of data_parallel, for one step."""
        num_others = len(self.replicas) - 1
        if self.settings.method == "data_parallel":
            return 2 * num_others / len(self.replicas) * self.size.num_params * self.lane_bits[0] / 8
        return num_others * self.size.num_params * sum(self.lane_bits) / 8

    def compute_utilization(self, gbit_s: ArrayLike, *, num_steps: int | None = None, seed: int = 0) -> Times:
        """Compute time as a part of all time, the mean over the replicas, for each bandwidth.

        Args:
            gbit_s: bandwidths of those links that have none of their own, (B,).
            num_steps: of a run that ends when everything that was sent has been merged; None is the steady state,
                which stragglers don't have: it is then a run of 10,000 steps, and at least 20·H.
            seed: what the stragglers are drawn from.
        """
        compute_M = np.array([replica.step_seconds for replica in self.replicas])
        if num_steps is None and self.stragglers is None:
            share_B = compute_M.mean() * self.schedule.sync_every / self._period_seconds(gbit_s)
            return np.minimum(share_B, 1.0)  # of what rounding adds
        if num_steps is None:
            num_steps = max(10_000, 20 * self.schedule.sync_every)
        if num_steps < 1:
            raise UserError(f"num_steps must be at least 1, not {num_steps}")
        compute_SxM = np.broadcast_to(compute_M, (num_steps, len(compute_M)))
        if self.stragglers is not None:
            compute_SxM = self.stragglers.draw(compute_SxM, np.random.default_rng(seed))
        return compute_SxM.sum(0).mean() / self.run_seconds(gbit_s, compute_SxM)

    def run_seconds(self, gbit_s: ArrayLike, compute_SxM: NDArray[np.float64]) -> Times:
        """What a run takes at each bandwidth, its last merge included.

        Args:
            gbit_s: bandwidths, (B,).
            compute_SxM: compute time of each of S steps on each replica.
        """
        compute_SxM = np.asarray(compute_SxM, dtype=np.float64)
        if self.settings.method == "data_parallel":
            return _DataParallel(self, gbit_s).run_seconds(compute_SxM.max(1))
        run = Run(self, gbit_s)
        run.advance(compute_SxM)
        return run.end_seconds()

    def _period_seconds(self, gbit_s: ArrayLike) -> Times:
        compute_M = np.array([replica.step_seconds for replica in self.replicas])
        if self.settings.method == "data_parallel":
            return _DataParallel(self, gbit_s).run_seconds(compute_M.max(keepdims=True))
        return Run(self, gbit_s).period_seconds(compute_M)


class Run:
    """The state of a run between two steps, for all bandwidths; M = 1 waits for nothing."""

    def __init__(self, model: PhysicalModel, gbit_s: ArrayLike) -> None:
        gbit_s_B = checked_gbit_s(gbit_s)
        num_replicas = len(model.replicas)
        bandwidth_BxM = np.stack(
            [gbit_s_B if r.gbit_s is None else np.full_like(gbit_s_B, r.gbit_s) for r in model.replicas], axis=1
        )
        lane_BxMxM = (
            np.minimum(bandwidth_BxM[:, :, None], bandwidth_BxM[:, None, :]) * 1e9 / max(1, num_replicas - 1)
        )
        latency_M = np.array([replica.latency_seconds for replica in model.replicas])
        others_MxM = ~np.eye(num_replicas, dtype=bool)  # what a replica sends to itself is there at once
        self.model = model
        self._seconds_per_bit_BxMxM = others_MxM / lane_BxMxM
        self._delay_MxM = others_MxM * (latency_M[:, None] + latency_M) / 2
        overlaps = [model.schedule.overlap(replica) for replica in range(num_replicas)]
        self._replicas_by_overlap = {tau: np.flatnonzero(np.equal(overlaps, tau)) for tau in set(overlaps)}
        self.num_steps = 0
        self.computed_BxM = np.zeros_like(bandwidth_BxM)
        """C of the last step."""
        self.ready_BxM = np.zeros_like(bandwidth_BxM)
        """E of the last step."""
        num_phases = len(model.lane_bits)
        self.free_QxBxMxM = np.zeros((num_phases + (num_phases > 1), *lane_BxMxM.shape))
        """When each lane has sent all of a phase; after the phases, if there are several, all of them together."""
        self.arrived: dict[int, Times] = {}
        """By the step that sent it: when each replica has everything, (B, M); of what not all have merged."""

    def advance(self, compute_SxM: NDArray[np.float64]) -> None:
        """Take steps, with given compute times."""
        start, end = self.num_steps, self.num_steps + len(compute_SxM)
        total_SxM = np.vstack([np.zeros(compute_SxM.shape[1]), compute_SxM.cumsum(0)])
        for step in self._steps_with_syncs(start, end):
            self._take(step, total_SxM[step - start] - total_SxM[self.num_steps - start])
        self.ready_BxM = self.ready_BxM + (total_SxM[-1] - total_SxM[self.num_steps - start])
        self.num_steps = end

    def end_seconds(self) -> Times:
        """When the last replica has merged all that was sent."""
        return np.stack([self.ready_BxM, *self.arrived.values()]).max((0, 2))

    def period_seconds(self, compute_M: NDArray[np.float64]) -> Times:
        """H steps in the steady state."""
        schedule = self.model.schedule
        period = schedule.sync_every
        start = 2 * period  # from here on, every fragment has been sent before
        sent = [step for step in range(start - schedule.max_overlap, start + 1) if schedule.sent(step)]
        self.arrived = {step: self.ready_BxM for step in sent if step + schedule.max_overlap > start}

        def go_on(x_SxB: Times) -> Times:
            self._set(x_SxB)
            self.num_steps = start
            self.advance(np.broadcast_to(compute_M, (period, len(compute_M))))
            self.arrived = {step - period: arrival for step, arrival in self.arrived.items()}
            return self._times()

        return growth_rate(go_on, self._times(), longest_cycle=2 * (schedule.max_overlap + 1))

    def _take(self, step: int, compute_M: NDArray[np.float64]) -> None:
        """All steps up to this one, of which it alone has a sync."""
        self.num_steps, self.computed_BxM = step, self.ready_BxM + compute_M
        schedule = self.model.schedule
        if syncs := schedule.sent(step):
            self.arrived[step] = np.stack([self.send(sync.fragment) for sync in syncs]).max(0)
        ready_BxM = self.computed_BxM.copy()
        for overlap, replicas in self._replicas_by_overlap.items():
            if (arrived_BxM := self.arrived.get(step - overlap)) is not None:
                ready_BxM[:, replicas] = np.maximum(ready_BxM[:, replicas], arrived_BxM[:, replicas])
        self.ready_BxM = ready_BxM
        self.arrived.pop(step - schedule.max_overlap, None)

    def send(self, fragment: int) -> Times:
        """Put a fragment on all lanes; when each replica has everything, (B, M)."""
        num_bits = [bits * self.model.fragment_params[fragment] for bits in self.model.lane_bits]
        arrived_BxM = self.computed_BxM
        for phase, bits in enumerate(num_bits):
            arrived_BxM = self.transmit(fragment, phase, bits, arrived_BxM)
        if len(num_bits) == 1:
            return arrived_BxM
        return np.maximum(arrived_BxM, self.transmit(fragment, -1, sum(num_bits), self.computed_BxM))

    def transmit(self, fragment: int, queue: int, bits: float, ready_BxM: Times) -> Times:
        """Put so many bits on each lane when its sender is ready; when each replica has them all, (B, M)."""
        start_BxMxM = np.maximum(self.free_QxBxMxM[queue], ready_BxM[:, :, None])
        self.free_QxBxMxM[queue] = start_BxMxM + bits * self._seconds_per_bit_BxMxM
        return (self.free_QxBxMxM[queue] + self._delay_MxM).max(1)

    def _steps_with_syncs(self, start: int, end: int) -> list[int]:
        schedule = self.model.schedule
        overlaps = {0, *self._replicas_by_overlap}
        sent = [
            step for step in range(start - schedule.max_overlap + 1, end + 1) if step > 0 and schedule.sent(step)
        ]
        return sorted({step + overlap for step in sent for overlap in overlaps if start < step + overlap <= end})

    def _times(self) -> Times:
        num_bandwidths = len(self.ready_BxM)
        parts = (self.ready_BxM, *self.free_QxBxMxM, *self.arrived.values())
        return np.concatenate([part.reshape(num_bandwidths, -1) for part in parts], axis=1).T

    def _set(self, x_SxB: Times) -> None:
        shape, num_replicas = self.free_QxBxMxM.shape, self.ready_BxM.shape[1]
        sizes = [num_replicas, *[num_replicas**2] * shape[0], *[num_replicas] * len(self.arrived)]
        ready_BxM, *parts = np.split(x_SxB.T, np.cumsum(sizes)[:-1], axis=1)
        self.ready_BxM, self.free_QxBxMxM = ready_BxM, np.stack(parts[: shape[0]]).reshape(shape)
        self.arrived = dict(zip(self.arrived, parts[shape[0] :], strict=True))


class _DataParallel:
    """Steps that begin together on all replicas: the slowest replica's compute time x decides what one takes.

        seconds(x) = max(x, max_k (φ_k·x + Σ_{i ≥ k} all-reduce of i) + latency of the last)

    with the layers' gradients k in the order of the backward pass, then what is outside the blocks, and φ_k the
    part of x at which gradient k is done: the nodes of a step are those of the paper's simulator.
    """

    def __init__(self, model: PhysicalModel, gbit_s: ArrayLike) -> None:
        gbit_s_B = checked_gbit_s(gbit_s)
        own = [replica.gbit_s for replica in model.replicas]
        slowest_B = np.minimum(
            np.inf if None not in own else gbit_s_B, min((g for g in own if g is not None), default=np.inf)
        ) * np.ones_like(gbit_s_B)
        num_replicas, num_layers = len(model.replicas), model.size.num_layers
        from_last_L = np.arange(1, num_layers + 1)
        nodes_L = num_layers + 2 * from_last_L - (from_last_L == num_layers)
        self._done_K = np.append(nodes_L / (3 * num_layers - 1), 1.0)
        sizes_K = np.append(np.full(num_layers, model.size.block_params), model.size.outside_params)
        bits_K = 2 * (num_replicas - 1) / num_replicas * model.lane_bits[0] * sizes_K
        seconds_KxB = bits_K[:, None] / (slowest_B * 1e9)
        latency = 2 * (num_replicas - 1) * max(replica.latency_seconds for replica in model.replicas)
        self._left_KxB = seconds_KxB[::-1].cumsum(0)[::-1] + latency

    def run_seconds(self, slowest_S: NDArray[np.float64]) -> Times:
        """All steps, (B,), for the slowest replica's compute time in each."""
        total_B = np.zeros(self._left_KxB.shape[1])
        for some_S in np.array_split(slowest_S, -(-len(slowest_S) // 1000)):
            ends_SxKxB = self._done_K[:, None] * some_S[:, None, None] + self._left_KxB
            total_B += np.maximum(ends_SxKxB.max(1), some_S[:, None]).sum(0)
        return total_B
