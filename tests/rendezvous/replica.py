"""A replica as log thread and engine would be, on a log in a fake store and vectors of three numbers."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from tests.rendezvous.cases import AMOUNTS
from tests.rendezvous.referee import (
    NUM_ELEMENTS,
    FakeSigner,
    FakeStore,
    Fault,
    OuterParameters,
    Payload,
    Vector,
    is_signed,
    opened,
    payload_digest,
)

from diloco.files import sha256
from diloco.rendezvous.deciding import may_decide, turns
from diloco.rendezvous.log.entries import Body, Contribution, Join, Leave, Outer, Snapshot, new_entry
from diloco.rendezvous.log.index import INDEX, Index, open_index, retirable
from diloco.rendezvous.log.log import ENTRY
from diloco.rendezvous.log.run import RunState

OVERLAP, PATIENCE = 1, 3
"""τ and patience in inner steps."""


@dataclass
class Sent:
    """An own payload that has not been counted."""

    payload: Payload
    step: int
    uploaded: bool = False


class Replica:
    """A replica as the log thread and the engine would be, on vectors of three numbers."""

    def __init__(self, name: str, store: FakeStore, *, key: str, from_index: bool) -> None:
        self.name, self.store, self.key = name, store, key
        self.number = -1
        self.living, self.asleep = True, False
        first = store.objects[ENTRY.name(0)]
        self.state = RunState.begin(opened(first, 0).header, sha256(first))
        self.num_fragments = self.state.rules.num_fragments
        self.outer = OuterParameters.initial(self.num_fragments)
        self.theta = [value.copy() for value in self.outer.theta]
        zeros = [np.zeros(NUM_ELEMENTS) for _ in self.theta]
        self.progress, self.decoded = zeros, [value.copy() for value in zeros]
        self.step = self.position = 0
        self.sent: list[Sent | None] = [None] * self.num_fragments
        self.num_sent = 0
        self.counted = [(0, 0)] * self.num_fragments
        """Position and step of the last counted send."""
        self.proposal: tuple[int, str, bytes] | None = None
        """Number, nonce and bytes of the entry that this replica tried to write last."""
        if from_index and store.newest_index():
            self.take_index()

    # What a replica does by itself.

    def train(self, parameter: int) -> None:
        self.step += 1
        self.position += 1 + parameter % 3
        for p in range(self.num_fragments):
            update = np.array([parameter % 5 - 2, 1, parameter % 3 - 1], np.float32) / np.float32(8)
            self.theta[p] = self.theta[p] + update
            self.progress[p] += update

    def send(self, p: int, fault: Fault) -> None:
        sent = self.sent[p]
        if sent is None or self.state.refusal(p, sent.payload.contribution):
            if self.step == self.counted[p][1]:
                return
            sent = self.sent[p] = self._encoded(p)
        if not sent.uploaded:
            c = sent.payload.contribution
            self.store.create(f"payloads/{c.replica}/{c.seq:08d}", msgspec.json.encode(sent.payload), fault)
            sent.uploaded = True

    def _encoded(self, p: int) -> Sent:
        values = self.outer.theta[p] - self.theta[p]
        position, step = self.counted[p]
        contribution = Contribution(
            replica=self.number,
            seq=self.num_sent,
            sha256=payload_digest(values),
            base_round=self.state.fragments[p].round,
            tokens=self.position - position,
            steps=self.step - step,
            position=self.position,
            loss=None,
            norm=float(np.linalg.norm(values)),
        )
        self.num_sent += 1
        return Sent(Payload(p, contribution, values.tolist(), (position, self.position)), self.step)

    def decide(self, p: int, fault: Fault, hidden: int) -> None:
        """Append an outer entry, if this replica may; `hidden` is a replica whose payloads it does not see yet."""
        sent = self.sent[p]
        if sent is None or not sent.uploaded:
            return
        here = dict(self._visible(p, hidden)) | {self.number: sent.payload.contribution}
        contributions = may_decide(
            self.state,
            p,
            here,
            self.number,
            overlap_over=self.step >= sent.step + OVERLAP,
            patience_over=self.step >= sent.step + OVERLAP + PATIENCE,
        )
        if contributions is None:
            return
        assert sorted(turns(self.state.previous, here)) == sorted(here)
        before = self.outer.checksums()[p]
        round_ = self.state.fragments[p].round + 1
        self.append(Outer(fragment=p, round=round_, before=before, contributions=contributions), fault)

    def _visible(self, p: int, hidden: int) -> Iterator[tuple[int, Contribution]]:
        for (replica, seq), payload in sorted(self.store.referee.payloads.items()):
            is_there = f"payloads/{replica}/{seq:08d}" in self.store.objects
            if is_there and payload.fragment == p and replica not in (hidden, self.number):
                yield replica, payload.contribution

    def snapshot(self, p: int, fault: Fault) -> None:
        log = self.state.fragments[p]
        if log.round > (log.snapshots[-1].round if log.snapshots else 0):
            content = np.concatenate([self.outer.theta[p], self.outer.velocity[p]]).tobytes()
            name = f"snapshots/{p}/{log.round}-{sha256(content)}"
            self.store.create(name, content, fault)
            self.append(Snapshot(fragment=p, round=log.round, sha256=sha256(content)), fault)

    def write_index(self, fault: Fault) -> None:
        """Write an index, and retire what it makes superfluous."""
        made, name = Index(author=self.number, state=self.state), INDEX.name(self.state.number)
        self.store.create(name, INDEX.seal(made, FakeSigner(self.key)), fault)
        if name == self.store.newest_index():
            for old in retirable(self.state, list(self.store.objects)):
                del self.store.objects[old]

    def append(self, body: Body, fault: Fault) -> None:
        """Try to write the next entry; after a lost answer, the same bytes again while their place is free."""
        number = self.state.number
        if self.proposal is None or self.proposal[0] != number or isinstance(body, Leave):
            author = len(self.state.members) if isinstance(body, Join) else self.number
            entry = new_entry(body, author=author, previous=self.state.previous, keys=self.state.keys)
            self.proposal = (number, entry.nonce, ENTRY.seal(entry, FakeSigner(self.key)))
        self.store.create(ENTRY.name(number), self.proposal[2], fault)

    # What a replica does with the log.

    def follow(self, fault: Fault = Fault.NONE) -> bool:
        """Take the next entry; whether there was one. Who has not joined asks to at the end of the log."""
        data = self.store.objects.get(ENTRY.name(self.state.number))
        if data is None:
            if self.number < 0:
                join = Join(name=self.name, key=self.key, **AMOUNTS)
                if self.state.refusal_of_joiner(join):
                    self.living = False
                else:
                    self.append(join, fault)
            return False
        number = self.state.number
        one = opened(data, number)
        entry = one.header
        assert is_signed(one, self.state.signer(entry))
        before, self.state = self.state, self.state.after(entry, sha256(data))
        is_own = self.proposal is not None and entry.nonce == self.proposal[1]
        if isinstance(entry.body, Outer) and not self._stepped(before, entry.body):
            return True
        if is_own and isinstance(entry.body, Join):
            self._begin(entry.author)
        self.check(number)
        if self.number >= 0 and (self.state.members[self.number].fenced or self.state.members[self.number].left):
            self.living = False
        return True

    def _begin(self, number: int) -> None:
        self.number = number
        self.position = self.state.members[number].start
        self.counted = [(self.position, 0)] * self.num_fragments
        self.theta = [value.copy() for value in self.outer.theta]

    def _stepped(self, before: RunState, body: Outer) -> bool:
        """Apply an outer step; False if its payloads are retired, and the newest index was taken instead."""
        p = body.fragment
        assert body.before == self.outer.checksums()[p], "Θ_p before the step is the author's"
        names = [f"payloads/{c.replica}/{c.seq:08d}" for c in body.contributions]
        if any(name not in self.store.objects for name in names):
            assert self.take_index(), "a payload is retired before there is an index"
            return False
        payloads = [msgspec.json.decode(self.store.objects[name], type=Payload) for name in names]
        old = self.outer.theta[p]
        self.outer.step(before, body, [payload.decoded() for payload in payloads])
        own = next((c.seq for c in body.contributions if c.replica == self.number), -1)
        self._translate(p, old, own)
        return True

    def _translate(self, p: int, old: Vector, counted_seq: int) -> None:
        """θ += Θ_new − Θ_old, and + Δ if the own payload is counted."""
        self.theta[p] = self.theta[p] + (self.outer.theta[p] - old)
        sent = self.sent[p]
        if sent is not None and counted_seq >= sent.payload.contribution.seq:
            assert counted_seq == sent.payload.contribution.seq
            delta = sent.payload.decoded()
            self.theta[p] = self.theta[p] + delta
            self.decoded[p] += delta
            self.counted[p] = (sent.payload.contribution.position, sent.step)
            self.sent[p] = None

    def take_index(self) -> bool:
        """Go on from the newest index, its snapshots and payloads; False if there is none that is newer."""
        name = self.store.newest_index()
        if name is None or int(name[6:]) < self.state.number:
            return False
        number = int(name[6:])
        one = open_index(self.store.objects[name], number)
        made = one.header
        assert is_signed(one, made.state.members[made.author].key)
        assert made.state == self.store.referee.states[number - 1], "an index is the state, exactly"
        old, self.state = self.outer, made.state
        self.outer = OuterParameters.initial(self.num_fragments)
        older = len(self.store.objects) % 2  # either of the last two snapshots will do
        for p, log in enumerate(self.state.fragments):
            for ref in log.snapshots[-1 - older :][:1]:
                content = np.frombuffer(self.store.objects[f"snapshots/{p}/{ref.round}-{ref.sha256}"], np.float32)
                self.outer.theta[p], self.outer.velocity[p] = content[:NUM_ELEMENTS], content[NUM_ELEMENTS:]
            first = log.snapshots[-1 - older :][0].round if log.snapshots else 0
            for ref in log.since:
                if ref.body.round > first:
                    names = [f"payloads/{c.replica}/{c.seq:08d}" for c in ref.body.contributions]
                    payloads = [msgspec.json.decode(self.store.objects[name], type=Payload) for name in names]
                    assert ref.body.before == self.outer.checksums()[p]
                    self.outer.step(self.state, ref.body, [payload.decoded() for payload in payloads])
            if self.number >= 0:
                self._translate(p, old.theta[p], log.last_seq.get(self.number, -1))
        if self.number >= 0 and (self.state.members[self.number].fenced or self.state.members[self.number].left):
            self.living = False
        else:
            self.check(number - 1)
        return True

    def check(self, number: int) -> None:
        """Θ is the offline replay's; counted and uncounted work and own progress add up to nothing."""
        assert self.outer.checksums() == self.store.referee.checksums[number], "Θ is the offline replay's"
        assert self.state == self.store.referee.states[number]
        if self.number >= 0:
            for p in range(self.num_fragments):
                total = self.decoded[p] + (self.outer.theta[p] - self.theta[p]) + self.progress[p]
                assert np.abs(total).max() < 1e-3, "an inner step was lost, or counted twice"
