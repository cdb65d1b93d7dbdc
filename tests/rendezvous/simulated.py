"""Replicas that come and go by a schedule: a string of bytes that Hypothesis draws."""

from contextlib import suppress
from dataclasses import dataclass, field

from tests.rendezvous.referee import (
    FakeSigner,
    FakeStore,
    Fault,
    NoAnswerError,
    Referee,
    public_key,
)
from tests.rendezvous.replica import OVERLAP, PATIENCE, Replica

from diloco.rendezvous.log.entries import FORMAT, Close, Create, Keys, Leave, Rules
from diloco.rendezvous.log.log import ENTRY, sealed_entry

FAULTS = (*(Fault.NONE,) * 5, Fault.LOST, Fault.ANSWER_LOST, Fault.LATE)


@dataclass
class Run:
    """A schedule of replicas that come and go."""

    rules: Rules
    keyed: bool
    names: tuple[str, ...] = ("a", "b", "c", "d", "e")
    replicas: list[Replica] = field(default_factory=list)
    referee: Referee = field(default_factory=Referee)

    def __post_init__(self) -> None:
        self.store = FakeStore(self.referee)
        self.creator = public_key("creator") if self.keyed else ""
        allowed = tuple(map(public_key, self.names)) if self.keyed else ()
        body = Create(format=FORMAT, rules=self.rules, facts={"H": 4}, creator=self.creator, allowed=allowed)
        self._admit(body)

    def _admit(self, body: Create | Keys, *, previous: str = "", keys: int = 0) -> None:
        """Write an entry of the run's creator, who never loses a race here."""
        data = sealed_entry(body, FakeSigner(self.creator), author=-1, previous=previous, keys=keys)
        self.store.create(ENTRY.name(len(self.referee.states)), data, Fault.NONE)

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.living]

    def start(self, name: str, *, from_index: bool) -> None:
        key = public_key(name) if self.keyed else ""
        self.replicas.append(Replica(name, self.store, key=key, from_index=from_index))

    def act(self, actor: int, action: int, parameter: int) -> None:
        """Let one replica do one thing; the highest actions start, kill and stop replicas."""
        awake = [replica for replica in self.living if not replica.asleep]
        fault = FAULTS[(actor // 16 + parameter) % len(FAULTS)]
        if action >= 249 or not self.living:
            self.start(self.names[parameter % len(self.names)], from_index=actor % 2 == 0)
        elif action >= 245:
            if self.keyed:
                self._rekey(self.names[parameter % len(self.names)], is_revoked=actor % 3 == 0)
        elif 236 <= action < 241 or not awake:
            for replica in self.living:
                replica.asleep = False
        else:
            with suppress(NoAnswerError):
                self._act(awake[actor % len(awake)], action, parameter, fault)

    def _act(self, replica: Replica, action: int, parameter: int, fault: Fault) -> None:
        p = parameter % self.rules.num_fragments
        if action < 60 or replica.number < 0:
            for _ in range(1 + parameter % 4):
                replica.follow(fault)
        elif action < 85:
            replica.train(parameter)
        elif action < 110:
            replica.send(p, fault)
        elif action < 140:
            replica.decide(p, fault, hidden=parameter // 8 % 8)
        elif action < 185:
            for _ in range(OVERLAP + PATIENCE):
                replica.train(parameter)
            replica.send(p, Fault.NONE)
            while replica.living and replica.follow():
                pass
            if replica.living:
                replica.decide(p, fault, hidden=parameter // 8 % 8)
        elif action < 205:
            replica.snapshot(p, fault)
        elif action < 218:
            replica.write_index(fault)
        elif action < 226:
            self.store.deliver(parameter)
        elif action < 230:
            replica.living = False
        elif action < 236:
            replica.asleep = True
        elif action >= 242:
            replica.append(Leave(finished=parameter >= 224), fault)

    def _rekey(self, name: str, *, is_revoked: bool) -> None:
        keys = (public_key(name),)
        body = Keys(revoked=keys) if is_revoked else Keys(allowed=keys)
        self._admit(body, previous=self.referee.state.previous, keys=self.referee.state.keys)

    def finish(self) -> None:
        """Let the log grow, and close the run if somebody has said that the token budget is spent."""
        self._grow()
        state = self.referee.state
        left = [number for number, member in enumerate(state.members) if member.left and not member.fenced]
        closers = [replica for replica in self.replicas if replica.number in left]
        if not state.finished or not closers:
            return
        closer = closers[-1]
        while closer.follow():
            pass
        closer.append(Close(outer=closer.outer.checksums()), Fault.NONE)
        self._catch_up()
        for replica in self.living:
            assert replica.outer.checksums() == self.referee.state.closed, "all have the Θ of the run's end"
            replica.train(1)
            for p in range(self.rules.num_fragments):
                replica.send(p, Fault.NONE)
                replica.decide(p, Fault.NONE, hidden=-1)
        assert self.referee.state.number == state.number + 1, "nothing follows"

    def _grow(self) -> None:
        """Without faults from here on: late requests arrive, and the log grows while there is a replica."""
        while self.store.late:
            self.store.deliver(0)
        self._catch_up()
        for replica in self.living:
            replica.proposal = None  # a lost request to leave is not repeated
        members = self.referee.state.members
        missing = {members[replica].name for replica in self.referee.state.active} - {r.name for r in self.living}
        if self.rules.quorum != "majority" or not self.living:
            names = set(self.names[: self.rules.num_replicas]) | missing
            for name in sorted(names - {replica.name for replica in self.living}):
                self.start(name, from_index=True)
            self._catch_up()
        state = self.referee.state
        if not self.living or not state.is_complete:
            assert self.keyed or not state.is_complete, "nobody can join"
            return
        for _ in range(2 * (OVERLAP + PATIENCE + 2)):
            for replica in self.living:
                replica.train(1)
                for p in range(self.rules.num_fragments):
                    replica.send(p, Fault.NONE)
                    replica.decide(p, Fault.NONE, hidden=-1)
                    self._catch_up()
        grown = zip(self.referee.state.fragments, state.fragments, strict=True)
        assert all(now.round > before.round for now, before in grown), "the log grows"

    def _catch_up(self) -> None:
        for _ in range(2):
            for replica in self.living:
                while replica.living and (replica.follow() or replica.number < 0):
                    pass


def simulate(schedule: bytes) -> Run:
    """A run whose rules are the first bytes of the schedule, and whose actions are the others, by three."""
    head, rest = schedule[:6], schedule[6:]
    rules = Rules(
        num_fragments=1 + head[0] % 3,
        quorum=("all", 1, 2, 3)[head[1] % 4] if head[1] % 8 < 4 else "majority",
        num_replicas=1 + head[2] % 3,
        max_stale=head[3] % 4,
        norm_bound=1e30,
        num_slots=2 + head[4] % 4,
    )
    run = Run(rules, keyed=head[5] % 3 == 0)
    for name in run.names[: 1 + head[5] % 4]:
        run.start(name, from_index=False)
    for at in range(0, len(rest) - 2, 3):
        run.act(*rest[at : at + 3])
    run.finish()
    return run
