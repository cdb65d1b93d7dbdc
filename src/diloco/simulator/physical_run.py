"""The state of a run of the physical model between two steps, for all bandwidths at once.

Shapes: B bandwidths, M replicas (MxM: sender, then receiver), Q queues of a lane, S steps or times of the state.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.schedule import Schedule
from diloco.simulator.bandwidth import checked_gbit_s
from diloco.simulator.replicas import Replica
from diloco.simulator.steady import Times, growth_rate


class PhysicalRun:
    """A run of M replicas that exchange outer gradients; with M = 1 there is nothing to wait for.

    Args:
        gbit_s: bandwidth of those links that have none of their own, (B,).
        replicas: the M machines.
        schedule: when each fragment is sent and merged.
        fragment_params: parameters of each fragment.
        lane_bits: bits a parameter of a fragment puts on each lane, one number a phase of the exchange.
        on_transmit: called with fragment, start and end, (B, M, M) seconds, whenever a phase is put on the lanes.
    """

    def __init__(
        self,
        gbit_s: ArrayLike,
        *,
        replicas: Sequence[Replica],
        schedule: Schedule,
        fragment_params: Sequence[float],
        lane_bits: Sequence[float],
        on_transmit: Callable[[int, Times, Times], None] = lambda *_: None,
    ) -> None:
        self._schedule, self._fragment_params, self._lane_bits = schedule, fragment_params, lane_bits
        self._on_transmit = on_transmit
        gbit_s_B, num_replicas = checked_gbit_s(gbit_s), len(replicas)
        links = [gbit_s_B if r.gbit_s is None else np.full_like(gbit_s_B, r.gbit_s) for r in replicas]
        link_BxM = np.stack(links, axis=1)
        lane_BxMxM = np.minimum(link_BxM[:, :, None], link_BxM[:, None, :]) * 1e9 / max(1, num_replicas - 1)
        latency_M = np.array([replica.latency_seconds for replica in replicas])
        others_MxM = ~np.eye(num_replicas, dtype=bool)  # a replica has its own payloads at once
        self._seconds_per_bit_BxMxM = others_MxM / lane_BxMxM
        self._delay_MxM = others_MxM * (latency_M[:, None] + latency_M) / 2
        overlaps = [schedule.overlap(replica) for replica in range(num_replicas)]
        self._replicas_by_overlap = {tau: np.flatnonzero(np.equal(overlaps, tau)) for tau in set(overlaps)}
        self.num_steps = 0
        """Steps taken."""
        self.computed_BxM = np.zeros_like(link_BxM)
        """C of the last step."""
        self.ready_BxM = np.zeros_like(link_BxM)
        """E of the last step."""
        num_phases = len(lane_bits)
        self.free_QxBxMxM = np.zeros((num_phases + (num_phases > 1), *lane_BxMxM.shape))
        """Time at which each lane has sent all of a phase; with several phases, the last queue is all of them."""
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
        sent = [step for step in range(start - schedule.max_overlap, start + 1) if schedule.sent(step)]
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
        sent = [
            step for step in range(start - schedule.max_overlap + 1, end + 1) if step > 0 and schedule.sent(step)
        ]
        return sorted({step + overlap for step in sent for overlap in overlaps if start < step + overlap <= end})

    def _take(self, step: int, compute_M: NDArray[np.float64]) -> None:
        """Take all steps up to `step`, the only one of them with a sync, in `compute_M` seconds of compute."""
        self.num_steps, self.computed_BxM = step, self.ready_BxM + compute_M
        schedule = self._schedule
        if syncs := schedule.sent(step):
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
            start_BxMxM, arrived_BxM = self._transmit(phase, bits, arrived_BxM)
            self._on_transmit(fragment, start_BxMxM, self.free_QxBxMxM[phase])
        if len(num_bits) == 1:
            return arrived_BxM
        return np.maximum(arrived_BxM, self._transmit(-1, sum(num_bits), self.computed_BxM)[1])

    def _transmit(self, queue: int, bits: float, ready_BxM: Times) -> tuple[Times, Times]:
        """Put bits on each lane once its sender is ready.

        Returns:
            when each lane starts, (B, M, M), and when each replica has the bits of all others, (B, M).
        """
        start_BxMxM = np.maximum(self.free_QxBxMxM[queue], ready_BxM[:, :, None])
        self.free_QxBxMxM[queue] = start_BxMxM + bits * self._seconds_per_bit_BxMxM
        return start_BxMxM, (self.free_QxBxMxM[queue] + self._delay_MxM).max(1)

    def _times(self) -> Times:
        """All times of the state, (S, B)."""
        num_bandwidths = len(self.ready_BxM)
        parts = (self.ready_BxM, *self.free_QxBxMxM, *self.arrived.values())
        return np.concatenate([part.reshape(num_bandwidths, -1) for part in parts], axis=1).T

    def _set_times(self, x_SxB: Times) -> None:
        """The inverse of `_times`."""
        shape, num_replicas = self.free_QxBxMxM.shape, self.ready_BxM.shape[1]
        sizes = [num_replicas, *[num_replicas**2] * shape[0], *[num_replicas] * len(self.arrived)]
        ready_BxM, *parts = np.split(x_SxB.T, np.cumsum(sizes)[:-1], axis=1)
        self.ready_BxM, self.free_QxBxMxM = ready_BxM, np.stack(parts[: shape[0]]).reshape(shape)
        self.arrived = dict(zip(self.arrived, parts[shape[0] :], strict=True))
