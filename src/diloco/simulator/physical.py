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

Data-Parallel is a ring all-reduce of each layer's gradients at every step. The all-reduces run one after the
other, each once its gradients are ready on all replicas; a step ends with the last. Replicas begin a step
together, so that the slowest replica's compute time x decides its duration:

    seconds(x) = max(x, max_k (φ_k·x + Σ_{i ≥ k} all-reduce of i) + latency)

with gradients k in the order of the backward pass, those outside the blocks last, and φ_k the part of x after
which gradient k is ready: a step has the parts of the paper's simulator.

Shapes: B bandwidths, M replicas (MxM: sender, then receiver), Q queues of a lane, S steps or times of the state,
K gradients, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError, setting
from diloco.schedule import Schedule
from diloco.simulator.description import MethodSettings, ModelSize, Replica, Stragglers, checked_gbit_s
from diloco.simulator.steady import Times, growth_rate
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
        if not 1 <= len(self.replicas) <= _MOST_REPLICAS:
            raise UserError(
                f"num_replicas must be from 1 to {_MOST_REPLICAS}, not {len(self.replicas)}", "num_replicas"
            )
        self.settings.check_replicas(len(self.replicas))
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
        """Bits that a parameter of a fragment puts on each lane, one number per phase of the exchange."""
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
            if self.settings.method == "data_parallel":
                period_B = _data_parallel_seconds(self, gbit_s, compute_M.max(keepdims=True))
            else:
                period_B = PhysicalRun(self, gbit_s).period_seconds(compute_M)
            share_B = compute_M.mean() * self.schedule.sync_every / period_B
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
            return _data_parallel_seconds(self, gbit_s, compute_SxM.max(1))
        run = PhysicalRun(self, gbit_s)
        run.advance(compute_SxM)
        return run.end_seconds()


def _data_parallel_seconds(model: PhysicalModel, gbit_s: ArrayLike, slowest_S: NDArray[np.float64]) -> Times:
    """Duration of S steps of Data-Parallel, (B,), from the slowest replica's compute time in each."""
    gbit_s_B, replicas, num_layers = checked_gbit_s(gbit_s), model.replicas, model.size.num_layers
    own = [replica.gbit_s for replica in replicas]
    slowest_B = np.minimum(
        np.inf if None not in own else gbit_s_B, min((g for g in own if g is not None), default=np.inf)
    ) * np.ones_like(gbit_s_B)
    from_last_L = np.arange(1, num_layers + 1)
    parts_L = num_layers + 2 * from_last_L - (from_last_L == num_layers)
    ready_K = np.append(parts_L / (3 * num_layers - 1), 1.0)
    params_K = np.append(np.full(num_layers, model.size.block_params), model.size.outside_params)
    bits_K = 2 * (len(replicas) - 1) / len(replicas) * model.lane_bits[0] * params_K
    seconds_KxB = bits_K[:, None] / (slowest_B * 1e9)
    latency_seconds = 2 * (len(replicas) - 1) * max(replica.latency_seconds for replica in replicas)
    left_KxB = seconds_KxB[::-1].cumsum(0)[::-1] + latency_seconds
    total_B = np.zeros(len(gbit_s_B))
    for some_S in np.array_split(slowest_S, -(-len(slowest_S) // 1000)):
        ends_SxKxB = ready_K[:, None] * some_S[:, None, None] + left_KxB
        total_B += np.maximum(ends_SxKxB.max(1), some_S[:, None]).sum(0)
    return total_B


class PhysicalRun:
    """The state between two steps of a run that exchanges outer gradients, for all bandwidths at once.

    With M = 1 there is nothing to wait for.

    Args:
        model: of any method but data_parallel.
        gbit_s: bandwidth of those links that have none of their own, (B,).
        on_transmit: called with fragment, start and end, (B, M, M) seconds, whenever a phase is put on the lanes.
    """

    def __init__(
        self,
        model: PhysicalModel,
        gbit_s: ArrayLike,
        on_transmit: Callable[[int, Times, Times], None] = lambda *_: None,
    ) -> None:
        self._schedule, self._lane_bits = model.schedule, model.lane_bits
        self._sent = cache(model.schedule.sent)  # every period of the steady state asks for the same steps
        self._fragment_params = model.fragment_params
        self._on_transmit = on_transmit
        self._lanes = _Lanes(checked_gbit_s(gbit_s), model.replicas, num_phases=len(model.lane_bits))
        num_replicas = len(model.replicas)
        overlaps = [model.schedule.overlap(replica) for replica in range(num_replicas)]
        self._replicas_by_overlap = {tau: np.flatnonzero(np.equal(overlaps, tau)) for tau in set(overlaps)}
        self.num_steps = 0
        """Steps taken."""
        self.computed_BxM = np.zeros((np.size(gbit_s), num_replicas))
        """C of the last step."""
        self.ready_BxM = np.zeros_like(self.computed_BxM)
        """E of the last step."""
        self.arrived: dict[int, Times] = {}
        """Time at which each replica has all payloads, (B, M), by their step; kept until all have merged them."""

    def advance(self, compute_SxM: NDArray[np.float64]) -> None:
        """Take S steps with given compute times."""
        start, end = self.num_steps, self.num_steps + len(compute_SxM)
        total_SxM = np.vstack([np.zeros(compute_SxM.shape[1]), compute_SxM.cumsum(0)])
        for step in self._steps_with_syncs(start, end):
            self._take(step, total_SxM[step - start] - total_SxM[self.num_steps - start])
        self.ready_BxM = self.ready_BxM + (total_SxM[-1] - total_SxM[self.num_steps - start])
        self.num_steps = end

    def end_seconds(self) -> Times:
        """Time at which the last replica has merged everything that was sent, (B,)."""
        return np.stack([self.ready_BxM, *self.arrived.values()]).max((0, 2))

    def period_seconds(self, compute_M: NDArray[np.float64]) -> Times:
        """Duration of H steps in the steady state, (B,)."""
        schedule, period = self._schedule, self._schedule.sync_every
        start = 2 * period  # from here on, every fragment has been sent before
        sent = [step for step in range(start - schedule.max_overlap, start + 1) if self._sent(step)]
        self.arrived = {step: self.ready_BxM for step in sent if step + schedule.max_overlap > start}

        def next_period(x_SxB: Times) -> Times:
            self._set_times(x_SxB)
            self.num_steps = start
            self.advance(np.broadcast_to(compute_M, (period, len(compute_M))))
            self.arrived = {step - period: arrival for step, arrival in self.arrived.items()}
            return self._times()

        return growth_rate(next_period, self._times(), longest_cycle=2 * (schedule.max_overlap + 1))

    def _steps_with_syncs(self, start: int, end: int) -> list[int]:
        """The steps after `start`, up to `end`, at which a replica sends or merges."""
        schedule = self._schedule
        overlaps = {0, *self._replicas_by_overlap}
        sent = [step for step in range(start - schedule.max_overlap + 1, end + 1) if step > 0 and self._sent(step)]
        return sorted({step + overlap for step in sent for overlap in overlaps if start < step + overlap <= end})

    def _take(self, step: int, compute_M: NDArray[np.float64]) -> None:
        """Take all steps up to `step`, the only one of them with a sync, in `compute_M` seconds of compute."""
        self.num_steps, self.computed_BxM = step, self.ready_BxM + compute_M
        schedule = self._schedule
        if syncs := self._sent(step):
            self.arrived[step] = np.stack([self._send(sync.fragment) for sync in syncs]).max(0)
        ready_BxM = self.computed_BxM.copy()
        for overlap, replicas in self._replicas_by_overlap.items():
            if (arrived_BxM := self.arrived.get(step - overlap)) is not None:
                ready_BxM[:, replicas] = np.maximum(ready_BxM[:, replicas], arrived_BxM[:, replicas])
        self.ready_BxM = ready_BxM
        self.arrived.pop(step - schedule.max_overlap, None)

    def _send(self, fragment: int) -> Times:
        """Put a fragment on all lanes: when each replica has all payloads, (B, M)."""
        num_bits = [bits * self._fragment_params[fragment] for bits in self._lane_bits]
        arrived_BxM = self.computed_BxM
        for phase, bits in enumerate(num_bits):
            start_BxMxM, end_BxMxM, arrived_BxM = self._lanes.transmit(phase, bits, arrived_BxM)
            self._on_transmit(fragment, start_BxMxM, end_BxMxM)
        if len(num_bits) == 1:
            return arrived_BxM
        return np.maximum(arrived_BxM, self._lanes.transmit(-1, sum(num_bits), self.computed_BxM)[2])

    def _times(self) -> Times:
        """All times of the state, (S, B)."""
        num_bandwidths = len(self.ready_BxM)
        parts = (self.ready_BxM, *self._lanes.free_QxBxMxM, *self.arrived.values())
        return np.concatenate([part.reshape(num_bandwidths, -1) for part in parts], axis=1).T

    def _set_times(self, x_SxB: Times) -> None:
        """The inverse of `_times`."""
        shape, num_replicas = self._lanes.free_QxBxMxM.shape, self.ready_BxM.shape[1]
        sizes = [num_replicas, *[num_replicas**2] * shape[0], *[num_replicas] * len(self.arrived)]
        self.ready_BxM, *parts = np.split(x_SxB.T, np.cumsum(sizes)[:-1], axis=1)
        self._lanes.free_QxBxMxM = np.stack(parts[: shape[0]]).reshape(shape)
        self.arrived = dict(zip(self.arrived, parts[shape[0] :], strict=True))


class _Lanes:
    """The lanes between the replicas, one per sender and receiver.

    Payloads of one phase leave in a queue, one after the other. With two phases a lane has three queues: one per
    phase, and a last one that carries both, since a phase does not wait for the other, but both share the rate.
    """

    def __init__(self, gbit_s_B: Times, replicas: Sequence[Replica], *, num_phases: int) -> None:
        links = [gbit_s_B if r.gbit_s is None else np.full_like(gbit_s_B, r.gbit_s) for r in replicas]
        link_BxM = np.stack(links, axis=1)
        lane_BxMxM = np.minimum(link_BxM[:, :, None], link_BxM[:, None, :]) * 1e9 / max(1, len(replicas) - 1)
        latency_M = np.array([replica.latency_seconds for replica in replicas])
        others_MxM = ~np.eye(len(replicas), dtype=bool)  # a replica has its own payloads at once
        self._seconds_per_bit_BxMxM = others_MxM / lane_BxMxM
        self._delay_MxM = others_MxM * (latency_M[:, None] + latency_M) / 2
        self.free_QxBxMxM = np.zeros((num_phases + (num_phases > 1), *lane_BxMxM.shape))
        """Time at which each queue of each lane has sent everything."""

    def transmit(self, queue: int, bits: float, ready_BxM: Times) -> tuple[Times, Times, Times]:
        """Put bits into a queue of each lane, once its sender is ready.

        Returns:
            when each lane starts and ends, (B, M, M), and when each replica has the bits of all others, (B, M).
        """
        start_BxMxM = np.maximum(self.free_QxBxMxM[queue], ready_BxM[:, :, None])
        end_BxMxM = start_BxMxM + bits * self._seconds_per_bit_BxMxM
        self.free_QxBxMxM[queue] = end_BxMxM
        return start_BxMxM, end_BxMxM, (end_BxMxM + self._delay_MxM).max(1)
