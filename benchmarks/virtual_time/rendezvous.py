"""A rendezvous in one process and in virtual time: the log's own state machine and rules, without a store.

The caller lets the replicas take their inner steps in an order of its own, moves the clock, and calls `decide`.
Decisions depend on nothing else, so that a run gives the same numbers however busy the machine is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from diloco.files import sha256
from diloco.rendezvous.contract import Content, Decision, Form, Joined, News, Offer, Payload, StoredSnapshot
from diloco.rendezvous.deciding import Decider, Pace
from diloco.rendezvous.log.entries import (
    FORMAT,
    Body,
    Claim,
    Contribution,
    Create,
    Entry,
    Join,
    Outer,
    Rules,
    Snapshot,
)
from diloco.rendezvous.log.log import ENTRY
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.objects import seal_snapshot, snapshot_name

STEP_TOKENS, MOST_STEPS = 1 << 20, 1 << 20
"""The amounts that each replica declares."""


class Arrival(Protocol):
    """The time at which others can see a payload."""

    def __call__(self, seat: "Seat", fragment: int, base_round: int) -> float:
        """The virtual time of a payload's arrival, at any time after its offer."""
        ...


@dataclass(eq=False)
class VirtualLog:
    """The log of one run, and the payloads on their way.

    Args:
        rules: of the run.
        patience: inner steps after t + τ in which a decision waits for a majority.
        arrival: the delay of payloads.
    """

    rules: Rules
    patience: int
    arrival: Arrival
    now: float = 0.0
    """The virtual time."""
    seats: list["Seat"] = field(default_factory=list)
    """The replicas that live."""
    entries: list[Outer] = field(default_factory=list)
    """All outer entries."""

    def __post_init__(self) -> None:
        body = Create(format=FORMAT, rules=self.rules, facts={}, creator="")
        entry = _entry(body, author=-1, previous="")
        self.state = RunState.begin(entry, sha256(ENTRY.line(entry)))
        self.decisions: list[Decision] = []
        """The decisions since the last snapshots, for joiners."""
        self.snapshots: dict[int, StoredSnapshot] = {}
        self.facts: Mapping[str, Any] | None = None
        self.checksums: dict[tuple[int, int], int] = {}
        """The checksums by fragment and round."""
        self._payloads: dict[tuple[int, int], Tensor] = {}

    def append(self, body: Body, author: int) -> None:
        """Write an entry, which the state machine checks."""
        entry = _entry(body, author=author, previous=self.state.previous)
        self.state = self.state.after(entry, sha256(ENTRY.line(entry)))

    def arrived(self, p: int) -> dict[int, Contribution]:
        """The payloads of a fragment that have arrived and were not counted, by replica."""
        offers = ((seat, seat.offers[p]) for seat in self.seats if p in seat.offers)
        return {s.replica: c for s, c in offers if self.arrival(s, p, c.base_round) <= self.now}

    def keep_payload(self, contribution: Contribution, payload: Tensor, replica: int) -> None:
        """Take a payload that is on its way."""
        self._payloads[replica, contribution.seq] = payload

    def decide(self) -> None:
        """Write the outer entries that a replica may write now."""
        for p in range(self.rules.num_fragments):
            while (decided := self._decision(p)) is not None:
                self._deliver(*decided)

    def _decision(self, p: int) -> tuple["Seat", Outer] | None:
        here, log = self.arrived(p), self.state.fragments[p]
        for seat in self.seats:
            if p not in seat.sent or seat.rounds[p] != log.round:
                continue
            parts = seat.decider.in_time(self.state, seat.sent[p], here, seat.num_steps)
            if parts is not None:
                before = f"{self.checksums[p, log.round]:016x}"
                return seat, Outer(fragment=p, round=log.round + 1, before=before, contributions=parts)
        return None

    def _deliver(self, author: "Seat", body: Outer) -> None:
        """Write an outer entry, and hand it to all replicas."""
        p, parts = body.fragment, body.contributions
        self.append(body, author.replica)
        ref = self.state.fragments[p].since[-1]
        self.entries.append(body)
        payloads = {c.replica: Payload(self._payloads.pop((c.replica, c.seq))) for c in parts}
        content = Content(payloads=payloads, bytes_received=sum(x.data.numel() for x in payloads.values()))
        decision = Decision.of(ref, self.state, content)
        self.decisions.append(decision)
        is_kept = self.rules.is_kept(body.round - 1)
        for seat in self.seats:
            own_seq = next((c.seq for c in parts if c.replica == seat.replica), -1)
            if own_seq >= 0:
                del seat.offers[p], seat.sent[p]
            received = sum(x.data.numel() for m, x in payloads.items() if m != seat.replica)
            content = Content(payloads=payloads, bytes_received=received)
            with_snapshot = is_kept and seat is author
            seat.news.append(replace(decision, content=content, own_seq=own_seq, with_snapshot=with_snapshot))


@dataclass(eq=False)
class Seat:
    """The place of one replica in a virtual log: a rendezvous for its engine."""

    log: VirtualLog
    name: str
    replica: int = -1
    num_steps: int = 0
    news: list[Decision] = field(default_factory=list)
    offers: dict[int, Contribution] = field(default_factory=dict)
    """The own payload of each fragment that was not counted yet."""
    sent: dict[int, Offer] = field(default_factory=dict)
    """The same as the engine offered it."""
    failure: str | None = None
    timeout_seconds: float = 600.0

    @property
    def state(self) -> RunState:
        return self.log.state

    @property
    def slot(self) -> int:
        return self.state.members[self.replica].slot

    @property
    def start(self) -> int:
        return self.state.members[self.replica].start

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the outer steps that this replica has taken, P times those of the run; and their number."""
        not_taken = [body for body in self.log.entries if body.round > self.rounds[body.fragment]]
        tokens = sum(c.tokens for body in not_taken for c in body.contributions)
        return self.state.tokens - tokens, self.state.num_outer - len(not_taken)

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        del sync_every
        log = self.log
        log.facts = log.facts or facts
        assert log.facts == facts, "all replicas share the settings"
        self.replica = len(log.state.members)
        log.append(Join(name=self.name, key="", step_tokens=STEP_TOKENS, most_steps=MOST_STEPS), self.replica)
        log.seats = [seat for seat in log.seats if seat.name != self.name] + [self]
        pace = Pace(poll_seconds=0, memory_bytes=1, patience=log.patience, drain_seconds=0, close_seconds=0)
        self.decider = Decider(self.replica, pace)
        self.rounds = [0] * log.rules.num_fragments
        """Outer steps of each fragment that this replica has taken."""
        self.news = list(log.decisions)
        return Joined(
            seat=self,
            run=log.state.run,
            rules=log.rules,
            replica=self.replica,
            slot=self.slot,
            start=self.start,
            step_tokens=STEP_TOKENS,
            most_steps=MOST_STEPS,
            slot_rounds=[fragment.last_round.get(self.slot, 0) for fragment in log.state.fragments],
            snapshots=dict(log.snapshots),
            form=form,
            num_decisions=len(self.news),
        )

    def offer(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        claim = {name: getattr(offer, name) for name in Claim.__dataclass_fields__}
        contribution = Contribution(**claim, sha256=sha256(payloads[0].numpy().data), norm=offer.norms[0])
        self.offers[offer.fragment], self.sent[offer.fragment] = contribution, offer
        self.log.keep_payload(contribution, payloads[0], self.replica)

    def step(
        self,
        num_steps: int,
        taken_rounds: Sequence[tuple[int, int]],
        *,
        room: int,
        wait_for: int | None = None,
        is_last: bool = False,
    ) -> News:
        assert wait_for is None or self.news, "virtual time stands still while a replica waits"
        self.num_steps = num_steps
        for p, (last_round, checksum) in enumerate(taken_rounds):
            self.rounds[p] = last_round
            known = self.log.checksums.setdefault((p, last_round), checksum)
            assert known == checksum, "Θ_p has the same bits on all replicas"
        taken, self.news = self.news, []
        return News(decisions=taken, wanted=self._wanted(), rounds=[log.round for log in self.state.fragments])

    def _wanted(self) -> Sequence[int]:
        fragments = self.state.fragments
        return [
            p
            for p in range(len(fragments))
            if any(
                m != self.replica and c.base_round == fragments[p].round for m, c in self.log.arrived(p).items()
            )
        ]

    def refusal(self, offer: Offer) -> str:
        return self.state.refusal(offer.fragment, self.offers[offer.fragment]) or ""

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        _, digest = seal_snapshot(vectors)
        self.log.append(Snapshot(fragment=fragment, round=round, sha256=digest), self.replica)
        name = snapshot_name(fragment, round, digest)
        self.log.snapshots[fragment] = StoredSnapshot(round=round, name=name, vectors=vectors)
        later = [d for d in self.log.decisions if d.fragment != fragment or d.round > round]
        self.log.decisions = later

    def close(self, *, are_offers_counted: bool = True, if_last: bool = False) -> None:
        pass

    def leave(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        self.failure = reason


def _entry(body: Body, *, author: int, previous: str) -> Entry:
    """An entry without chance."""
    return Entry(author=author, previous=previous, keys=0, nonce="0" * 32, body=body)
