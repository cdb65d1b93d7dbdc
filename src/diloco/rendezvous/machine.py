"""The log's state machine. No I/O, no clock, no tensors.

RunState(0 … k) = RunState(0 … k−1).after(entry k)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from diloco.errors import UserError
from diloco.rendezvous.entries import (
    FORMAT,
    Contribution,
    Create,
    Entry,
    Join,
    Keys,
    Leave,
    LogError,
    Outer,
    Snapshot,
)
from diloco.rendezvous.state import MOST_NORMS, FragmentLog, Member, OuterRef, RunRecord, SnapshotRef


class FencedError(UserError):
    """Another process has joined under this replica's name or got its slot of the text, or its key was revoked."""


@dataclass(frozen=True, kw_only=True)
class RunState(RunRecord):
    """The bookkeeping of the entries 0 … k−1, and the step to that of one more."""

    @classmethod
    def begin(cls, entry: Entry, digest: str) -> "RunState":
        """The state after entry 0.

        Raises:
            LogError: if it does not create a run.
        """
        body = entry.body
        if not isinstance(body, Create) or entry.author != -1 or entry.previous:
            raise LogError("entry 0 of the log does not create a run: this is not the directory of a run")
        if body.format != FORMAT:
            raise LogError(
                f"the log is of format {body.format}, and this diloco reads format {FORMAT}: install the same "
                "version of diloco on all replicas"
            )
        if body.allowed and not body.creator:
            raise LogError("entry 0 of the log lists keys that may join, and is not signed")
        return cls(
            number=1,
            previous=digest,
            run=digest,
            rules=body.rules,
            creator=body.creator,
            allowed=body.allowed,
            fragments=tuple(FragmentLog() for _ in range(body.rules.num_fragments)),
        )

    def after(self, entry: Entry, digest: str) -> "RunState":
        """The state after one more entry, whose signature was checked against `signer(entry)`.

        Raises:
            LogError: naming the entry, if it is not valid here.
        """
        if entry.previous != self.previous:
            self._refuse("does not follow the entry before it: the log was changed")
        if entry.keys != self.keys:
            self._refuse(f"names entry {entry.keys} as the newest change of the allow-list, and it is {self.keys}")
        body = entry.body
        if isinstance(body, Join):
            state = self._joined(entry, body)
        elif isinstance(body, Keys):
            state = self._rekeyed(entry, body)
        elif isinstance(body, Create):
            self._refuse("creates a run a second time")
        else:
            self._check_author(entry.author)
            if isinstance(body, Outer):
                state = self._stepped(entry.author, body)
            elif isinstance(body, Snapshot):
                state = self._snapped(body)
            else:
                state = self._left(entry.author, body)
        return replace(state, number=self.number + 1, previous=digest)

    def signer(self, entry: Entry) -> str:
        """The public key that must have signed an entry; empty in a run without keys."""
        if isinstance(entry.body, Join):
            return entry.body.key
        if entry.author == -1:
            return self.creator
        self._check_author(entry.author)
        return self.members[entry.author].key

    def check_goes_on(self, own: int, entry: Entry) -> None:
        """Check that a replica is still in the run after an entry, which was written after its join.

        Raises:
            FencedError: if the entry ends it: another has its name or its slot, or its key was revoked.
        """
        body, member = entry.body, self.members[own]
        if isinstance(body, Keys) and member.key in body.revoked:
            raise FencedError(f"the key of {member.name} was revoked by the run's creator: this replica ends")
        if isinstance(body, Join) and body.name == member.name:
            raise FencedError(
                f"another process has joined the run as {member.name}, and goes on in the place of this one: end "
                "it, or give each replica a name of its own"
            )
        if isinstance(body, Join) and self.members[entry.author].slot == member.slot:
            raise FencedError(
                f"{member.name} was in no outer step for long, and its slot of the text was given to {body.name}: "
                "start this replica again, and it gets another"
            )

    def _refuse(self, reason: str) -> NoReturn:
        raise LogError(f"entry {self.number} of the log {reason}")

    def _check_author(self, author: int) -> None:
        if not 0 <= author < len(self.members):
            self._refuse(f"is by replica {author}, which has not joined")
        if self.members[author].left or self.members[author].fenced:
            self._refuse(f"is by replica {author}, which has left, or was replaced")

    def _joined(self, entry: Entry, body: Join) -> "RunState":
        if entry.author != len(self.members):
            self._refuse(f"joins as replica {entry.author}, and the next number is {len(self.members)}")
        if reason := self.refusal_of_joiner(body):
            self._refuse(reason)
        slot = self.free_slot(body.name)
        assert slot is not None, "refusal_of_joiner has looked"
        state = self._fencing(m.name == body.name or m.slot == slot for m in self.members)
        start = self.positions.get(slot, 0)
        joined = self.num_outer
        member = Member(name=body.name, key=body.key, slot=slot, start=start, joined=joined, last_outer=joined)
        return replace(state, members=(*state.members, member))

    def _fencing(self, are_fenced: Iterable[bool]) -> "RunState":
        """The state with more replicas fenced, from a bool for each."""
        members = tuple(
            replace(m, fenced=True) if is_fenced else m
            for m, is_fenced in zip(self.members, are_fenced, strict=True)
        )
        fragments = (
            replace(log, last_seq={r: seq for r, seq in log.last_seq.items() if not members[r].fenced})
            for log in self.fragments
        )
        return replace(self, members=members, fragments=tuple(fragments))

    def _rekeyed(self, entry: Entry, body: Keys) -> "RunState":
        if entry.author != -1 or not self.creator:
            self._refuse("changes the allow-list, which the creator of a run with keys alone may do")
        allowed = [key for key in dict.fromkeys((*self.allowed, *body.allowed)) if key not in body.revoked]
        state = self._fencing(m.key in body.revoked for m in self.members)
        return replace(state, allowed=tuple(allowed), kept=(*self.kept, self.number))

    def _left(self, author: int, body: Leave) -> "RunState":
        members = (replace(m, left=True) if i == author else m for i, m in enumerate(self.members))
        return replace(self, members=tuple(members), finished=self.finished or body.finished)

    def _stepped(self, author: int, body: Outer) -> "RunState":
        if body.fragment >= len(self.fragments):
            self._refuse(f"steps fragment {body.fragment}, and there are {len(self.fragments)}")
        log, replicas = self.fragments[body.fragment], [c.replica for c in body.contributions]
        if body.round != log.round + 1:
            self._refuse(f"is round {body.round} of fragment {body.fragment}, and the next is {log.round + 1}")
        if replicas != sorted(set(replicas)) or author not in replicas:
            self._refuse("does not list its contributions by replica, its author's among them, each once")
        for contribution in body.contributions:
            if reason := self.refusal(body.fragment, contribution):
                self._refuse(f"counts payload {contribution.seq} of replica {contribution.replica}, but {reason}")
        missing = [replica for replica in self.active if replica not in replicas]
        if not self.is_complete:
            self._refuse(f"steps before {self.rules.num_replicas} replicas have joined")
        if self.rules.quorum == "all" and missing:
            self._refuse(f"leaves out replicas {missing}, and the quorum is all")
        since = OuterRef(number=self.number, body=body)
        log = replace(
            log,
            round=body.round,
            before=(*log.before, body.before)[-self.rules.max_stale - 1 :],
            norms=(*log.norms, *(c.norm for c in body.contributions))[-MOST_NORMS:],
            last_seq=log.last_seq | {c.replica: c.seq for c in body.contributions},
            last_round=log.last_round | {self.members[replica].slot: body.round for replica in replicas},
            since=(*log.since, since),
        )
        return self._with(body.fragment, log)._counted(body.contributions)

    def _counted(self, contributions: Iterable[Contribution]) -> "RunState":
        """The state with the contributions of its newest outer entry counted to their replicas."""
        members, positions, tokens = list(self.members), dict(self.positions), self.tokens
        for c in contributions:
            member = members[c.replica]
            members[c.replica] = replace(
                member,
                last_outer=self.num_outer + 1,
                tokens=member.tokens + c.tokens,
                steps=member.steps + c.steps,
            )
            positions[member.slot] = max(positions.get(member.slot, 0), c.position)
            tokens += c.tokens
        return replace(
            self, members=tuple(members), positions=positions, tokens=tokens, num_outer=self.num_outer + 1
        )

    def _snapped(self, body: Snapshot) -> "RunState":
        if body.fragment >= len(self.fragments):
            self._refuse(f"is a snapshot of fragment {body.fragment}, and there are {len(self.fragments)}")
        log = self.fragments[body.fragment]
        newest = log.snapshots[-1].round if log.snapshots else 0
        if not newest < body.round <= log.round:
            self._refuse(
                f"is a snapshot of round {body.round}, and the newest is of round {newest} of {log.round}"
            )
        snapshot = SnapshotRef(round=body.round, number=self.number, sha256=body.sha256)
        snapshots = (*log.snapshots, snapshot)[-2:]
        first = snapshots[0].round if len(snapshots) == 2 else 0
        since = tuple(ref for ref in log.since if ref.body.round > first)
        return self._with(body.fragment, replace(log, snapshots=snapshots, since=since))

    def _with(self, fragment: int, log: FragmentLog) -> "RunState":
        fragments = (log if p == fragment else other for p, other in enumerate(self.fragments))
        return replace(self, fragments=tuple(fragments))
