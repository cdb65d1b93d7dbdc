"""A fleet whose replicas come and go over a log in a store: one outer step after another, all replicas at once.

The rules are those of `rendezvous/`: who is active (`last_recent`), and how many payloads a decision needs
(`least_payloads`). A round of fragment p goes as the engine lets it:

1. It opens when the first replica has sent its outer gradient: H steps after its last send. A replica that sees it sends
   its own too, if it has taken H/4 steps since its last one.
2. A payload is in the store after size / uplink and a round trip; payloads of a replica go one after the other.
3. A replica has seen k payloads when its downlink has taken them, a poll and a round trip after each came.
4. One that has those of all active replicas decides; after τ of its own steps with those of the quorum; after
   `patience` more with what is there. Others know it a poll and two round trips later.
5. A payload that came too late counts in the next round, until it is more than `max_stale` rounds old.

A machine that fails loses what it has not sent since its last checkpoint; its replica joins again, as another one,
when it is repaired and has read Θ. Nobody waits for the exchange but by staleness: `engine.step()` does not.

Shapes: M replicas, P fragments, K payloads in the order of their arrival.
"""

import math

import numpy as np

from diloco.rendezvous.log.run import last_recent, least_payloads
from diloco.rendezvous.prices import exchange, polling
from diloco.simulator.fleet import Floats, FleetRun, Outcome

_MOST_SAMPLES = 100_000
_ROUND_TRIPS_TO_KNOW = 2
"""After a decision: the entry is written, and read by others."""


def in_store(run: FleetRun, *, num_outer_steps: int, seed: int = 0) -> Outcome:
    """So many outer steps of a fleet over a store.

    >>> from diloco.simulator.fleet import Machines
    >>> home = Machines(name="4090", count=8, step_seconds=1.0, up_mbit_s=20, down_mbit_s=100)
    >>> outcome = in_store(FleetRun(machines=(home,), num_params=1e8, step_tokens=4096), num_outer_steps=50)
    >>> round(outcome.goodput, 2), outcome.contributors
    (0.99, 8.0)
    """
    fleet = _Fleet(run, seed)
    for _ in range(num_outer_steps):
        fleet.take_outer_step()
    return fleet.outcome()


class _Fleet:
    """All replicas, between two outer steps.

    Args:
        run: the fleet and its settings.
        seed: of failures, step times and polls.
    """

    def __init__(self, run: FleetRun, seed: int) -> None:
        kinds, num_replicas, num_fragments = run.machines, run.num_replicas, run.num_fragments
        self.run, self.random, self.now = run, np.random.default_rng(seed), 0.0
        self.kind_M = np.repeat(np.arange(len(kinds)), [kind.count for kind in kinds])
        self.step_M = run.each([kind.mean_step_seconds for kind in kinds])
        self.upload_M = run.each([8e-6 * run.fragment_bytes / kind.up_mbit_s for kind in kinds])
        self.download_M = run.each([8e-6 * self._bytes_down() / kind.down_mbit_s for kind in kinds])
        self.trip_M = run.each([2 * kind.latency_seconds for kind in kinds])
        self.mean_up_M = run.each([3600 * kind.hours_between_failures for kind in kinds])
        self.pause_M = run.each([kind.repair_seconds + run.join_seconds(kind) for kind in kinds])
        self.notice_M = run.each([kind.notice_seconds for kind in kinds])
        self.patience = run.sync_every if run.patience is None else run.patience
        self.early_steps = max(1, run.sync_every // 4)
        # Life of each replica: it computes from `since` until `until`, and is gone after that until it joins again.
        self.since_M = np.zeros(num_replicas)
        self.until_M = self._lives(num_replicas, self.mean_up_M)
        self.is_gone_M = np.zeros(num_replicas, dtype=bool)
        self.has_left_M = np.zeros(num_replicas, dtype=bool)
        self.last_outer_M = np.zeros(num_replicas, dtype=np.int64)
        self.up_free_M, self.down_free_M = np.zeros(num_replicas), np.zeros(num_replicas)
        # Of each fragment: the last send, the last send that was counted, and a payload that waits to be counted.
        offsets_P = np.arange(num_fragments) * run.sync_every // num_fragments
        self.sent_PM = (offsets_P[:, None] - (run.sync_every if num_fragments > 1 else 0)) * self.step_M
        self.sent_PM[offsets_P == 0] = 0.0
        self.counted_PM = np.zeros((num_fragments, num_replicas))
        self.waits_PM = np.full((num_fragments, num_replicas), np.inf)
        """When it was in the store; infinity where there is none."""
        self.base_PM = np.zeros((num_fragments, num_replicas), dtype=np.int64)
        self.rounds_P, self.decided_P = np.zeros(num_fragments, dtype=np.int64), np.zeros(num_fragments)
        self.opens_P = np.array([self._opening(p) for p in range(num_fragments)])
        self.num_outer = 0
        self.counted_seconds_M, self.lost_seconds = np.zeros(num_replicas), 0.0
        self.num_counted, self.sum_stale = 0, 0
        self.gone_seconds_M = np.zeros(num_replicas)
        self.delays: list[Floats] = []

    def _bytes_down(self) -> float:
        """Bytes that a replica reads for one payload of another."""
        run = self.run
        return run.fragment_bytes if run.shares == 1 else run.fragment_bytes / run.shares

    def _lives(self, size: int, mean_M: Floats) -> Floats:
        return self.random.exponential(1.0, size) * mean_M

    def _opening(self, p: int) -> float:
        """The time at which the next round's first payload is in the store, if nobody fails before."""
        ready_M = np.where(
            np.isfinite(self.waits_PM[p]),
            self.waits_PM[p],
            np.maximum(self.sent_PM[p] + self.run.sync_every * self.step_M, self.up_free_M)
            + (self.upload_M + self.trip_M),
        )
        ready_M[self.is_gone_M] = np.inf
        return max(float(ready_M.min()), self.decided_P[p])

    def take_outer_step(self) -> None:
        """Decide and take the outer step of the fragment whose round opens next."""
        p = int(self.opens_P.argmin())
        while self._has_events(self.opens_P[p]):
            self.opens_P[p] = self._opening(p)
            p = int(self.opens_P.argmin())
        opens = self.opens_P[p]
        if not math.isfinite(opens):  # nobody is there
            self._pass_events(float(self._next_event_M().min()))
            self.opens_P[:] = [self._opening(q) for q in range(self.run.num_fragments)]
            return self.take_outer_step()
        send_M, arrival_M = self._sends(p, opens)
        decision = self._decision(p, send_M, arrival_M)
        if decision is None:  # a quorum that is not there: until somebody comes
            self._pass_events(float(self._next_event_M().min()))
            self.opens_P[p] = max(self._opening(p), self.now)
            return self.take_outer_step()
        self._count(p, send_M, arrival_M, *decision)
        return None

    def _next_event_M(self) -> Floats:
        return np.where(self.is_gone_M, self.since_M, self.until_M)

    def _has_events(self, time: float) -> bool:
        """Let replicas fail and join up to a time; True if any did."""
        has_any = False
        while (self._next_event_M() <= time).any():
            self._pass_events(time)
            has_any = True
        return has_any

    def _pass_events(self, time: float) -> None:
        self.now = max(self.now, time)
        joins, fails = self.is_gone_M & (self.since_M <= time), ~self.is_gone_M & (self.until_M <= time)
        if joins.any():
            since = self.since_M[joins]
            self.is_gone_M[joins] = self.has_left_M[joins] = False
            self.until_M[joins] = since + self._lives(len(since), self.mean_up_M[joins])
            self.last_outer_M[joins] = self.num_outer
            self.up_free_M[joins] = self.down_free_M[joins] = since
            self.sent_PM[:, joins] = self.counted_PM[:, joins] = since
            self.waits_PM[:, joins] = np.inf  # its join fences the replica that it was
        if fails.any():
            until = self.until_M[fails]
            has_notice = self.notice_M[fails] >= self.upload_M[fails] * self.run.num_fragments
            unsent_seconds = (until - self.counted_PM[:, fails]).mean(axis=0)
            lost = np.minimum(unsent_seconds, self.run.checkpoint_seconds * self.random.random(len(until)))
            self.lost_seconds += float(np.where(has_notice, 0.0, lost).sum())
            kept = np.where(has_notice, unsent_seconds, np.maximum(0.0, unsent_seconds - lost))
            # Its checkpoint's work, or what it sent on notice, counts with a later payload of its.
            self.counted_seconds_M[fails] += kept
            self.is_gone_M[fails], self.has_left_M[fails] = True, has_notice
            self.since_M[fails] = until + self.pause_M[fails]
            self.gone_seconds_M[fails] += self.pause_M[fails]

    def _sends(self, p: int, opens: float) -> tuple[Floats, Floats]:
        """When each replica has sent, and when its payload is in the store; infinity if it never is."""
        run, sent_M = self.run, self.sent_PM[p]
        step_M = self._steps_M()
        waits_M = self.waits_PM[p]
        is_waiting_M = np.isfinite(waits_M)
        seen_M = opens + self.random.random(len(sent_M)) * run.poll_seconds + self.trip_M
        # A replica looks at the end of a step.
        seen_M = sent_M + np.ceil(np.maximum(seen_M - sent_M, 0.0) / step_M) * step_M
        send_M = np.minimum(
            sent_M + run.sync_every * step_M, np.maximum(sent_M + self.early_steps * step_M, seen_M)
        )
        arrival_M = np.maximum(send_M, self.up_free_M) + (self.upload_M + self.trip_M)
        arrival_M = np.where(is_waiting_M, waits_M, arrival_M)
        send_M = np.where(is_waiting_M, sent_M, send_M)
        arrival_M[self.is_gone_M & ~is_waiting_M | (arrival_M > self.until_M) & ~is_waiting_M] = np.inf
        return send_M, arrival_M

    def _steps_M(self) -> Floats:
        """The mean step time of each replica until its next send."""
        kinds = self.run.machines
        if not any(kind.stragglers.step_variation for kind in kinds):
            return self.step_M
        sigma_M = self.run.each([kind.stragglers.step_variation for kind in kinds]) / self.run.sync_every**0.5
        return self.step_M * np.maximum(0.1, 1 + sigma_M * self.random.standard_normal(len(sigma_M)))

    def _decision(self, p: int, send_M: Floats, arrival_M: Floats) -> tuple[float, "np.ndarray"] | None:
        """The time of the decision, and the replicas that it counts; None if there can't be any yet."""
        run = self.run
        active_M = ~self.has_left_M & (self.last_outer_M >= last_recent(self.num_outer, run.num_fragments))
        num_active = int(active_M.sum())
        order_K = np.argsort(arrival_M)[: int(np.isfinite(arrival_M).sum())]
        arrival_K, num_active_K = arrival_M[order_K], np.cumsum(active_M[order_K])
        if not len(order_K):
            return None
        can_decide_M = np.isfinite(arrival_M) & ~self.is_gone_M
        overlap_M = np.where(can_decide_M, send_M + run.overlap_steps * self.step_M, np.inf)
        best, num_counted = math.inf, 0
        for kind in range(len(run.machines)):
            of_kind_M = can_decide_M & (self.kind_M == kind)
            if not of_kind_M.any():
                continue
            here_K = self._downloads(of_kind_M, arrival_K)
            one = int(np.flatnonzero(of_kind_M)[0])
            after_overlap = float(overlap_M[of_kind_M].min())
            after_patience = after_overlap + self.patience * self.step_M[one]
            times = [
                max(after, here_K[first])
                for after, least in (
                    (0.0, num_active),
                    (after_overlap, least_payloads(run.quorum, num_active, after_patience=False)),
                    (after_patience, least_payloads(run.quorum, num_active, after_patience=True)),
                )
                if (first := int(np.searchsorted(num_active_K, max(1, least)))) < len(order_K)
            ]
            if times and (time := min(times)) < best:
                best, num_counted = time, int(np.searchsorted(here_K, time, side="right"))
        return (best, order_K[:num_counted]) if math.isfinite(best) else None

    def _downloads(self, of_kind_M: "np.ndarray", arrival_K: Floats) -> Floats:
        """When the first of these replicas has the first k payloads: max_i ≤ k (arrival_i + (k − i + 1) d)."""
        one = int(np.flatnonzero(of_kind_M)[0])
        place_K, seconds = np.arange(len(arrival_K)), self.download_M[one]
        looks = self.run.poll_seconds / 2 + self.trip_M[one]  # of the last payload
        last_K = np.maximum.accumulate(arrival_K - place_K * seconds)
        is_free = float(self.down_free_M[of_kind_M].min())
        # Its own payload is not read; shares need averages besides, a second upload and download.
        here_K = np.maximum(last_K, is_free) + np.maximum(place_K, 0) * seconds + looks
        if self.run.shares > 1:
            here_K += (self.upload_M[one] + 8e-6 * self.run.fragment_bytes / self._down_mbit_s(one)) + 2 * looks
        return here_K

    def _down_mbit_s(self, replica: int) -> float:
        return self.run.machines[self.kind_M[replica]].down_mbit_s

    def _count(self, p: int, send_M: Floats, arrival_M: Floats, time: float, counted: "np.ndarray") -> None:
        """Take the outer step: the counted ones begin anew, the others' payloads wait for the next round."""
        run, known = self.run, time + _ROUND_TRIPS_TO_KNOW * self.trip_M
        is_waiting_M = np.isfinite(self.waits_PM[p])
        sends_M = ~is_waiting_M & np.isfinite(arrival_M) & (send_M <= known)
        # Those whose downlink lags begin against an older round.
        period = max(time - self.decided_P[p], 1e-9)
        behind_M = np.ceil(np.maximum(self.down_free_M - send_M, 0.0) / period).astype(np.int64)
        self.base_PM[p] = np.where(sends_M, self.rounds_P[p] - behind_M, self.base_PM[p])
        self.up_free_M = np.where(sends_M, arrival_M - self.trip_M, self.up_free_M)
        self.sent_PM[p] = np.where(sends_M, send_M, self.sent_PM[p])
        self.waits_PM[p] = np.where(sends_M, arrival_M, self.waits_PM[p])

        stale = self.rounds_P[p] - self.base_PM[p][counted]
        counted = counted[stale <= run.max_stale]
        self.num_counted += len(counted)
        self.sum_stale += int(stale[stale <= run.max_stale].sum())
        work = self.sent_PM[p][counted] - self.counted_PM[p][counted]
        self.counted_seconds_M[counted] += work / run.num_fragments
        self.counted_PM[p][counted] = self.sent_PM[p][counted]
        self.num_outer += 1
        self.rounds_P[p] += 1
        self.last_outer_M[counted] = self.num_outer
        self.waits_PM[p][counted] = np.inf
        too_old_M = (self.waits_PM[p] <= time) & (self.base_PM[p] < self.rounds_P[p] - run.max_stale)
        self.waits_PM[p][too_old_M] = np.inf
        fresh = counted[sends_M[counted]]
        if sum(map(len, self.delays)) < _MOST_SAMPLES:
            looks = self.random.random(len(fresh)) * run.poll_seconds
            self.delays.append(known[fresh] + looks - send_M[fresh])
        others = len(counted) - 1
        self.down_free_M = np.maximum(self.down_free_M, self.opens_P[p]) + others * self.download_M
        self.decided_P[p], self.now = time, max(self.now, time)
        self.opens_P[p] = self._opening(p)

    def outcome(self) -> Outcome:
        """The numbers of the outer steps so far."""
        run, seconds = self.run, self.now
        possible = float((seconds / self.step_M).sum())
        read = float(((seconds - np.minimum(self.gone_seconds_M, seconds)) / self.step_M).sum())
        counted = float((self.counted_seconds_M / self.step_M).sum())
        delays = np.concatenate(self.delays) if self.delays else np.array([math.nan])
        prices_M = run.each([kind.dollars_per_hour for kind in run.machines])
        traffic = exchange(
            num_replicas=run.num_replicas,
            num_payloads=self.num_counted,
            num_steps=self.num_outer,
            payload_bytes=run.fragment_bytes,
            average_bytes=0 if run.shares == 1 else run.fragment_bytes,
            num_shares=run.shares,
        ) + polling(run.num_replicas, poll_seconds=run.poll_seconds, seconds=seconds)
        return Outcome(
            method="store",
            seconds=seconds,
            goodput=counted / possible,
            tokens_per_hour=counted * run.step_tokens * 3600 / seconds,
            num_outer_steps=self.num_outer,
            contributors=self.num_counted / self.num_outer,
            staleness=self.sum_stale / max(1, self.num_counted),
            decided_seconds=(float(np.median(delays)), float(np.percentile(delays, 99))),
            lost=max(0.0, 1 - counted / read),
            traffic=traffic,
            machine_dollars=float((prices_M * (seconds - np.minimum(self.gone_seconds_M, seconds))).sum() / 3600),
        )




