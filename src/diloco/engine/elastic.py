"""Replicas that come and go: they offer outer gradients to a rendezvous, and take the outer steps that it decides.

Shapes: N elements of one fragment.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diloco.engine.checkpoint import check_like, elastic_values_checked, refuse_names, tensors_checked
from diloco.engine.outer_state import ERROR, OUTER, SENT_THETA
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import EqualGradients, Membership, Replica, lack_of
from diloco.errors import DisagreementError, ExchangeError, UserError
from diloco.exchange.transport import fail_together
from diloco.outer.averages import decoded
from diloco.outer.cohort import Cohort
from diloco.outer.digest import outer_digest
from diloco.outer.merge import MergeRule, Mixing, Translation
from diloco.outer.step import OuterStep, merge_in_place
from diloco.rendezvous.contract import (
    MOST_DECISIONS_PER_FRAGMENT,
    Content,
    Decision,
    Form,
    NoDecisionError,
    Offer,
    Rendezvous,
    StoredSnapshot,
)
from diloco.rendezvous.log.entries import MOST_LOSS
from diloco.rendezvous.objects import decided_average, norms_of
from diloco.schedule import Sync, least_steps
from diloco.wire.kernels.memory import empty


def vector_makers(
    form: Form, decision: Decision, content: Content, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Iterator[Tensor]]]:
    """Two functions for logs: the first recomputes Δ_p, the second each member's outer gradient."""
    size = form.sizes[decision.fragment]

    def make_average() -> Tensor:
        return decided_average(form, decision, content, empty(size, torch.float32, device)).divided()

    payloads = {member: payload.data for member, payload in content.payloads.items()}
    keys = decision.keys(form) if payloads else []  # with averages nobody has all payloads
    return make_average, partial(decoded, form.codec, payloads, keys, size, device)


_LOG = logging.getLogger("diloco")
_MOST_SECONDS = 0.05
"""Time after which the remaining decisions wait for the next inner step."""


class ElasticMembership(Membership):
    """This replica in a run of a rendezvous, which it joins.

    Args:
        replica: this one; it takes its number, and Θ, from the run.
        rendezvous: the place where the replicas of the run come and go.

    Raises:
        DisagreementError: if the run has other settings or initial parameters.
    """

    waits_for_all = True
    """True if a step waits for the others' outer gradients in a run whose quorum is all."""

    def __init__(self, replica: Replica, rendezvous: Rendezvous) -> None:
        settings, state, schedule = replica.settings, replica.state, replica.settings.schedule
        num_fragments = state.num_fragments
        sizes = tuple(state.num_elements(p) for p in range(num_fragments))
        form = Form(
            codec=settings.wire,
            sizes=sizes,
            seed=settings.seed,
            second=replica.reduction.second,
            keep_values=replica.parameters.device.type == "cpu",
        )
        facts = settings.shared_facts() | replica.parameters.facts(state.at_home(OUTER))
        self.joined = joined = rendezvous.join(facts, form, sync_every=schedule.sync_every)
        replica.number = joined.replica
        self.replica, self.rendezvous, self.form = replica, rendezvous, joined.form
        self.in_flight: dict[int, Offer] = {}
        """This replica's offers without a decision, by fragment."""
        self._errors: dict[int, tuple[Tensor, int] | None] = {}
        """For each fragment in flight the error to keep if the offer is counted, and its digest."""
        self._given_up: dict[int, str] = {}
        """By fragment the reason why its last offer was not counted."""
        self.rounds = [0] * num_fragments
        """Outer steps of each fragment that this replica has taken."""
        self._averaged = [0] * num_fragments
        """The newest of them that was no shift, of each fragment."""
        self.counted = [(0, 0)] * num_fragments
        """For each fragment the tokens and inner steps up to its last send that was counted."""
        self.next_seq = 0
        self._losses = deque[float | Tensor](maxlen=1 << 10)
        """Training losses since the last send; the newest ones."""
        self._waiting: tuple[deque[Decision], ...] = tuple(deque() for _ in range(num_fragments))
        """The decisions to take, by fragment, in the log's order; each holds its payloads in memory."""
        self._first_fragment = 0  # fragments take turns
        self._kinds = (OUTER, *settings.outer.slots)
        self._digests: list[dict[str, int]] = [{} for _ in self.rounds]
        """For each fragment the digests of Θ_p, of the slots and of the error, as they were left."""
        self._equal = EqualGradients(num_fragments)
        for p in range(num_fragments):
            self._take_digests(p, self._kinds if settings.error_feedback is None else (*self._kinds, ERROR))
        self._tokens_before = 0  # that earlier processes of this replica have read
        self._has_warned = False
        self._is_draining = self._is_finished = False
        self._closed: Sequence[str] = ()
        """For each fragment the digest of Θ_p at the run's end; empty before."""
        self._wanted: Collection[int] = ()
        self._newest_rounds: Sequence[int] = self.rounds
        self._waits = self.waits_for_all and joined.rules.quorum == "all"
        self._catch_up()
        self._sync_every = schedule.sync_every
        self._next_send = [schedule.send_step(p) for p in range(num_fragments)]
        self._min_steps = schedule.sync_every if self._waits else least_steps(schedule.sync_every)
        self._must_load = self._waits and any(self.rounds)
        self._translation: dict[int, Tensor | None] = {}
        """For each fragment the Θ that a checkpoint knew; None to take the run's."""
        self._then: dict[str, Any] = {}
        """Slot, rounds, Θ and errors of a checkpoint, vectors flat by fragment; empty once θ was moved."""
        self._unanswered: Sequence[int] = ()
        """The fragments that were in flight in a checkpoint."""

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self.joined.seat.failure

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet, on average over the fragments."""
        # A resume is about to replace θ of some fragments by Θ: nothing of theirs is left to count.
        replaced = [p for p, then_N in self._translation.items() if then_N is None]
        read = [self.replica.tokens - n for p, (n, _) in enumerate(self.counted) if p not in replaced]
        return sum(read) / len(self.counted)

    def initial_fragments(self) -> Sequence[int]:
        """The fragments of which no outer step was taken."""
        return [p for p, num_taken in enumerate(self.rounds) if not num_taken]

    def uncounted_fragments(self) -> Mapping[int, str]:
        """The fragments with work that is in no payload on its way, and why the last payload was not counted."""
        unsent = "the run was closed before it was sent" if self._closed else "it was not sent"
        remedy = "" if self._closed else ": finish(flush=True) sends it again"
        fragments = filter(self._has_uncounted, range(len(self.rounds)))
        return {p: self._given_up.get(p, unsent) + remedy for p in fragments}

    def base(self, p: int) -> int:
        """The digest of Θ_p, by which replicas compare it."""
        return self._digests[p][OUTER]

    def _take_digests(self, p: int, kinds: Collection[str]) -> None:
        self._digests[p] |= {kind: self.replica.state.digest(p, kind) for kind in kinds}

    def _check_digests(self, p: int) -> None:
        """Refuse a Θ_p, a slot or an error that has changed since its digest was taken, before others hear of it.

        Raises:
            DisagreementError: naming the vector and the inner step.
        """
        for kind, digest in self._digests[p].items():
            if self.replica.state.digest(p, kind) != digest:
                names = {OUTER: "outer parameters", ERROR: "error of the error feedback"}
                name = names.get(kind, f"outer rule's {kind}")
                raise DisagreementError(
                    f"step {self.replica.num_steps}: the last outer step left other bits in the {name} of fragment"
                    f" {p}: this computer's memory changed; nothing was sent or merged: start this replica again"
                )

    def _has_uncounted(self, p: int) -> bool:
        return p not in self.in_flight and self.replica.num_steps > self.counted[p][1]

    def fail_together(self) -> AbstractContextManager[None]:
        """A context whose errors end this replica's part in the run."""
        return fail_together(self.rendezvous)

    def take_loss(self, loss: float | Tensor) -> None:
        """Keep the loss for the log; a tensor is read when something is sent."""
        self._losses.append(loss.clone() if isinstance(loss, Tensor) else loss)

    def look(self) -> bool:
        """True if something is sent, decided, waited for, or to be looked at."""
        self._listen()
        return bool(
            self._must_load
            or self._translation
            or self.replica.parameters.watch.merges
            or any(self._waiting)
            or any(self.replica.num_steps >= next_step for next_step in self._next_send)
            or (self.in_flight and self._waits)
            or self._wanted
        )

    def _listen(self, *, wait_for: int | None = None) -> None:
        """Report this replica's progress, and take new decisions; `wait_for` is as in `Seat.step`."""
        taken_rounds = [(last_round, self.base(p)) for p, last_round in enumerate(self.rounds)]
        news = self.joined.seat.step(
            self.replica.num_steps,
            taken_rounds,
            room=MOST_DECISIONS_PER_FRAGMENT * len(self._waiting) - sum(map(len, self._waiting)),
            wait_for=wait_for,
            is_last=self._is_draining,
        )
        for decision in news.decisions:
            self._waiting[decision.fragment].append(decision)
        self._wanted, self._newest_rounds = news.wanted, news.rounds
        self._is_finished, self._closed = news.is_finished, self._closed or news.closed

    def advance(self) -> tuple[OuterStep, ...]:
        """Offer the fragments that are due, and take the outer steps that were decided."""
        self._check_place()
        step = self.replica.num_steps
        self._translate()
        self.replica.parameters.look_at_merges(step)
        for p in self._due():
            self.send(p)
            self._next_send[p] = step + self._sync_every
        return self.take_decided(wait=self._waits)

    def _check_place(self) -> None:
        """Refuse to begin among replicas that wait for each other and are at another place of the schedule."""
        if self._must_load:
            self.rendezvous.leave()
            raise UserError(
                "the run waits for all of its replicas (quorum=all) and has begun: one that begins at another "
                "place of the schedule and all others would wait for each other; load the state that this replica "
                "has saved, or create a run with quorum=majority",
                "quorum",
            )

    def _due(self) -> list[int]:
        """The fragments to offer: H steps after the last time, or sooner if another's payload waits for ours."""
        now, wanted = self.replica.num_steps, self._wanted
        if self._closed:
            self._warn_of_the_end()
            return []
        early = self._sync_every - self._min_steps
        return [
            p
            for p, step in enumerate(self._next_send)
            if self._has_uncounted(p) and now >= (step - early if p in wanted else step)
        ]

    def send(self, p: int) -> None:
        """Encode a fragment's outer gradient and offer it."""
        replica, step, base = self.replica, self.replica.num_steps, self.base(p)
        key, sync = self.form.key(p, self.rounds[p], replica.number), Sync(p, self.rounds[p] + 1, step)
        with replica.record.timing_encode():
            self._check_digests(p)
            replica.check_parameters((p,))
            # A payload per share: each share is addressed to one of so many.
            flight = replica.encode(sync, key, Cohort.equal(self.form.num_shares), base=base)
            values_N = flight.own()  # before there is a checksum to verify
            with replica.naming_non_finite(sync):
                flight.seal()
            used = replica.on_send(sync, values_N.clone, Cohort.equal(1))
            self._take_digests(p, used)  # the rule may have changed them
        then_tokens, then_steps = self.counted[p]
        tokens, steps = replica.tokens - then_tokens, step - then_steps
        self._check_amounts(step, tokens, steps)
        self.in_flight[p] = offer = Offer(
            replica=replica.number,
            seq=self.next_seq,
            fragment=p,
            base_round=self.rounds[p],
            base=base,
            tokens=tokens,
            steps=steps,
            position=self.joined.start + replica.tokens - self._tokens_before,
            loss=_mean_loss(self._losses),
            norms=norms_of(values_N, self.form, source=f"step {step}: the outer gradient of fragment {p}"),
            step=step,
            overlap=replica.settings.schedule.overlap(0),
        )
        self._losses.clear()
        self._given_up.pop(p, None)
        self._errors[p] = None if flight.error_N is None else (flight.error_N, outer_digest(flight.error_N))
        payloads = tuple(payload.cpu() for payload in flight.payloads)
        self.joined.seat.offer(offer, payloads, values_N if self.form.keep_values else None)
        self.next_seq += 1
        replica.bytes_sent += sum(payload.numel() for payload in flight.payloads)
        replica.last_sent[p] = step

    def take_decided(self, *, wait: bool) -> tuple[OuterStep, ...]:
        """Take the outer steps that were decided.

        Args:
            wait: wait for the decisions of all own payloads whose overlap has passed, bounded in time, and take
                whatever else was decided when this began.
        """
        return tuple(self._decided(wait=wait))

    def _decided(self, *, wait: bool) -> Iterator[OuterStep]:
        """The outer steps of `take_decided`, one by one, so that an error loses none of the earlier ones."""
        end = time.perf_counter() + _MOST_SECONDS
        self._listen()
        # Decisions that come meanwhile wait: a replica slower than they come would never end.
        newest, num_taken = self._newest_rounds, sum(self.rounds)
        fragments = range(len(self._waiting))
        for p in (*fragments[self._first_fragment :], *fragments[: self._first_fragment]):
            for outer_step in self._take_waiting(p):
                yield outer_step
                if not wait and time.perf_counter() > end:
                    self._first_fragment = (p + 1) % len(self._waiting)
                    self._listen()
                    return
            while wait and (self._is_over(p) or self._is_behind(p, newest[p])):
                if self._closed:  # all decisions are taken: no entry will count this replica's offer
                    self._give_up(p)
                    break
                start = time.perf_counter()
                self._listen(wait_for=p)
                self.replica.blocked_seconds += time.perf_counter() - start
                yield from self._take_waiting(p)
        if sum(self.rounds) > num_taken:
            self._listen()  # so that the next rounds of these fragments can be decided meanwhile

    def _is_over(self, p: int) -> bool:
        """True if a fragment is in flight, and its overlap has passed."""
        if (offer := self.in_flight.get(p)) is None:
            return False
        return self._is_draining or self.replica.num_steps >= offer.step + offer.overlap

    def _is_behind(self, p: int, newest: int) -> bool:
        """True if a fragment is not in flight, and the outer step of its decided round `newest` is not taken."""
        return p not in self.in_flight and self.rounds[p] < newest

    def _take_waiting(self, p: int) -> Iterator[OuterStep]:
        waiting = self._waiting[p]
        while waiting and not (self._counts_own(waiting[0]) and not self._is_over(p)):
            decision = waiting.popleft()
            if decision.round <= self.rounds[p]:  # a snapshot was newer
                self._give_up_before(p, decision.oldest_base)
                continue
            merge_rule = self.replica.settings.mixing if self._counts_own(decision) else Translation()
            yield self._take(decision, merge_rule)

    def _counts_own(self, decision: Decision) -> bool:
        """True if a decision counts the own offer that is in flight."""
        offer = self.in_flight.get(decision.fragment)
        return offer is not None and decision.own_seq >= offer.seq

    def _take(self, decision: Decision, merge_rule: MergeRule) -> OuterStep:
        """Take one outer step; a decision is refused whole, before anything changes."""
        replica, p = self.replica, decision.fragment
        entry = f"step {replica.num_steps}: entry {decision.number} of the log"
        if decision.round != self.rounds[p] + 1:
            raise ExchangeError(f"{entry} is round {decision.round} of fragment {p} after round {self.rounds[p]}")
        self._check_digests(p)
        if decision.before != self.base(p):
            raise DisagreementError(
                f"{entry}: the outer parameters of fragment {p} before round {decision.round} are not those of "
                "this replica: an outer step gave other bits, here or where the entry was written; nothing was "
                "merged: start this replica again"
            )
        if decision.with_snapshot:
            vectors = {kind: replica.state.use(kind, p).detach().to("cpu", copy=True) for kind in self._kinds}
            self.joined.seat.snapshot(p, self.rounds[p], vectors)
        content = decision.content
        if isinstance(content, StoredSnapshot):
            return self._jump(decision, content, merge_rule)
        counts_own = self._counts_own(decision)
        if counts_own:
            self._refuse_equal(decision, content)
        with replica.record.timing_merge():
            average = decided_average(self.form, decision, content, replica.scratch(p))
        sync = Sync(p, decision.round, self.in_flight[p].step if counts_own else replica.num_steps)
        of_rule = sync._replace(round=decision.round_of_rule)
        with self._moving_sent(p, merge_rule):
            replica.take(of_rule, average, decision.cohort, merge_rule, is_shift=decision.is_shift)
        if counts_own:
            if self.in_flight[p].base_round < self._averaged[p]:
                # It was late: it sends its next payload together with the others, not before them.
                self._next_send[p] = replica.num_steps + self._sync_every
            self._count(p)
        self._note_taken(p, decision.round, decision.oldest_base)
        self._averaged[p] = self._averaged[p] if decision.is_shift else decision.round
        replica.bytes_received += content.bytes_received
        replica.bytes_sent += content.bytes_sent
        makers = vector_makers(self.form, decision, content, replica.parameters.device)
        return replica.describe(sync, *makers, replica.samples.get(p), cohort=decision.cohort)

    def _refuse_equal(self, decision: Decision, content: Content) -> None:
        """Refuse to go on if another replica's newest outer gradients of all fragments were equal to the own ones.

        With averages of shares nobody has the payloads, and nothing is noticed.

        Raises:
            UserError: naming the other replica, and saying that both train on the same data.
        """
        p, form, own = decision.fragment, self.form, self.replica.number
        if len(content.payloads) < 2:
            return
        payloads = {member: payload.data for member, payload in content.payloads.items()}
        key = form.key(p, decision.base_rounds[own], own)
        for pair in self._equal.look(p, payloads, self.replica.reduction, form.sizes[p], key, decision.cohort):
            if own in pair:
                raise UserError(
                    f"replicas {pair[0]} and {pair[1]} made the same outer gradients of all fragments, to the "
                    "last bit: they train on the same data; let each read from its own rendezvous.slot and "
                    "rendezvous.start, and let nothing average gradients across replicas"
                )

    def _jump(self, decision: Decision, stored: StoredSnapshot, merge_rule: MergeRule) -> OuterStep:
        """Take a snapshot in the place of outer steps whose payloads were deleted, and merge Θ once."""
        replica, p, sent = self.replica, decision.fragment, self.replica.num_steps
        if self._counts_own(decision):
            sent = self.in_flight[p].step
            self._count(p)
        past = replace(replica.past(p, sent), outer_N=replica.state.use(OUTER, p).clone())
        replica.forget_averages()
        with self._moving_sent(p, merge_rule):
            self._read(p, stored, decision.oldest_base)
        with replica.parameters.merging(p, replica.num_steps) as theta:
            merge_in_place(theta, replica.state.use(OUTER, p), merge_rule, past)
        size, device = self.form.sizes[p], replica.parameters.device
        zeros = partial(torch.zeros, size, dtype=torch.float32, device=device)
        return replica.describe(Sync(p, stored.round, replica.num_steps), zeros, lambda: iter(()))

    @contextmanager
    def _moving_sent(self, p: int, merge_rule: MergeRule) -> Iterator[None]:
        """Move the kept θ that was sent, too, if a merge rule translates θ as Θ moves here."""
        replica = self.replica
        if not (replica.settings.mixing.needs_sent and isinstance(merge_rule, Translation)):
            yield
            return
        before_N = replica.state.use(OUTER, p).clone()
        yield
        replica.state.use(SENT_THETA, p).add_(replica.state.use(OUTER, p) - before_N)
        replica.state.keep(SENT_THETA, p)

    def _read(self, p: int, stored: StoredSnapshot, oldest_base: int = 0) -> None:
        """Take Θ_p and the slots from a snapshot."""
        vectors, kinds = stored.vectors, self._kinds
        if vectors.keys() != set(kinds):
            raise ExchangeError(
                f"{stored.name} holds {', '.join(sorted(vectors))}, and this run's outer rule needs "
                f"{', '.join(sorted(kinds))}: take the same outer rule"
            )
        for kind in kinds:
            self.replica.state.use(kind, p).copy_(vectors[kind])
            self.replica.state.keep(kind, p)
        self._averaged[p] = stored.round
        self._note_taken(p, stored.round, oldest_base)

    def _count(self, p: int) -> None:
        """Note that the own offer in flight was counted."""
        offer, error = self.in_flight.pop(p), self._errors.pop(p)
        self.counted[p] = self.counted[p][0] + offer.tokens, offer.step
        if error is not None:
            self.replica.keep_error(p, error[0])
            self._digests[p][ERROR] = error[1]  # as it was sent

    def _note_taken(self, p: int, round: int, oldest_base: int) -> None:
        self.rounds[p] = round
        self._take_digests(p, self._kinds)
        self._give_up_before(p, oldest_base)

    def _give_up_before(self, p: int, oldest_base: int) -> None:
        """Give up the own offer in flight if it is too old: no entry may count it."""
        offer = self.in_flight.get(p)
        if offer is not None and offer.base_round < oldest_base:
            self._give_up(p)

    def _give_up(self, p: int) -> None:
        """Forget the own offer in flight; Θ − θ still holds its work."""
        self._given_up[p] = self.joined.seat.refusal(self.in_flight[p])
        del self.in_flight[p], self._errors[p]

    def _catch_up(self) -> None:
        """Take Θ from the snapshots and decisions that the run has made so far, and θ ← Θ."""
        for p, stored in self.joined.snapshots.items():
            self._read(p, stored)
        num_taken = 0
        while num_taken < self.joined.num_decisions:
            self._listen(wait_for=-1)
            for waiting in self._waiting:
                while waiting:
                    decision = waiting.popleft()
                    if decision.round > self.rounds[decision.fragment]:
                        self._take(decision, Mixing(0.0))
                    num_taken += 1
        for p in range(self.replica.state.num_fragments):
            self.replica.enter_outer(p)
        self._listen()

    def finish(self, *, flush: bool, close: bool) -> tuple[OuterStep, ...]:
        """Wait for the decisions of own payloads, bounded in time, and take them and what else was decided.

        Once the run's token budget is spent, or with `close`, take everything up to the entry that closes the run.
        """
        self._translate()
        self.replica.parameters.watch.check_of_merges(self.replica.num_steps)()
        merged: list[OuterStep] = []
        try:
            for outer_step in self._last(flush=flush, close=close):
                merged.append(outer_step)
        except NoDecisionError:
            if not (close or self._is_finished):
                raise
            # Nothing is wrong with this replica: the store can't be reached, and `leave` says what it has.
            self.joined.seat.close()
        lost = {p: reason for p, reason in self.uncounted_fragments().items() if p in self._given_up}
        if lost and not flush:  # the engine warns of all that a flush has not counted
            _LOG.warning("%s", lack_of(lost))
        return tuple(merged)

    def _last(self, *, flush: bool, close: bool) -> Iterator[OuterStep]:
        """The outer steps after the last inner step, one by one; see `finish`.

        With a number as quorum it first sends what was not sent yet: another replica that ends now, with another
        fragment in flight, counts nothing without a payload of that fragment. If the run ends, it says so before
        it waits: several that wait for payloads which none of them makes any more would wait in vain.
        """
        has_number = isinstance(self.joined.rules.quorum, int)
        if has_number:
            self._flush()
            if close or self._is_finished:
                self.joined.seat.close(are_offers_counted=False)
        yield from self._drained()
        if flush:
            self._flush()
            yield from self._drained()
        if close or self._is_finished:
            yield from self._rest()

    def _flush(self) -> None:
        """Offer every fragment whose work is in no payload on its way, unless the run is closed."""
        for p in () if self._closed else self.uncounted_fragments():
            self.send(p)

    def _rest(self) -> Iterator[OuterStep]:
        """End the run, take every outer step up to its last entry, and compare Θ with that entry's.

        Raises:
            NoDecisionError: if the run is not closed in time.
            DisagreementError: if the run's last Θ is another.
        """
        self.joined.seat.close()
        while not self._closed:
            # Outer steps that the last look has brought come first: the run is closed after all are taken.
            if not any(self._waiting):
                start = time.perf_counter()
                self._listen(wait_for=-1)
                self.replica.blocked_seconds += time.perf_counter() - start
            yield from self._drained()
        yield from self._drained()  # the closing entry may have come with outer steps, after the last merge
        for p, digest in enumerate(self._closed):
            self._check_digests(p)
            if int(digest, 16) != self.base(p):
                raise DisagreementError(
                    f"the outer parameters of fragment {p} after the run's last outer step are not those of this "
                    "replica: it gave other bits, here or where the run was closed; see with diloco store verify "
                    "which are right"
                )

    def _warn_of_the_end(self) -> None:
        """Warn once that the closed run counts no more inner steps."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("step %d: the run is closed, and counts nothing more: finish", self.replica.num_steps)

    def _drained(self) -> Iterator[OuterStep]:
        """The outer steps of what is in flight, one by one."""
        self._is_draining = True
        try:
            yield from self._decided(wait=True)
        finally:
            self._is_draining = False
            self._listen()

    def reset_outer(self) -> None:
        """Refuse to reset Θ: the log decides it."""
        raise refusal_to_reset()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes; Θ and the slots lie in the store.

        Until θ is moved from a loaded state's Θ to the run's, Θ and its round are still those of that state.
        """
        replica, named = self.replica, self.replica.parameters.all_named
        known = self._then or {
            "slot": self.joined.slot,
            "rounds": self.rounds,
            OUTER: replica.state.at_home(OUTER),
            ERROR: replica.state.at_home(ERROR),
        }
        return {
            "run": self.joined.run,
            "slot": known["slot"],
            "rounds": list(known["rounds"]),
            **replica.counters(),
            "next_send": list(self._next_send),
            "counted": [list(pair) for pair in self.counted],
            # Copies: loading in place must not change the run's Θ.
            OUTER: named(outer_N.clone() for outer_N in known[OUTER]),
            ERROR: named(error_N.clone() for error_N in known[ERROR]),
        }

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state of this run's model.

        Raises:
            UserError: if it is another's, or this engine has trained: what it has sent may be counted.
        """
        refuse_if_sent(self.next_seq)
        accepted = accepted_of(self.replica, self.joined.run, state)
        for p, last_round in enumerate(accepted["rounds"]):
            if last_round > self.rounds[p]:
                raise UserError(
                    f"the state knows round {last_round} of fragment {p}, and the run's log ends at round "
                    f"{self.rounds[p]}: an older copy of the store was put back; put the newer one back, or start "
                    "this replica without the state"
                )
        return accepted, ()

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: θ ← θ + Θ_now − Θ_then, or Θ_now where the run has counted work since then.

        The model's own parameters may be loaded before or after this: θ is moved before the next inner step ends.
        """
        self._must_load = False
        replica = self.replica
        replica.resume(accepted)
        self._tokens_before = replica.tokens
        self._next_send = list(accepted["next_send"])
        # Tokens that were not counted yet may come from larger batches than this replica now declares.
        most = self.joined.step_tokens
        self.counted = [
            (max(tokens, replica.tokens - most * (replica.num_steps - steps)), steps)
            for tokens, steps in accepted["counted"]
        ]
        slot, then, errors = accepted["slot"], *vectors_of(accepted, replica.parameters)
        self._then = {"slot": slot, "rounds": accepted["rounds"], OUTER: then, ERROR: errors}
        self._unanswered = [p for p, (_, steps) in enumerate(self.counted) if replica.last_sent[p] > steps]
        for p, (last_round, then_N) in enumerate(zip(accepted["rounds"], then, strict=True)):
            # No other replica reads this slot, so the saved θ − Θ was counted, or is counted here.
            is_newer = slot != self.joined.slot or self.joined.slot_rounds[p] > last_round
            self._translation[p] = None if is_newer else then_N
            if errors and not is_newer:
                replica.keep_error(p, errors[p])
                self._take_digests(p, (ERROR,))

    def _translate(self) -> None:
        """Move θ from the Θ that a checkpoint knew to the run's."""
        replica = self.replica
        for p, then_N in self._translation.items():
            if then_N is None:
                self.replica.enter_outer(p)
                self.counted[p] = replica.tokens, replica.num_steps
                continue
            move_N = replica.state.use(OUTER, p) - then_N.to(replica.parameters.device)
            with replica.parameters.merging(p, replica.num_steps) as theta:
                for own, part_n in zip(theta, move_N.split([own.numel() for own in theta]), strict=True):
                    own.add_(part_n.view(own.shape))
        if self._then and self._waits and not self.joined.rules.bridge:  # whose shifts take rounds, too
            self._take_place()
        self._translation.clear()
        self._then.clear()

    def _take_place(self) -> None:
        """Offer next the fragment that the others offer next, since all wait for each other.

        Fragments take turns, and each outer step since the state was saved ended a turn. Where a fragment was in
        flight then, the first of them ended a turn that this replica has taken; without one it offers it again.
        """
        num_taken = [new - old for new, old in zip(self.rounds, self._then["rounds"], strict=True)]
        for p in self._unanswered:
            if num_taken[p]:
                num_taken[p] -= 1
            else:
                self._next_send[p] = self.replica.num_steps
        for _ in range(sum(num_taken) % len(num_taken)):
            p = self._next_send.index(min(self._next_send))
            self._next_send[p] += self._sync_every

    def _check_amounts(self, step: int, tokens: int, num_steps: int) -> None:
        """Refuse an outer gradient without a weight, and one that the run would not count.

        Raises:
            UserError: for tokens that are none, or more than this replica has declared.
            ExchangeError: if no outer step has counted this replica for too long.
        """
        most_tokens, most_steps = self.joined.step_tokens, self.joined.most_steps
        if not tokens:
            raise UserError(
                f"step {step}: the last {num_steps} inner steps read no token, and where replicas come and go an "
                "outer gradient is weighted by its tokens: pass engine.step(tokens=...)",
                "tokens",
            )
        if tokens > num_steps * most_tokens:
            raise UserError(
                f"step {step}: the last {num_steps} inner steps read {tokens} tokens, and this replica has "
                f"declared step_tokens={most_tokens}: give its rendezvous the most that an inner step reads",
                "step_tokens",
            )
        if num_steps > most_steps:
            raise ExchangeError(
                f"step {step}: no outer step has counted the last {num_steps} inner steps, and the run takes no "
                f"more than {most_steps} at once: start this replica again under another name, which begins at "
                "the run's outer parameters"
            )


def _mean_loss(losses: Iterable[float | Tensor]) -> float | None:
    """The mean of the losses that the log takes; None if there are none."""
    taken = [loss for loss in map(float, losses) if abs(loss) <= MOST_LOSS]  # NaN is not
    return fmean(taken) if taken else None


def refuse_if_sent(num_sent: int) -> None:
    """Refuse a state where this replica has sent outer gradients, which may be counted.

    Raises:
        UserError: if it has.
    """
    if num_sent:
        raise UserError(
            "this engine has sent outer gradients already: build a new engine with a new StoreRendezvous, and "
            "load the state there"
        )


def accepted_of(replica: Replica, run: str, state: object) -> dict[str, Any]:
    """A state of this run's model.

    Raises:
        UserError: if it is another's, or lacks what `state_dict` gives.
    """
    if not isinstance(state, Mapping) or state.get("run") != run:
        raise UserError(
            "the state is not that of a replica of this run: bring back the store of its run, or begin here "
            "without the state, under another name"
        )
    settings, own = replica.settings, replica.parameters.by_name
    accepted: dict[str, Any] = {"run": run, **elastic_values_checked(state, num_fragments=len(settings.fragments))}
    for kind, names in ((OUTER, own), (ERROR, own if settings.error_feedback is not None else ())):
        accepted[kind] = tensors_checked(state, kind)
        refuse_names("has", (name for name in accepted[kind] if name not in names), kind)
        refuse_names("lacks", (name for name in names if name not in accepted[kind]), kind)
        check_like(kind, accepted[kind], own)
    return accepted


def vectors_of(accepted: Mapping[str, Any], parameters: FragmentParameters) -> tuple[list[Tensor], list[Tensor]]:
    """Θ of each fragment in a state, and the error, which may be of none."""
    fragments = range(len(accepted["rounds"]))
    outer, errors = (
        [parameters.flat_of(p, accepted[kind]) for p in fragments] if accepted[kind] else []
        for kind in (OUTER, ERROR)
    )
    return outer, errors


def refusal_to_reset() -> UserError:
    """The error of a call of reset_outer()."""
    return UserError(
        "reset_outer() has no meaning where replicas come and go: the outer parameters are what the run's log "
        "says; begin another run from these parameters"
    )
