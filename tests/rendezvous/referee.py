"""A store in memory, and a referee who keeps books of his own on every entry that lands in its log."""

import enum
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.files import sha256
from diloco.rendezvous.log.entries import Contribution, Entry, Join, Keys, Leave, Outer
from diloco.rendezvous.log.keys import Opened, Signer
from diloco.rendezvous.log.log import ENTRY, source_of
from diloco.rendezvous.log.run import RunState

Vector = NDArray[np.float32]
NUM_ELEMENTS = 3


@functools.lru_cache(1 << 12)
def opened(data: bytes, number: int) -> Opened[Entry]:
    return ENTRY.open(data, source_of(number))


class Fault(enum.Enum):
    """The fate of a request."""

    NONE = enum.auto()
    LOST = enum.auto()
    ANSWER_LOST = enum.auto()
    LATE = enum.auto()


class NoAnswerError(Exception):
    """The request's answer did not come: it may have been carried out, or will be."""


class Payload(msgspec.Struct, frozen=True):
    """A payload's object; the contribution's SHA-256 is that of `values`."""

    fragment: int
    contribution: Contribution
    values: list[float]
    text: tuple[int, int]
    """The part of the slot's text that is in it."""

    def decoded(self) -> Vector:
        return np.array(self.values, np.float32)


def payload_digest(values: Vector) -> str:
    return sha256(values.tobytes())


def checksum(values: Vector) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def public_key(name: str) -> str:
    return sha256(f"key of {name}".encode())


class FakeSigner(Signer):
    """Makes signatures that are worth nothing, in the form of real ones; empty without keys."""

    def __init__(self, key: str) -> None:
        self.public = key

    def sign(self, message: bytes) -> str:
        return sha256(self.public.encode() + message) * 2 if self.public else ""


def is_signed(opened: Opened, key: str) -> bool:
    return opened.signature == FakeSigner(key).sign(opened.message)


@dataclass
class OuterParameters:
    """Θ and v of each fragment."""

    theta: list[Vector]
    velocity: list[Vector]

    @classmethod
    def initial(cls, num_fragments: int) -> "OuterParameters":
        theta = [np.full(NUM_ELEMENTS, 1 + p, np.float32) for p in range(num_fragments)]
        return cls(theta, [np.zeros(NUM_ELEMENTS, np.float32) for _ in theta])

    def step(self, state: RunState, body: Outer, payloads: Sequence[Vector]) -> None:
        """v ← μ v + Δ; Θ ← Θ − η (Δ + μ v), with the weighted average of the payloads."""
        p, cohort = body.fragment, state.cohort(body.contributions)
        average = np.zeros(NUM_ELEMENTS, np.float32)
        for weight, payload in zip(cohort.weights, payloads, strict=True):
            average += np.float32(weight) * payload
        average /= np.float32(cohort.total_weight)
        self.velocity[p] = np.float32(0.5) * self.velocity[p] + average
        self.theta[p] = self.theta[p] - np.float32(0.4) * (average + np.float32(0.5) * self.velocity[p])

    def checksums(self) -> tuple[str, ...]:
        return tuple(map(checksum, self.theta))


@dataclass
class Referee:
    """The books: each entry must be valid on its prefix, and break no invariant."""

    states: list[RunState] = field(default_factory=list)
    """states[k] is after the entries 0 … k; kept for ever, like all payloads."""
    payloads: dict[tuple[int, int], Payload] = field(default_factory=dict)
    counted: set[tuple[int, int]] = field(default_factory=set)
    texts: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """By slot and fragment."""
    names: list[str] = field(default_factory=list)
    latest: dict[str, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    """Replicas that left."""
    revoked: set[int] = field(default_factory=set)
    rounds: dict[int, int] = field(default_factory=dict)
    groups: dict[int, set[int]] = field(default_factory=dict)
    """By fragment the slots of the replicas that were active when by half others were."""
    outer: OuterParameters | None = None
    checksums: list[tuple[str, ...]] = field(default_factory=list)
    """The checksums of Θ after each entry, by offline replay."""

    @property
    def state(self) -> RunState:
        return self.states[-1]

    def land(self, number: int, data: bytes) -> None:
        assert number == len(self.states), "the log has no holes and no second end"
        one = opened(data, number)
        entry = one.header
        if number == 0:
            self.states.append(RunState.begin(entry, sha256(data)))
            self.outer = OuterParameters.initial(self.state.rules.num_fragments)
        else:
            assert is_signed(one, self.state.signer(entry))
            self.states.append(self.state.after(entry, sha256(data)))
        self._note(entry)
        assert self.outer is not None
        self.checksums.append(self.outer.checksums())
        slots = [self.state.members[replica].slot for replica in self.state.active]
        assert len(slots) == len(set(slots)), "no active replica shares a slot with another"

    def _note(self, entry: Entry) -> None:
        body = entry.body
        if isinstance(body, Join):
            self.names.append(body.name)
            self.latest[body.name] = entry.author
            assert entry.author == len(self.names) - 1
            others = [r for r in self.states[-2].active if self.names[r] != body.name]
            assert not any(self.state.members[r].fenced for r in others), "a join fences an active replica"
        elif isinstance(body, Leave):
            self.gone.add(entry.author)
        elif isinstance(body, Keys):
            self.revoked |= {r for r, name in enumerate(self.names) if public_key(name) in body.revoked}
        elif isinstance(body, Outer):
            self._note_outer(entry.author, body)

    def _note_outer(self, author: int, body: Outer) -> None:
        p, before, outer = body.fragment, self.states[-2], self.outer
        assert outer is not None
        self.rounds[p] = self.rounds.get(p, 0) + 1
        assert body.round == self.rounds[p], "rounds are consecutive"
        assert body.before == checksum(outer.theta[p]), "the hash chain is the offline replay"
        assert author in [c.replica for c in body.contributions]
        assert author not in self.gone or before.finished
        for c in body.contributions:
            payload = self.payloads[c.replica, c.seq]
            assert payload.contribution == c
            assert payload.fragment == p
            assert (c.replica, c.seq) not in self.counted, "no payload enters two entries"
            self.counted.add((c.replica, c.seq))
            assert self.latest[self.names[c.replica]] == c.replica, "a payload of a fenced replica"
            assert c.replica not in self.revoked, "a payload of a replica whose key was revoked"
            assert body.round - 1 - before.rules.max_stale <= c.base_round < body.round
            self._note_text(before.members[c.replica].slot, p, payload.text)
        quorum, counted = before.rules.quorum, {c.replica for c in body.contributions}
        living = {r for r in self.latest.values() if r not in self.gone | self.revoked} & set(before.active)
        if quorum == "all":
            assert living <= counted
            assert len(self.latest) >= before.rules.num_replicas
        elif quorum != "majority" and not before.finished:
            assert len(counted) >= min(quorum, len(living))
        now = {before.members[r].slot for r in {*before.active, *counted}}
        then = self.groups.setdefault(p, now)
        is_new = len(now & then) < len(then) / 2 or len(now) / len(then) >= 2
        assert self.state.fragments[p].since[-1].is_new == is_new
        self.groups[p] = now if is_new else then
        outer.step(before, body, [self.payloads[c.replica, c.seq].decoded() for c in body.contributions])

    def _note_text(self, slot: int, fragment: int, text: tuple[int, int]) -> None:
        texts = self.texts.setdefault((slot, fragment), [])
        assert all(text[1] <= start or end <= text[0] for start, end in texts), "text was counted twice"
        texts.append(text)


class FakeStore:
    """Objects by name, created if absent; each landing entry goes to the referee."""

    def __init__(self, referee: Referee) -> None:
        self.objects: dict[str, bytes] = {}
        self.referee = referee
        self.late: list[tuple[str, bytes]] = []

    def create(self, name: str, data: bytes, fault: Fault) -> bytes | None:
        """None, or what is there already."""
        if fault is Fault.LATE:
            self.late.append((name, data))
        if fault in (Fault.LATE, Fault.LOST):
            raise NoAnswerError
        there = self.objects.get(name)
        if there is None:
            self.objects[name] = data
            self._landed(name, data)
        if fault is Fault.ANSWER_LOST:
            raise NoAnswerError
        return there

    def deliver(self, index: int) -> None:
        """Carry out a late request."""
        if self.late:
            name, data = self.late.pop(index % len(self.late))
            self.create(name, data, Fault.NONE)

    def newest_index(self) -> str | None:
        return max((name for name in self.objects if name.startswith("index/")), default=None)

    def _landed(self, name: str, data: bytes) -> None:
        if name.startswith("log/"):
            self.referee.land(int(name[4:]), data)
        elif name.startswith("payloads/"):
            payload = msgspec.json.decode(data, type=Payload)
            self.referee.payloads[payload.contribution.replica, payload.contribution.seq] = payload
