"""The rounds of a replica among others that come and go: it offers outer gradients, and follows the decisions.

    Δ_p = Σ_m w_m decode(payload of m) / Σ_m w_m          over the replicas that the decision names; or share by
                                                          share, from averages that were encoded once more
    Θ_p ← OuterOpt(Θ_p, Δ_p)
    θ_p ← α θ_p + (1 − α) Θ_p                             if this replica's payload is in it, at t + τ
    θ_p ← θ_p + Θ_p,new − Θ_p,old                         if it is not: Θ − θ, the work not yet counted, stays

Shapes: N elements of one fragment.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from diloco.engine import decided, observe
from diloco.engine.kept import Digests
from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.state import OUTER
from diloco.engine.waiting import Waiting
from diloco.errors import DisagreementError, ExchangeError, UserError
from diloco.kernels.memory import empty
from diloco.outer.mixing import MergeRule, Mixing, Translation
from diloco.outer.step import OuterStep
from diloco.outer.take import merge_in_place
from diloco.reduction.cohort import Cohort
from diloco.rendezvous import snapshots
from diloco.rendezvous.contract import Decision, Form, Joined, Offer, Rendezvous, StoredSnapshot
from diloco.rendezvous.verify import norms_of
from diloco.schedule import Sync

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
        self._equality = decided.EqualityWatch(self.form, self._reduction, self.replica)

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
        snapshots.read_into(vectors, stored.data, name=stored.name)
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
        return observe.described(sync, 0.0, zeros, lambda: iter(()), spans, self._shard_group)

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
            average = decided.average(self.form, decision, content, to_N)
        flight = self.in_flight.get(p) if decision.is_own else None
        sync = Sync(p, decision.round, self.num_steps if flight is None else flight.step)
        self.take(sync, average, decision.cohort, mixing)
        if flight is not None:
            self._count(p, flight)
        self._applied(p, decision.round)
        self.bytes_received += content.bytes_received
        self.bytes_sent += content.bytes_sent
        makers = decided.remade(self.form, decision, content, self.parameters.device)
        return observe.described(sync, 0.0, *makers, self.parameters.spans[p], self._shard_group, decision.cohort)

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
