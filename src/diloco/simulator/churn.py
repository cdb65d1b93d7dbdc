"""A fleet whose replicas come and go over a log in a store: one outer step after another, all replicas at once.

The rules are those of `rendezvous/`: who is active (`last_recent`), and how many payloads a decision needs
(`least_payloads`). A round of fragment p goes as the engine lets it:

1. It opens when the first replica has sent its outer gradient: H steps after its last send. A replica that sees it
   sends its own too, if it has taken H/4 steps since its last one.
2. A payload is in the store after size / uplink and a round trip; payloads of a replica go one after the other.
3. A replica has seen k payloads when its downlink has taken them, a look and a round trip after each came.
4. One that has those of all active replicas decides; after τ of its own steps with those of the quorum; after
   `patience` more with what is there. Others know it a poll and two round trips later.
5. A payload that came too late counts in the next round, until it is more than `max_stale` rounds old. The τ of
   its replica counts from that round's opening, and its next send is H steps after it was counted.

A machine that fails loses what it has not sent since its last checkpoint; its replica joins again, as another one,
when it is repaired and has read Θ. One that stalls stands still at a random time before its next send. Nobody
waits for the exchange but by staleness: `engine.step()` does not. Snapshots take no time of a link.

With 10⁴ replicas an outer step takes 1.1 ms of one core, and the process 50 MB.

Shapes: M replicas, P fragments, K payloads in the order of their arrival.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError
from diloco.rendezvous.log.run import last_recent, least_payloads
from diloco.rendezvous.prices import Traffic, run_traffic
from diloco.schedule import least_steps
from diloco.simulator.fleet import FleetRun, Floats, Machines, Mask, Outcome

Places: TypeAlias = NDArray[np.intp]
_MOST_SAMPLES = 100_000
_MOST_IDLE = 10_000
"""Failures, returns and payloads in vain without an outer step, after which there will be none."""
_ALL = slice(None)
_ROUND_TRIPS_TO_KNOW = 2
"""After a decision: the entry is written, and read by others."""


class Glance(NamedTuple):
    """A fleet after an outer step."""

    seconds: float
    contributors: int
    """Replicas that the outer step counts."""
    tokens: float
    """Tokens counted so far."""
    is_up_M: Mask


def in_store(
    run: FleetRun, *, num_outer_steps: int, seed: int = 0, watch: Callable[[Glance], object] | None = None
) -> Outcome:
    """So many outer steps of a fleet over a store, after each of which `watch` is called.

    >>> from diloco.simulator.fleet import Machines
    >>> home = Machines(name="4090", count=8, step_seconds=1.0, up_mbit_s=20, down_mbit_s=100)
    >>> outcome = in_store(FleetRun(machines=(home,), num_params=4e6, step_tokens=4096), num_outer_steps=50)
    >>> round(outcome.goodput, 2), outcome.contributors
    (1.0, 8.0)
    """
    fleet = _Fleet(run, seed)
    for _ in range(num_outer_steps):
        num_before = fleet.num_counted
        fleet.take_outer_step()
        if watch is not None:
            watch(Glance(fleet.now, fleet.num_counted - num_before, fleet.counted_tokens, ~fleet.is_gone_M))
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
        self.places = run.places
        self.step_M = run.each([kind.mean_step_seconds for kind in kinds])
        self.pace_M = run.each([kind.step_seconds for kind in kinds])
        """Seconds of an inner step without a stall."""
        self.upload_M = run.each([8e-6 * run.fragment_bytes / kind.up_mbit_s for kind in kinds])
        read_M = run.each([8e-6 * run.fragment_bytes / kind.down_mbit_s for kind in kinds])
        self.download_M, self.averages_M = run.own_part * read_M, (1 - run.own_part) * read_M
        """Seconds in which a replica reads its part of another's payload, and the others' averages."""
        self.average_M = self.upload_M * (run.own_part if run.shares > 1 else 0.0)
        """Seconds in which it uploads its own average."""
        self.trip_M = run.each([2 * kind.latency_seconds for kind in kinds])
        self.path_M, self.to_know_M = self.upload_M + self.trip_M, _ROUND_TRIPS_TO_KNOW * self.trip_M
        self.mean_up_M = run.each([3600 * kind.hours_between_failures for kind in kinds])
        self.pause_M = run.each([kind.repair_seconds + run.join_seconds(kind) for kind in kinds])
        self.notice_M = run.each([kind.notice_seconds for kind in kinds])
        self.longest_poll_seconds = run.longest_poll_seconds
        self.patience = run.sync_every if run.patience is None else run.patience
        self.most_early_M = (run.sync_every - least_steps(run.sync_every)) * self.pace_M
        self.event_M = self._lives(self.mean_up_M)
        """The time at which each replica fails, or at which it joins again if it is gone."""
        self.since_M = np.zeros(num_replicas)
        self.is_gone_M = np.zeros(num_replicas, dtype=bool)
        self.has_left_M = np.zeros(num_replicas, dtype=bool)
        self.last_outer_M = np.zeros(num_replicas, dtype=np.int64)
        self.up_free_M, self.down_free_M = np.zeros(num_replicas), np.zeros(num_replicas)
        # Of each fragment: the next send, the last one, the last one that was counted, and the payload that waits.
        offsets_P = np.arange(num_fragments) * run.sync_every // num_fragments
        self.first_P = np.where(offsets_P == 0, run.sync_every, offsets_P)
        """Inner steps until the first send."""
        self.due_PM = self.first_P[:, None] * self.pace_M
        self.sigma_M = run.each([kind.stragglers.step_variation for kind in kinds])
        self.stall_probability_M = run.each([kind.stragglers.stall_probability for kind in kinds])
        self.stall_seconds_M = run.each([kind.stragglers.stall_seconds for kind in kinds])
        self.has_variation, self.has_stalls = bool(self.sigma_M.any()), bool(self.stall_probability_M.any())
        self.stalls_PM = np.zeros((2, num_fragments, num_replicas))
        """Beginning and end of the stall before each next send."""
        self.sent_PM = np.zeros((num_fragments, num_replicas))
        self.counted_PM = np.zeros((num_fragments, num_replicas))
        self.waits_PM = np.full((num_fragments, num_replicas), np.inf)
        """The time at which that was in the store; infinity where there is none."""
        self.base_PM = np.zeros((num_fragments, num_replicas))
        self.rounds_P, self.decided_P = np.zeros(num_fragments, dtype=np.int64), np.zeros(num_fragments)
        self.opens_P = np.zeros(num_fragments)
        """A time at which the next round of each fragment opens, or one before that."""
        self.num_outer = self.num_idle = 0
        self.counted_seconds_M = np.zeros(num_replicas)
        self.num_counted, self.sum_stale, self.num_joins = 0, 0, 0
        self.gone_seconds_M = np.zeros(num_replicas)
        self.delays, self.num_delays = list[Floats](), 0

    def _lives(self, mean_M: Floats) -> Floats:
        return self.random.exponential(1.0, len(mean_M)) * mean_M

    def _opening(self, p: int) -> float:
        """The time at which the next round's first payload is in the store, if nobody fails before."""
        ready_M = np.maximum(self.due_PM[p], self.up_free_M)
        ready_M += self.path_M
        # np.where has no branches: a quarter of the time of a copy with a mask.
        opens = float(np.where(self.is_gone_M | np.isfinite(self.waits_PM[p]), np.inf, ready_M).min())
        if math.isinf(opens):  # late payloads alone: one that waits decides when its patience is over
            late_M = self.sent_PM[p] + (self.run.overlap_steps + self.patience) * self.pace_M
            opens = float(np.where(self.is_gone_M, np.inf, np.maximum(late_M, self.waits_PM[p])).min())
        return max(opens, self.decided_P[p])

    def take_outer_step(self) -> None:
        """Decide and take the outer step of the fragment whose round opens next."""
        while True:
            p = int(self.opens_P.argmin())
            opens = self._opening(p)
            if opens > self.opens_P[p]:
                self.opens_P[p] = opens
            elif math.isinf(opens):  # nobody is there
                self._pass_events(float(self.event_M.min()))
                self.opens_P[:] = 0.0
            elif not self._has_events(opens):
                send_M, arrival_M = self._sends(p, opens)
                decision = self._decision(p, send_M, arrival_M)
                if decision and self._count(p, send_M, arrival_M, *decision):
                    return
                # A quorum that is not there: nobody decides until somebody comes. Or all was too old.
                self._pass_events(opens if decision else float(self.event_M.min()))
                if decision is None:
                    self.decided_P[p] = self.now

    def _has_events(self, time: float) -> bool:
        """Let replicas fail and join up to a time; True if any did."""
        has_any = False
        while self.event_M.min() <= time:
            self._pass_events(time)
            has_any = True
        return has_any

    def _pass_events(self, time: float) -> None:
        """Let those replicas fail or join whose next event is due."""
        self.num_idle += 1
        if self.num_idle > _MOST_IDLE or math.isinf(time):
            raise UserError(
                f"after {self.num_outer} outer steps no more follows: machines fail before they have sent, or "
                f"send too late, or are never so many at once as quorum={self.run.quorum} needs",
                *("machines", "quorum"),
            )
        self.now = max(self.now, time)
        events = np.flatnonzero(self.event_M <= time)
        is_joining = self.is_gone_M[events]
        self._join(events[is_joining])
        self._fail(events[~is_joining])

    def _join(self, joins: Places) -> None:
        """Let replicas join anew: they plan their sends, and are waited for."""
        since = self.event_M[joins]
        self.num_joins += len(joins)
        self.is_gone_M[joins] = self.has_left_M[joins] = False
        self.event_M[joins] = since + self._lives(self.mean_up_M[joins])
        self.last_outer_M[joins] = self.num_outer
        self.up_free_M[joins] = self.down_free_M[joins] = since
        self.counted_PM[:, joins] = self.since_M[joins] = since
        self.due_PM[:, joins], self.stalls_PM[:, :, joins] = self._next(since, self.first_P[:, None], joins)
        self.opens_P = np.minimum(self.opens_P, self.due_PM[:, joins].min(axis=1, initial=np.inf))
        self.waits_PM[:, joins] = np.inf  # its join fences the replica that it was

    def _fail(self, fails: Places) -> None:
        """Let machines fail: they lose what is neither counted nor in a checkpoint, and are back after a pause."""
        until = self.event_M[fails]
        has_notice = self.notice_M[fails] >= self.upload_M[fails] * self.run.num_fragments
        unsent_seconds = (until - self.counted_PM[:, fails]).mean(axis=0)
        lost = np.minimum(unsent_seconds, (until - self.since_M[fails]) % self.run.checkpoint_seconds)
        # The work of its checkpoint, or what it sends on notice, counts with a later payload of its.
        self.counted_seconds_M[fails] += unsent_seconds - np.where(has_notice, 0.0, lost)
        self.is_gone_M[fails], self.has_left_M[fails] = True, has_notice
        self.event_M[fails] = until + self.pause_M[fails]
        self.gone_seconds_M[fails] += self.pause_M[fails]

    def _sends(self, p: int, opens: float) -> tuple[Floats, Floats]:
        """The time of each replica's send, and that from which its payload is in the store; infinity for never."""
        waits_M, pace_M, due_M = self.waits_PM[p], self.pace_M, self.due_PM[p]
        look_M = self.random.random(len(due_M))
        seen_M = opens + look_M * self.longest_poll_seconds + self.trip_M
        # It looks at the end of a step.
        wait_M = np.floor(np.maximum(due_M - seen_M, 0.0) / pace_M) * pace_M
        send_M = due_M - np.minimum(wait_M, self.most_early_M)
        send_M = np.maximum(send_M, self.since_M + pace_M)
        if self.has_stalls:
            begin_M, end_M = self.stalls_PM[:, p]
            send_M = np.where((begin_M < send_M) & (send_M < end_M), end_M, send_M)
        arrival_M = np.maximum(send_M, self.up_free_M) + self.path_M
        arrival_M += 1e-6 * look_M  # no two at once
        is_waiting_M = np.isfinite(waits_M)
        arrival_M = np.where(self.is_gone_M | (arrival_M > self.event_M), np.inf, arrival_M)
        return np.where(is_waiting_M, self.sent_PM[p], send_M), np.where(is_waiting_M, waits_M, arrival_M)

    def _next(
        self, begin_K: Floats, num_steps: int | NDArray[np.int_], replicas: Places | slice = _ALL
    ) -> tuple[Floats, tuple[Floats, Floats]]:
        """The times of some replicas' next sends, so many steps after a time, and of the stalls before them.

        The stalls of these steps are one, at a random time. With steps per fragment, (P, 1), times are (P, K).
        """
        seconds_K = num_steps * self.pace_M[replicas]
        if self.has_variation:
            sigma_K = self.sigma_M[replicas] / num_steps**0.5
            seconds_K = seconds_K * np.maximum(0.1, 1 + sigma_K * self.random.standard_normal(seconds_K.shape))
        due_K = begin_K + seconds_K
        if not self.has_stalls:
            return due_K, (due_K, due_K)
        num_stalls_K = self.random.binomial(num_steps, self.stall_probability_M[replicas])
        stall_K = num_stalls_K * self.stall_seconds_M[replicas]
        at_K = begin_K + seconds_K * self.random.random(seconds_K.shape)
        return due_K + stall_K, (at_K, at_K + stall_K)

    def _plan(self, p: int, which_M: Mask, begin_M: Floats) -> None:
        """Plan the next send of some replicas, H steps after a time."""
        if not which_M.any():
            return
        due_M, stalls_2M = self._next(begin_M, self.run.sync_every)
        self.due_PM[p] = np.where(which_M, due_M, self.due_PM[p])
        if self.has_stalls:
            self.stalls_PM[:, p] = np.where(which_M, stalls_2M, self.stalls_PM[:, p])

    def _decision(self, p: int, send_M: Floats, arrival_M: Floats) -> tuple[float, Mask] | None:
        """The time of the decision, and the replicas that it counts; None if there can't be any yet."""
        run, opens, is_here_M = self.run, self.opens_P[p], np.isfinite(arrival_M)
        active_M = ~self.has_left_M & (self.last_outer_M >= last_recent(self.num_outer, run.num_fragments))
        if not active_M.any():
            active_M = arrival_M == arrival_M.min()  # nobody is waited for
        num_active = int(np.count_nonzero(active_M))
        arrival_K = np.sort(arrival_M[is_here_M])
        others_K = arrival_M[is_here_M & ~active_M]  # nobody waits for these
        if len(others_K) < len(arrival_K) // 8:
            counts = np.arange(len(others_K))
            places = np.searchsorted(arrival_K, np.sort(others_K)) - counts
            active_K = np.delete(arrival_K, np.maximum.accumulate(places) + counts)  # equal times have two places
        else:  # to look for so many takes longer than to sort the rest
            active_K = np.sort(arrival_M[is_here_M & active_M])
        can_decide_M = is_here_M & ~self.is_gone_M
        begin_M = np.where(np.isfinite(self.waits_PM[p]), opens, send_M)  # late ones wait for the new round
        overlap_M = begin_M + run.overlap_steps * self.pace_M
        needs = [least_payloads(run.quorum, num_active, after_patience=late) for late in (False, True)]
        best, last = math.inf, 0.0
        for kind, place in zip(run.machines, self.places, strict=True):
            can = can_decide_M[place]
            if not can.any():
                continue
            here_K = self._downloads(kind, place, can, arrival_K)
            after_overlap = float(overlap_M[place][can].min())
            after_patience = after_overlap + self.patience * kind.step_seconds
            for after, least in zip((0.0, after_overlap, after_patience), (num_active, *needs), strict=True):
                if 0 < least <= len(active_K):
                    # The payloads of replicas that nobody waits for are read in their turn.
                    place_of_last = np.searchsorted(arrival_K, active_K[least - 1])
                    if (time := max(after, float(here_K[place_of_last]))) < best:
                        best, last = time, float(arrival_K[np.searchsorted(here_K, time, side="right") - 1])
        return (best, arrival_M <= last) if math.isfinite(best) else None

    def _downloads(self, kind: Machines, place: slice, can: Mask, arrival_K: Floats) -> Floats:
        """The time at which the first of these has k payloads: max over i ≤ k of arrival_i + (k − i) d."""
        seconds = self.download_M[place.start]
        queue_K = np.arange(len(arrival_K)) * seconds
        here_K = np.maximum(np.maximum.accumulate(arrival_K - queue_K), self.down_free_M[place][can].min())
        looks = self.longest_poll_seconds / 2 + 2 * kind.latency_seconds  # for the last of them
        here_K += queue_K + looks
        if self.run.shares > 1:  # its average is uploaded, and the others' are read
            here_K += self.average_M[place.start] + self.averages_M[place.start] + 2 * looks
        return here_K

    def _count(self, p: int, send_M: Floats, arrival_M: Floats, time: float, counted_M: Mask) -> bool:
        """Take the outer step: the counted ones begin anew, the others' payloads wait for the next round.

        Returns:
            False if all payloads are too old, so that there is none.
        """
        run, known_M = self.run, time + self.to_know_M
        sent_M, waits_M, base_M = self.sent_PM[p], self.waits_PM[p], self.base_PM[p]
        sends_M = np.isinf(waits_M) & np.isfinite(arrival_M) & (send_M <= known_M)
        # Those whose downlink lags begin against an older round.
        lag_M = np.maximum(self.down_free_M - send_M, 0.0)
        behind_M = np.ceil(lag_M / max(time - self.decided_P[p], 1e-9))
        base_M[:] = np.where(sends_M, np.maximum(self.rounds_P[p] - behind_M, 0), base_M)
        self.up_free_M = np.where(sends_M, arrival_M - self.trip_M + self.average_M, self.up_free_M)
        sent_M[:] = np.where(sends_M, send_M, sent_M)
        waits_M[:] = np.where(sends_M, arrival_M, waits_M)
        self._plan(p, sends_M, send_M)

        stale_M = self.rounds_P[p] - base_M
        counted_M &= stale_M <= run.max_stale
        waits_M[:] = np.where(counted_M | (stale_M >= run.max_stale), np.inf, waits_M)
        if not (num_counted := int(np.count_nonzero(counted_M))):
            return False
        self.num_counted += num_counted
        self.sum_stale += int(np.where(counted_M, stale_M, 0.0).sum())
        self.num_outer, self.num_idle = self.num_outer + 1, 0
        self.rounds_P[p] += 1
        is_new_M = counted_M & ~self.is_gone_M  # what a machine that is gone had done counts since it failed
        self.counted_seconds_M += np.where(is_new_M, (sent_M - self.counted_PM[p]) / run.num_fragments, 0.0)
        self.counted_PM[p] = np.where(counted_M, sent_M, self.counted_PM[p])
        self.last_outer_M = np.where(counted_M, self.num_outer, self.last_outer_M)
        # One that came late sends with the others from now on.
        self._plan(p, counted_M & (stale_M > 0), known_M)
        if self.num_delays < _MOST_SAMPLES:
            fresh_M = counted_M & sends_M
            looks = self.random.random(np.count_nonzero(fresh_M)) * run.poll_seconds
            self.delays.append((known_M - send_M)[fresh_M] + looks)
            self.num_delays += len(looks)
        reads_M = (num_counted - 1) * self.download_M + self.averages_M
        self.down_free_M = np.maximum(self.down_free_M, self.opens_P[p]) + reads_M
        self.decided_P[p], self.now = time, max(self.now, time)
        self.opens_P[p] = time
        return True

    @property
    def counted_tokens(self) -> float:
        """Tokens that outer steps have counted."""
        return float((self.counted_seconds_M / self.step_M).sum()) * self.run.step_tokens

    def outcome(self) -> Outcome:
        """The numbers of the outer steps so far."""
        run, seconds = self.run, float(self.now)
        possible = float((seconds / self.step_M).sum())
        gone_M = self.gone_seconds_M - np.where(self.is_gone_M, np.maximum(self.event_M - seconds, 0.0), 0.0)
        read = float(((seconds - gone_M) / self.step_M).sum())
        counted = float((self.counted_seconds_M / self.step_M).sum())
        delays = np.concatenate(self.delays) if self.delays else np.array([math.nan])
        prices_M = run.each([kind.dollars_per_hour for kind in run.machines])
        repair_M = run.each([kind.repair_seconds for kind in run.machines]) / self.pause_M  # reading Θ costs, too
        traffic = run_traffic(
            num_replicas=run.num_replicas,
            num_fragments=run.num_fragments,
            num_payloads=self.num_counted,
            num_steps=self.num_outer,
            payload_bytes=run.fragment_bytes,
            num_shares=run.shares,
            num_joins=self.num_joins,
            state_bytes=run.state_bytes,
            seconds=seconds,
            poll_seconds=run.poll_seconds,
            longest_seconds=run.longest_poll_seconds,
            round_trip_seconds=float(self.trip_M.mean()),
        )
        return Outcome(
            method="store",
            seconds=seconds,
            goodput=counted / possible,
            tokens_per_hour=counted * run.step_tokens * 3600 / seconds,
            num_outer_steps=self.num_outer,
            contributors=self.num_counted / self.num_outer,
            staleness=self.sum_stale / max(1, self.num_counted),
            decided_seconds=(float(np.median(delays)), float(np.percentile(delays, 99))),
            lost=1 - counted / read,
            traffic=traffic,
            machine_dollars=float((prices_M * (seconds - gone_M * repair_M)).sum() / 3600),
        )


def expected(run: FleetRun) -> tuple[float, float]:
    """Closed forms of goodput, NaN beyond what links carry, and of the mean contributors of an outer step.

        goodput = Σ_m v_m `part_counted`_m / Σ_m v_m                        v_m: tokens per second

    A decision counts K replicas, no more than are there. It comes after T seconds at the latest, H steps or those
    of τ + patience; in them each downloads its part s of the others' payloads, all with gather and an R-th or
    more with R shares, and the averages of the rest. Where the downlink takes d seconds for a whole outer gradient

        K ≤ 1 + (T / d − (1 − s)) / s

    Where that is less than are there, payloads wait and are dropped, and goodput is to be simulated.

    >>> home = Machines(name="4090", count=8, step_seconds=1.0, up_mbit_s=20, down_mbit_s=100)
    >>> expected(FleetRun(machines=(home,), num_params=4e6, step_tokens=4096))
    (1.0, 8.0)
    """
    rates = np.array([kind.count / kind.mean_step_seconds for kind in run.machines])
    counted = np.array([part_counted(run, kind) for kind in run.machines])
    num_there = float(sum(kind.count * run.part_there(kind) for kind in run.machines))
    most = min(_most_contributors(run, kind) for kind in run.machines)
    goodput = float((rates * counted).sum() / rates.sum()) if num_there <= most else math.nan
    return goodput, min(num_there, most)


def part_counted(run: FleetRun, kind: Machines) -> float:
    """The part of the time in which a machine does work that is counted, where links carry all payloads.

    A machine runs for U seconds on average and is away for D, with the reading of Θ:

        (1 − lost / U) · U / (U + D)

    A failure loses the work that is not in the store, or that since the last checkpoint if it is less; a notice
    that is long enough saves it. Of a fragment the work since its last payload in the store is uniform between c
    and c + S seconds, S of H steps, c of an upload and a round trip; that of P fragments, which take turns, about
    uniform between m − w and m + w, m = c + S/2, w = S/(2 P). That since a checkpoint is between 0 and C, and

        lost = (G(m + w) − G(m − w)) / (2 w),        G(x) = x²/2 − x³/(6 C), straight on from x = C:

    G's slope at x is the mean of the lesser of x and what is since the checkpoint.
    """
    there, fragment_seconds = run.part_there(kind), 8e-6 * run.fragment_bytes / kind.up_mbit_s
    if math.isinf(kind.hours_between_failures) or kind.notice_seconds >= fragment_seconds * run.num_fragments:
        return there
    between_seconds, most = run.sync_every * kind.mean_step_seconds, run.checkpoint_seconds
    mean = fragment_seconds + 2 * kind.latency_seconds + between_seconds / 2
    width = between_seconds / (2 * run.num_fragments)

    def integral(x: float) -> float:
        return x**2 / 2 - x**3 / (6 * most) if x < most else most**2 / 3 + most / 2 * (x - most)

    lost_seconds = (integral(mean + width) - integral(mean - width)) / (2 * width)
    return max(0.0, 1 - lost_seconds / (3600 * kind.hours_between_failures)) * there


def _most_contributors(run: FleetRun, kind: Machines) -> float:
    """Replicas whose payloads the downlink of one takes."""
    patience = run.sync_every if run.patience is None else run.patience
    seconds = max(run.sync_every, run.overlap_steps + patience) * kind.mean_step_seconds
    times = seconds / (8e-6 * run.fragment_bytes * run.num_fragments / kind.down_mbit_s)
    return 1 + max(0.0, times - (1 - run.own_part)) / run.own_part


_MOST_SIMULATED = 4
"""Regions of the same machines that are simulated; they stand for the others."""
_LEAST_LINK = 0.05
"""The least share of a link that is left to a bridge."""


def in_regions(
    run: FleetRun, *, num_regions: int, num_outer_steps: int, rounds_apart: int = 1, seed: int = 0
) -> Outcome:
    """A fleet in regions, until each region, and the outer run, has taken so many outer steps.

    Replicas of a region meet in a store of the region, and each region is one replica of an outer run. So it is
    built (`diloco.training.bridge`):

    1. A region is a run in a store of its own: its replicas average every H steps, and its Θ moves.
    2. A process beside one of its machines, the bridge, is a replica of the outer run. It reads the region's log
       as a replica does. Every K-th round of a fragment it sends the outer Θ_p minus the region's.
    3. By what the outer Θ_p moves the bridge shifts the region's: an entry of the region's log, which all of its
       replicas take as one that is not counted does.

    Both levels are simulated by `in_store`. A region of the outer run takes steps at the pace of its replicas. Its
    link is what its machine and the bridge's own reading leave. It fails with its machine, and is back when that
    is; nothing is lost by that, since the region's Θ holds the work.

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
