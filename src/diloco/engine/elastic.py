"""Replicas that come and go: they offer outer gradients to a rendezvous, and take the outer steps that it decides.

Shapes: N elements of one fragment.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.engine.checkpoint import check_like, elastic_values_checked, refuse_names, tensors_checked
from diloco.engine.guards import are_equal, is_long
from diloco.engine.outer_state import ERROR, OUTER, OuterState
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import ReplicaRounds, described, outer_state
from diloco.engine.settings import Settings
from diloco.errors import DisagreementError, ExchangeError, UserError
from diloco.outer.averages import Average, Reduction, add_up
from diloco.outer.cohort import Cohort
from diloco.outer.merge import MergeRule, Mixing, Translation
from diloco.outer.step import OuterStep, merge_in_place
from diloco.rendezvous.contract import Content, Decision, Form, Joined, Offer, Rendezvous, StoredSnapshot
from diloco.rendezvous.follower import MOST_DECISIONS_A_FRAGMENT
from diloco.rendezvous.objects import join_averages, norms_of, read_into
from diloco.schedule import Sync
from diloco.wire.kernels.memory import empty
from diloco.wire.payload import Key


def decided_average(form: Form, decision: Decision, content: Content, to_N: Tensor) -> Average:
    """Δ_p, added up in the members' order from their payloads, or joined from the averages of its shares."""
    if content.averages:
        return join_averages(form, decision.fragment, decision.round, decision.cohort, content.averages, to_N)
    return add_up(form.codec, content.payloads, to_N, _keys(form, decision), decision.cohort)


class EqualityWatch:
    """Notices replicas that train on the same data: in every fragment, they make the same outer gradient.

    In one fragment they may be equal without that, where it has no gradients and the weights decay. With averages
    of shares nobody has the payloads, and nothing is noticed.

    Args:
        form: of payloads.
        reduction: how they are encoded.
        replica: this replica.
    """

    def __init__(self, form: Form, reduction: Reduction, replica: int) -> None:
        self._form, self._reduction, self._replica = form, reduction, replica
        self._are_equal = {p: False for p in range(len(form.sizes)) if is_long(form.share_bytes(p))}

    def check(self, decision: Decision, content: Content) -> None:
        """Look at an outer step with a payload of this replica.

        Raises:
            UserError: if the newest ones of all fragments that are long enough were equal.
        """
        if len(content.payloads) < 2 or decision.fragment not in self._are_equal:
            return
        p, form = decision.fragment, self._form
        key = form.key(p, decision.base_rounds[self._replica], self._replica)
        self._are_equal[p] = are_equal(content.payloads, self._reduction, form.sizes[p], key, decision.cohort)
        if all(self._are_equal.values()):
            raise UserError(
                f"all {len(decision.cohort.members)} replicas of the outer steps made the same outer gradients, "
                "to the last bit: they train on the same data; let each read from its own rendezvous.slot and "
                "rendezvous.start, and let nothing average gradients across replicas"
            )


def remade(
    form: Form, decision: Decision, content: Content, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Iterator[Tensor]]]:
    """Two functions for logs: one makes Δ_p again, one each member's outer gradient."""
    size = form.sizes[decision.fragment]

    def make_average() -> Tensor:
        return decided_average(form, decision, content, torch.empty(size, device=device)).divided()

    def make_deltas() -> Iterator[Tensor]:
        for key in _keys(form, decision):
            if content.payloads:  # with averages nobody has all payloads
                to_N = torch.empty(size, device=device)
                yield form.codec.decode_into(to_N, content.payloads[key.replica], key)

    return make_average, make_deltas


def _keys(form: Form, decision: Decision) -> list[Key]:
    bases = decision.base_rounds
    return [form.key(decision.fragment, bases[m], m) for m in decision.cohort.members]


class Digests:
    """The digests of Θ_p and of the slots, as they were kept last.

    Args:
        state: Θ and the slots.
        slots: names of the outer rule's vectors.
    """

    def __init__(self, state: OuterState, slots: Sequence[str]) -> None:
        self.kinds = (OUTER, *slots)
        """The kinds of vectors that are checked."""
        self._state = state
        self._digests = [{kind: state.digest(p, kind) for kind in self.kinds} for p in range(state.num_fragments)]

    def base(self, p: int) -> int:
        """The digest of Θ_p, by which replicas compare it."""
        return self._digests[p][OUTER]

    def note(self, kind: str, p: int) -> None:
        """Note that a vector was changed."""
        if kind in self.kinds:
            self._digests[p][kind] = self._state.digest(p, kind)

    def check(self, p: int, step: int) -> None:
        """Refuse a Θ_p, or a slot, that has changed since then, before anybody else hears of it.

        Raises:
            DisagreementError: naming the vector and the inner step.
        """
        for kind, digest in self._digests[p].items():
            if self._state.digest(p, kind) != digest:
                name = "outer parameters" if kind == OUTER else f"outer rule's {kind}"
                raise DisagreementError(
                    f"step {step}: the last outer step left other bits in the {name} of fragment {p}: this "
                    "computer's memory changed; nothing was sent or merged: start this replica again"
                )


class Waiting:
    """Decisions by fragment, in the log's order; each holds its payloads in memory.

    Args:
        num_fragments: P.
    """

    def __init__(self, num_fragments: int) -> None:
        self.by_fragment: tuple[deque[Decision], ...] = tuple(deque() for _ in range(num_fragments))
        self._first = 0

    def __bool__(self) -> bool:
        """Whether there is one."""
        return any(self.by_fragment)

    def listen(self, rendezvous: Rendezvous, *, wait_for: int | None = None) -> None:
        """Receive decisions, unless many wait already; `wait_for` is as in `Rendezvous.decided`."""
        num_waiting = sum(map(len, self.by_fragment))
        if wait_for is not None or num_waiting < MOST_DECISIONS_A_FRAGMENT * len(self.by_fragment):
            for decision in rendezvous.decided(wait_for=wait_for):
                self.by_fragment[decision.fragment].append(decision)

    def in_turn(self) -> Iterator[int]:
        """The fragments, beginning with the one whose turn it is."""
        num_fragments = len(self.by_fragment)
        yield from ((self._first + later) % num_fragments for later in range(num_fragments))

    def interrupted_at(self, fragment: int) -> None:
        """Give the next turn to the fragment after this one, for which time was over."""
        self._first = (fragment + 1) % len(self.by_fragment)


_MOST_SECONDS = 0.05
"""Time after which the decisions that are left wait for the next inner step."""


@dataclass(eq=False)
class Flight:
    """An own payload of which no decision is known yet."""

    seq: int
    base_round: int
    step: int
    """The inner step after which it was offered."""
    due_step: int
    """The inner step after which it is merged at the earliest."""
    tokens: int
    """`tokens` of the rounds at that step."""
    error_N: Tensor | None
    """The error of error feedback, if it is counted."""


@dataclass(eq=False, kw_only=True)
class ElasticRounds(ReplicaRounds):
    """The rounds of the replicas of a rendezvous."""

    rendezvous: Rendezvous
    form: Form
    slot: int
    """This replica's part of the text."""
    in_flight: dict[int, Flight] = field(default_factory=dict)
    """The own payloads without a decision, by fragment."""
    rounds: list[int] = field(default_factory=list)
    """Outer steps of each fragment that this replica has taken."""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """For each fragment the tokens and inner steps up to its last send that was counted."""
    next_seq: int = 0
    tokens_before: int = 0
    """Tokens that earlier processes of this replica have read."""

    def __post_init__(self) -> None:
        """Begin with the run's first Θ."""
        super().__post_init__()
        num_fragments = self.state.num_fragments
        self.rounds, self.counted = [0] * num_fragments, [(0, 0)] * num_fragments
        self.kept = Digests(self.state, self.settings.outer.slots)
        """The digests of Θ and the slots, as the last outer step left them."""
        self.waiting = Waiting(num_fragments)
        self._equality = EqualityWatch(self.form, self._reduction, self.replica)

    @property
    def replica(self) -> int:
        """This replica's number in the run."""
        return self.rendezvous.replica

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet, on average over the fragments."""
        return self.tokens - sum(tokens for tokens, _ in self.counted) / len(self.counted)

    def is_initial(self, p: int) -> bool:
        """Whether no outer step of a fragment was taken."""
        return not self.rounds[p]

    def catch_up(self, joined: Joined) -> None:
        """Take Θ from the snapshots and decisions that the run has made so far, and θ ← Θ."""
        for p, stored in joined.snapshots.items():
            self._read(p, stored)
        num_taken = 0
        while num_taken < joined.num_decisions:
            for decision in self.rendezvous.decided(wait_for=-1):
                if decision.round > self.rounds[decision.fragment]:
                    self._take(decision, Mixing(0.0))
                num_taken += 1
        for p in range(self.state.num_fragments):
            self.take_outer_parameters(p)
            self.rendezvous.applied(p, self.rounds[p], self.kept.base(p))

    def _read(self, p: int, stored: StoredSnapshot) -> None:
        """Take Θ_p and the slots from a snapshot."""
        vectors = {kind: empty(self.form.sizes[p], torch.float32, torch.device("cpu")) for kind in self.kept.kinds}
        read_into(vectors, stored.data, name=stored.name)
        for kind, vector_N in vectors.items():
            self.state.use(kind, p).copy_(vector_N)
            self.keep(kind, p)
        self._applied(p, stored.round)

    def _jump(self, decision: Decision, stored: StoredSnapshot, mixing: MergeRule) -> OuterStep:
        """Take a snapshot in the place of outer steps that are long ago, and merge Θ once."""
        p, flight = decision.fragment, self.in_flight.get(decision.fragment)
        if flight is not None and _is_counted(self, p, flight, by_round=stored.round):
            self._count(p, flight)
            mixing = self.settings.mixing
        before_N = self.state.use(OUTER, p).clone()
        self._read(p, stored)
        with self.parameters.merging(p, self.num_steps) as theta:
            merge_in_place(theta, self.state.use(OUTER, p), mixing, before_N)
        spans, sync = self.parameters.spans[p], Sync(p, stored.round, self.num_steps)
        zeros = partial(torch.zeros, self.form.sizes[p], device=self.parameters.device)
        return described(sync, 0.0, zeros, lambda: iter(()), spans, self._shard_group)

    def take_outer_parameters(self, p: int) -> None:
        """θ_p ← Θ_p."""
        outer_N = self.state.use(OUTER, p)
        with self.parameters.merging(p, self.num_steps) as theta:
            for own, part_n in zip(theta, outer_N.split([own.numel() for own in theta]), strict=True):
                own.copy_(part_n.view(own.shape))

    def has_uncounted(self, p: int) -> bool:
        """Whether a fragment has work that no payload on the way tells."""
        return p not in self.in_flight and self.num_steps > self.counted[p][1]

    def send(self, p: int) -> None:
        """Encode a fragment's outer gradient and offer it."""
        key, tau = self.form.key(p, self.rounds[p], self.replica), self.settings.schedule.overlap(0)
        with self.record.encoding():
            self.kept.check(p, self.num_steps)
            self.check_parameters((p,))
            # A payload a share: each share is addressed to one of so many.
            payloads, error_N = self.encode(p, key, Cohort.equal(self.form.num_shares), base=self.kept.base(p))
            decoded_N = self._reduction.decode(payloads, self.form.sizes[p], key)
            self.on_send(Sync(p, self.rounds[p] + 1, self.num_steps), lambda: decoded_N)
        then_tokens, then_steps = self.counted[p]
        tokens, steps = self.tokens - then_tokens, self.num_steps - then_steps
        _check_read(self.num_steps, tokens, steps)
        norms = norms_of(decoded_N, self.form, source=f"step {self.num_steps}: the outer gradient of fragment {p}")
        offer = Offer(
            seq=self.next_seq,
            fragment=p,
            payloads=tuple(payload.cpu() for payload in payloads),
            norms=norms,
            base_round=self.rounds[p],
            base=self.kept.base(p),
            tokens=tokens,
            steps=steps,
            position=self.tokens - self.tokens_before,
            step=self.num_steps,
            overlap_steps=tau,
        )
        self.rendezvous.offer(offer)
        due_step = self.num_steps + tau
        self.in_flight[p] = Flight(self.next_seq, self.rounds[p], self.num_steps, due_step, self.tokens, error_N)
        self.next_seq += 1
        self.bytes_sent += sum(payload.numel() for payload in payloads)
        self.last_sent[p] = self.num_steps

    def merge(self, *, wait: bool) -> tuple[OuterStep, ...]:
        """Take the outer steps that were decided.

        Args:
            wait: wait for the decisions of all own payloads whose overlap has passed, bounded in time, and take
                whatever else was decided when this began.
        """
        self.parameters.watch.check()
        end, steps = time.perf_counter() + _MOST_SECONDS, []
        self.waiting.listen(self.rendezvous)
        # Not those that come meanwhile: who receives more slowly than the others decide would never end.
        newest = [self.rendezvous.newest_round(p) if wait else 0 for p in range(self.state.num_fragments)]
        for p in self.waiting.in_turn():
            for outer_step in self._take_waiting(p):
                steps.append(outer_step)
                if not wait and time.perf_counter() > end:
                    self.waiting.interrupted_at(p)
                    return tuple(steps)
            while wait and (self._is_over(p) or self._is_behind(p, newest[p])):
                start = time.perf_counter()
                self.waiting.listen(self.rendezvous, wait_for=p)
                self.blocked_seconds += time.perf_counter() - start
                steps += self._take_waiting(p)
        return tuple(steps)

    def _is_over(self, p: int) -> bool:
        """Whether a fragment is in flight, and its overlap has passed."""
        return p in self.in_flight and self.num_steps >= self.in_flight[p].due_step

    def _is_behind(self, p: int, newest: int) -> bool:
        """Whether a fragment is not in flight, and its round `newest`, which was decided, is not taken."""
        return p not in self.in_flight and self.rounds[p] < newest

    def _take_waiting(self, p: int) -> Iterator[OuterStep]:
        waiting = self.waiting.by_fragment[p]
        while waiting and not (waiting[0].is_own and p in self.in_flight and not self._is_over(p)):
            decision = waiting.popleft()
            if decision.round <= self.rounds[p]:
                continue  # a snapshot was newer
            mixing = self.settings.mixing if decision.is_own else Translation()
            yield self._take(decision, mixing)

    def _take(self, decision: Decision, mixing: MergeRule) -> OuterStep:
        """Take one outer step; a decision is refused whole, before anything changes."""
        p, entry = decision.fragment, f"step {self.num_steps}: entry {decision.number} of the log"
        if decision.round != self.rounds[p] + 1:
            raise ExchangeError(f"{entry} is round {decision.round} of fragment {p} after round {self.rounds[p]}")
        self.kept.check(p, self.num_steps)
        if decision.before != self.kept.base(p):
            raise DisagreementError(
                f"{entry}: the outer parameters of fragment {p} before round {decision.round} are not those of "
                "this replica: an outer step gave other bits, here or where the entry was written; nothing was "
                "merged: start this replica again"
            )
        if decision.with_snapshot:
            vectors = {kind: self.state.use(kind, p).detach().to("cpu", copy=True) for kind in self.kept.kinds}
            self.rendezvous.snapshot(p, self.rounds[p], vectors)
        content = decision.content
        if isinstance(content, StoredSnapshot):
            return self._jump(decision, content, mixing)
        if decision.is_own:
            self._equality.check(decision, content)
        to_N = self._scratch[: self.form.sizes[p]]
        with self.record.merging():
            average = decided_average(self.form, decision, content, to_N)
        flight = self.in_flight.get(p) if decision.is_own else None
        sync = Sync(p, decision.round, self.num_steps if flight is None else flight.step)
        self.take(sync, average, decision.cohort, mixing)
        if flight is not None:
            self._count(p, flight)
        self._applied(p, decision.round)
        self.bytes_received += content.bytes_received
        self.bytes_sent += content.bytes_sent
        makers = remade(self.form, decision, content, self.parameters.device)
        return described(sync, 0.0, *makers, self.parameters.spans[p], self._shard_group, decision.cohort)

    def keep(self, kind: str, p: int) -> None:
        """Take home a vector that was changed, and note its digest."""
        super().keep(kind, p)
        self.kept.note(kind, p)

    def _count(self, p: int, flight: Flight) -> None:
        """Note that an own payload was counted."""
        self.counted[p] = flight.tokens, flight.step
        if flight.error_N is not None:
            self.keep_error(p, flight.error_N)
        del self.in_flight[p]

    def _applied(self, p: int, round: int) -> None:
        self.rounds[p] = round
        self.rendezvous.applied(p, round, self.kept.base(p))
        flight = self.in_flight.get(p)
        if flight is not None and flight.base_round < round - self.rendezvous.max_stale:
            del self.in_flight[p]  # nobody may count it any more; Θ − θ still holds its work


def _check_read(step: int, tokens: int, num_steps: int) -> None:
    """Refuse an outer gradient without a weight."""
    if not tokens:
        raise UserError(
            f"step {step}: the last {num_steps} inner steps read no token, and where replicas come and go an "
            "outer gradient is weighted by its tokens: pass engine.step(tokens=...)",
            "tokens",
        )


def _is_counted(rounds: ElasticRounds, p: int, flight: Flight, *, by_round: int) -> bool:
    """True if a payload was counted up to a round; the log may be read further than that."""
    rendezvous = rounds.rendezvous
    is_counted = rendezvous.last_counted(rounds.replica, p) >= flight.seq
    return is_counted and rendezvous.last_round(rounds.slot, p) <= by_round


class ElasticMembership:
    """This replica in a run of a rendezvous, which it joins.

    Raises:
        DisagreementError: if the run has other settings or initial parameters.
    """

    def __init__(
        self, settings: Settings, rendezvous: Rendezvous, parameters: FragmentParameters, *, offload: bool
    ) -> None:
        state = outer_state(settings, parameters, offload=offload)
        sizes = tuple(state.num_elements(p) for p in range(state.num_fragments))
        form = Form(codec=settings.wire, sizes=sizes, seed=settings.seed, second=settings.reduction.second)
        facts = settings.shared_facts() | parameters.facts(state.at_home(OUTER))
        schedule = settings.schedule
        self._joined = joined = rendezvous.join(facts, form, sync_every=schedule.sync_every)
        self.rounds = ElasticRounds(
            settings, parameters, state, rendezvous=rendezvous, form=joined.form, slot=joined.slot
        )
        self.rounds.catch_up(joined)
        self._rendezvous, self._sync_every = rendezvous, schedule.sync_every
        self._next_send = [schedule.send_step(p) for p in range(schedule.num_fragments)]
        self._min_steps = schedule.sync_every if rendezvous.waits else max(1, schedule.sync_every // 4)
        self._must_load = rendezvous.waits and any(self.rounds.rounds)
        self._translation: dict[int, Tensor | None] = {}
        """For each fragment the Θ that a checkpoint knew; None to take the run's."""
        self._then: dict[str, Any] = {}
        """Slot, rounds, Θ and errors of a checkpoint, vectors flat by fragment; empty once θ was moved."""

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._rendezvous.failure

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """A context whose errors end this replica's part in the run."""
        try:
            yield
        except Exception as error:
            self._rendezvous.abort(str(error) or type(error).__name__)
            raise

    def is_due(self) -> bool:
        """True if something is sent, decided, waited for, or to be looked at."""
        rounds = self.rounds
        self._rendezvous.at_step(rounds.num_steps)
        return bool(
            self._rendezvous.has_news
            or self._must_load
            or self._translation
            or rounds.parameters.watch.merges
            or rounds.waiting
            or any(rounds.num_steps >= step for step in self._next_send)
            or (rounds.in_flight and self._rendezvous.waits)
            or self._rendezvous.wanted()
        )

    def advance(self) -> tuple[OuterStep, ...]:
        """Offer the fragments that are due, and take the outer steps that were decided."""
        self._check_place()
        rounds = self.rounds
        self._translate()
        rounds.parameters.look_at_merges(rounds.num_steps)
        for p in self._due():
            rounds.send(p)
            self._next_send[p] = rounds.num_steps + self._sync_every
        return rounds.merge(wait=self._rendezvous.waits)

    def _check_place(self) -> None:
        """Refuse to begin among replicas that wait for each other and are at another place of the schedule."""
        if self._must_load:
            self._rendezvous.leave(finished=False)
            raise UserError(
                "the run waits for all of its replicas (quorum=all) and has begun: one that begins at another "
                "place of the schedule and all others would wait for each other; load the state that this replica "
                "has saved, or create a run with quorum=majority",
                "quorum",
            )

    def _due(self) -> list[int]:
        """The fragments to offer: H steps after the last time, or sooner if another's payload waits for ours."""
        rounds, wanted = self.rounds, set(self._rendezvous.wanted())
        early = self._sync_every - self._min_steps
        return [
            p
            for p, step in enumerate(self._next_send)
            if rounds.has_uncounted(p) and rounds.num_steps >= (step - early if p in wanted else step)
        ]

    def finish(self, *, flush: bool) -> tuple[OuterStep, ...]:
        """Wait for the decisions of own payloads, bounded in time, and take them and what else was decided."""
        rounds = self.rounds
        self._translate()
        merged = self._drained()
        if flush:
            for p in range(rounds.state.num_fragments):
                if rounds.has_uncounted(p):
                    rounds.send(p)
            merged += self._drained()
        return merged

    def _drained(self) -> tuple[OuterStep, ...]:
        """The outer steps of what is in flight."""
        rounds = self.rounds
        self._rendezvous.drain()
        for flight in rounds.in_flight.values():
            flight.due_step = min(flight.due_step, rounds.num_steps)
        return rounds.merge(wait=True)

    def adopt(self) -> None:
        """Refuse: Θ is what the log says."""
        raise refusal_to_adopt()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes; Θ and the slots lie in the store.

        Until θ is moved from a loaded state's Θ to the run's, Θ and its round are still those of that state.
        """
        rounds, named = self.rounds, self.rounds.parameters.all_named
        known = self._then or {
            "slot": self._joined.slot,
            "rounds": rounds.rounds,
            OUTER: rounds.state.at_home(OUTER),
            ERROR: rounds.state.at_home(ERROR),
        }
        return {
            "run": self._joined.run,
            "slot": known["slot"],
            "rounds": list(known["rounds"]),
            "num_steps": rounds.num_steps,
            "tokens": rounds.tokens,
            "bytes_sent": rounds.bytes_sent,
            "bytes_received": rounds.bytes_received,
            "blocked_seconds": rounds.blocked_seconds,
            "last_sent": list(rounds.last_sent),
            "next_send": list(self._next_send),
            "counted": [list(pair) for pair in rounds.counted],
            # Copies: whoever loads in place must not change the run's Θ.
            OUTER: named(outer_N.clone() for outer_N in known[OUTER]),
            ERROR: named(error_N.clone() for error_N in known[ERROR]),
        }

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state of this run's model.

        Raises:
            UserError: if it is another's, or this engine has trained: what it has sent may be counted.
        """
        refuse_if_sent(self.rounds.next_seq)
        return accepted_of(self.rounds, self._joined.run, state), ()

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Go on where a replica was: θ ← θ + Θ_now − Θ_then, or Θ_now where the run has counted work since then.

        The model's own parameters may be loaded before or after this: θ is moved before the next inner step ends.
        """
        self._must_load = False
        rounds = self.rounds
        rounds.num_steps, rounds.tokens = accepted["num_steps"], accepted["tokens"]
        rounds.tokens_before = rounds.tokens
        rounds.bytes_sent, rounds.bytes_received = accepted["bytes_sent"], accepted["bytes_received"]
        rounds.blocked_seconds, rounds.last_sent = accepted["blocked_seconds"], list(accepted["last_sent"])
        self._next_send = list(accepted["next_send"])
        rounds.counted = [(tokens, steps) for tokens, steps in accepted["counted"]]
        slot, then, errors = accepted["slot"], *vectors_of(accepted, rounds.parameters)
        self._then = {"slot": slot, "rounds": accepted["rounds"], OUTER: then, ERROR: errors}
        for p, (last_round, then_N) in enumerate(zip(accepted["rounds"], then, strict=True)):
            # Nobody else holds this replica's slot: what the saved θ − Θ stands for is counted here, or was.
            is_newer = slot != self._joined.slot or self._rendezvous.last_round(slot, p) > last_round
            self._translation[p] = None if is_newer else then_N
            if errors and not is_newer:
                rounds.keep_error(p, errors[p])

    def _translate(self) -> None:
        """Move θ from the Θ that a checkpoint knew to the run's."""
        rounds = self.rounds
        for p, then_N in self._translation.items():
            if then_N is None:
                rounds.take_outer_parameters(p)
                rounds.counted[p] = rounds.tokens, rounds.num_steps
                continue
            move_N = rounds.state.use(OUTER, p) - then_N.to(rounds.parameters.device)
            with rounds.parameters.merging(p, rounds.num_steps) as theta:
                for own, part_n in zip(theta, move_N.split([own.numel() for own in theta]), strict=True):
                    own.add_(part_n.view(own.shape))
        self._translation.clear()
        self._then.clear()


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


def accepted_of(rounds: ReplicaRounds, run: str, state: object) -> dict[str, Any]:
    """A state of this run's model.

    Raises:
        UserError: if it is another's, or lacks what `state_dict` gives.
    """
    if not isinstance(state, Mapping) or state.get("run") != run:
        raise UserError("the state is not that of a replica of this run: load the state that such a one saved")
    settings, own = rounds.settings, rounds.parameters.by_name
    accepted = {"run": run, **elastic_values_checked(state, num_fragments=len(settings.fragments))}
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


def refusal_to_adopt() -> UserError:
    """The error of a call of adopt()."""
    return UserError(
        "adopt() has no meaning where replicas come and go: the outer parameters are what the run's log says; "
        "begin another run from these parameters"
    )
