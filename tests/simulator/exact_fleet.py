"""A fleet event by event, with the log's own state machine and each replica's own decision: the reference.

Each replica takes inner steps, offers what is due, uploads and downloads one payload after the other, looks into
the store at times of its own, and asks its `Decider` whether it may write. Nobody fails.

Legend: P fragments, H sync period, τ overlap.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from tests.rendezvous.cases import Log

from diloco.rendezvous import deciding
from diloco.rendezvous.contract import Offer
from diloco.rendezvous.deciding import Decider, Pace
from diloco.rendezvous.log.entries import Claim, Contribution, Outer
from diloco.simulator.fleet import FleetRun


@dataclass(eq=False)
class Peer:
    """A replica."""

    number: int
    step_seconds: float
    upload_seconds: float
    download_seconds: float
    trip_seconds: float
    phase: float
    decider: Decider
    num_steps: int = 0
    up_free: float = 0.0
    down_free: float = 0.0
    next_seq: int = 0
    known: int = 0
    """Outer entries that it knows."""
    next_send: list[int] = field(default_factory=list)
    in_flight: dict[int, tuple[Offer, float]] = field(default_factory=dict)
    """By fragment the own offer and its time."""
    here: dict[int, dict[int, Contribution]] = field(default_factory=dict)


class ExactFleet:
    """The fleet of a run, until so many outer steps are taken."""

    def __init__(self, run: FleetRun, *, num_outer_steps: int, spread: float = 0.0, seed: int = 0) -> None:
        self.run, self.random = run, np.random.default_rng(seed)
        self.log = Log(num_fragments=run.num_fragments, quorum=run.quorum, max_stale=run.max_stale)
        self.log.join(*(f"r{m}" for m in range(run.num_replicas)))
        kinds = [kind for kind in run.machines for _ in range(kind.count)]
        mbit, p = 8e-6 * run.fragment_bytes, range(run.num_fragments)
        self.offsets = [q * run.sync_every // run.num_fragments for q in p]
        pace = Pace(
            poll_seconds=run.poll_seconds,
            memory_bytes=1,
            patience=run.sync_every if run.patience is None else run.patience,
            drain_seconds=1,
            close_seconds=1,
        )
        self.peers = [
            Peer(
                number=m,
                step_seconds=kind.mean_step_seconds,
                upload_seconds=mbit / kind.up_mbit_s,
                download_seconds=mbit / kind.down_mbit_s,
                trip_seconds=2 * kind.latency_seconds,
                phase=self.random.random() * run.poll_seconds,
                decider=Decider(m, pace),
                next_send=[self.offsets[q] or run.sync_every for q in p],
                here={q: {} for q in p},
            )
            for m, kind in enumerate(kinds)
        ]
        self.states = [self.log.state]
        self.bodies: list[Outer] = []
        self.events: list[tuple] = []
        self.order = itertools.count()
        self.delays: list[float] = []
        self.stale: list[int] = []
        self.now = 0.0
        for peer in self.peers:
            start = spread * run.sync_every * peer.step_seconds * self.random.random()
            self.at(start + peer.step_seconds, self.step, peer)
            self.at(peer.phase, self.tick, peer)
        clock, deciding.time = deciding.time, SimpleNamespace(monotonic=lambda: self.now)
        try:
            while len(self.bodies) < num_outer_steps:
                self.now, _, act, arguments = heapq.heappop(self.events)
                act(*arguments)
        finally:
            deciding.time = clock
        self.contributors = float(np.mean([len(body.contributions) for body in self.bodies]))

    def at(self, time: float, act, *arguments) -> None:
        heapq.heappush(self.events, (time, next(self.order), act, arguments))

    def look(self, peer: Peer, time: float) -> float:
        """The next time at which a replica looks into the store, and has the answer."""
        poll = self.run.poll_seconds
        return peer.phase + np.ceil((time - peer.phase) / poll) * poll + peer.trip_seconds

    def step(self, peer: Peer) -> None:
        """The end of an inner step."""
        peer.num_steps += 1
        state = self.states[peer.known]
        early = self.run.sync_every - max(1, self.run.sync_every // 4)
        for p, due in enumerate(peer.next_send):
            newest = state.fragments[p].round
            wanted = any(m != peer.number and c.base_round == newest for m, c in peer.here[p].items())
            if p not in peer.in_flight and peer.num_steps >= (due - early if wanted else due):
                self.send(peer, p, newest)
        self.decide(peer)
        # A little noise, since no two machines are alike.
        self.at(self.now + peer.step_seconds * (1 + 0.01 * self.random.standard_normal()), self.step, peer)

    def tick(self, peer: Peer) -> None:
        """A look of the thread that follows the log."""
        self.decide(peer)
        self.at(self.now + self.run.poll_seconds, self.tick, peer)

    def send(self, peer: Peer, p: int, newest: int) -> None:
        contribution = self.log.contribution(peer.number, p, seq=peer.next_seq, base_round=newest)
        peer.next_seq += 1
        peer.next_send[p] = peer.num_steps + self.run.sync_every
        claim = {name: getattr(contribution, name) for name in Claim.__dataclass_fields__}
        overlap = self.run.overlap_steps
        offer = Offer(**claim, fragment=p, base=0, norms=(1.0,), step=peer.num_steps, overlap=overlap)
        peer.in_flight[p] = offer, self.now
        peer.here[p][peer.number] = contribution
        peer.up_free = max(self.now, peer.up_free) + peer.upload_seconds
        self.at(peer.up_free + peer.trip_seconds, self.stored, contribution, p)

    def stored(self, contribution: Contribution, p: int) -> None:
        for peer in self.peers:
            if peer.number != contribution.replica:  # each looks for it at times of its own
                wait = self.random.random() * self.run.longest_poll_seconds + peer.trip_seconds
                self.at(self.now + wait, self.seen, peer, contribution, p)

    def seen(self, peer: Peer, contribution: Contribution, p: int) -> None:
        peer.down_free = max(self.now, peer.down_free) + peer.download_seconds
        self.at(peer.down_free, self.arrived, peer, contribution, p)

    def arrived(self, peer: Peer, contribution: Contribution, p: int) -> None:
        peer.here[p][contribution.replica] = contribution
        self.decide(peer)

    def decide(self, peer: Peer) -> None:
        state = self.states[peer.known]
        for p, (offer, _) in peer.in_flight.items():
            parts = peer.decider.parts(state, offer, peer.here[p], peer.num_steps, None)
            if parts is not None:
                self.at(self.now + peer.trip_seconds, self.write, peer.known, p, parts, peer)
                return

    def write(self, known: int, p: int, parts: tuple[Contribution, ...], peer: Peer) -> None:
        if known != len(self.bodies):
            return  # another entry was first
        body = Outer(fragment=p, round=self.log.state.fragments[p].round + 1, before="0" * 16, contributions=parts)
        self.stale += [body.round - 1 - c.base_round for c in parts]
        self.states.append(self.log.add(body, peer.number))
        self.bodies.append(body)
        for other in self.peers:
            time = self.now if other is peer else self.look(other, self.now) + other.trip_seconds
            self.at(time, self.heard, other, len(self.bodies))

    def heard(self, peer: Peer, number: int) -> None:
        while peer.known < number:
            body = self.bodies[peer.known]
            peer.known += 1
            for contribution in body.contributions:
                here = peer.here[body.fragment]
                if here.get(contribution.replica) == contribution:
                    del here[contribution.replica]
                if contribution.replica == peer.number:
                    self.delays.append(self.now - peer.in_flight.pop(body.fragment)[1])
                    if contribution.base_round < body.round - 1:
                        peer.next_send[body.fragment] = peer.num_steps + self.run.sync_every
