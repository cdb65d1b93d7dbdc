"""The log's state machine: what all replicas know after the same entries. No I/O, no clock, no tensors.

    RunState(0 … k) = RunState(0 … k−1).after(entry k)

A replica is *active* if it has joined, or contributed to an outer step, within the last 2P outer entries, and has
neither left nor been fenced by a later join of its name.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from diloco.errors import UserError
from diloco.reduction.cohort import Cohort
from diloco.rendezvous.entries import (
    FORMAT,
    Checksum,
    Contribution,
    Create,
    Digest,
    Entry,
    Join,
    Key,
    Keys,
    Leave,
    LogError,
    Name,
    Norm,
    Outer,
    Rules,
    Snapshot,
)
from diloco.schema import Count

MOST_REPLICAS = (1 << 16) - 2
"""Numbers of replicas that codecs can tell apart."""
_NORMS = 64
"""Norms of which the running median is taken."""
_FEWEST_NORMS = 8
"""With fewer, no norm is refused."""


class FencedError(UserError):
    """Another process has joined under this replica's name."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica that has joined."""

    name: Name
    key: Key
    slot: Count
    """Its part of the text."""
    start: Count
    """Where in the slot it began, in tokens."""
    joined: Count
    """Outer entries before its join."""
    last_outer: Count
    """Outer entries up to its last contribution, or its join."""
    tokens: Count = 0
    """Counted, over all fragments: P times those of whole rounds."""
    steps: Count = 0
    left: bool = False
    fenced: bool = False


@dataclass(frozen=True, kw_only=True)
class SnapshotRef:
    """A snapshot in the store."""

    round: Count
    number: Count
    """Of its entry."""
    sha256: tuple[Digest, ...]


@dataclass(frozen=True, kw_only=True)
class OuterRef:
    """An outer entry that may still have to be replayed."""

    number: Count
    body: Outer


@dataclass(frozen=True, kw_only=True)
class FragmentLog:
    """What the log says of one fragment."""

    round: Count = 0
    """Outer steps."""
    before: tuple[Checksum, ...] = ()
    """Checksums of Θ_p before the last rounds, the newest last: before[-1] is that of round − 1."""
    norms: tuple[Norm, ...] = ()
    last_seq: dict[Count, Count] = field(default_factory=dict)
    """The newest payload of each replica that was counted."""
    snapshots: tuple[SnapshotRef, ...] = ()
    """The last two."""
    since: tuple[OuterRef, ...] = ()
    """The outer entries since the first of them."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What the entries 0 … k−1 say; JSON by msgspec, so that an index can be kept of it."""

    number: Count
    """k, the number of the next entry."""
    previous: Digest
    """SHA-256 of entry k−1."""
    run: Digest
    """SHA-256 of entry 0, which names the run."""
    rules: Rules
    creator: Key
    allowed: tuple[Key, ...]
    """Keys that may join, revoked ones taken out."""
    kept: tuple[Count, ...] = ()
    """Entries that changed the allow-list; like entry 0, they are never retired."""
    members: tuple[Member, ...] = ()
    """By number."""
    positions: dict[Count, Count] = field(default_factory=dict)
    """Where each slot of the text stands, in tokens."""
    fragments: tuple[FragmentLog, ...]
    num_outer: Count = 0
    """Outer entries."""
    tokens: Count = 0
    """Tokens of all contributions."""
    finished: bool = False
    """Whether a replica has left because the token budget was spent."""

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

    def is_active(self, replica: int) -> bool:
        """Whether decisions wait for a replica."""
        member = self.members[replica]
        if member.left or member.fenced:
            return False
        return self.rules.quorum == "all" or self.num_outer - member.last_outer < 2 * self.rules.num_fragments

    @property
    def active(self) -> tuple[int, ...]:
        """The active replicas."""
        return tuple(replica for replica in range(len(self.members)) if self.is_active(replica))

    def free_slot(self, name: str) -> int | None:
        """The slot that a joiner gets: that of its name's last process, or the lowest that nobody active holds."""
        held = {self.members[replica].slot: self.members[replica].name for replica in self.active}
        own = [member.slot for member in self.members if member.name == name]
        free = (slot for slot in (*own[-1:], *range(self.rules.num_slots)) if held.get(slot, name) == name)
        return next(free, None)

    def refusal(self, fragment: int, contribution: Contribution) -> str | None:
        """Why a payload can't enter the fragment's next outer step; None if it can."""
        log, replica = self.fragments[fragment], contribution.replica
        if replica >= len(self.members) or self.members[replica].fenced:
            return f"replica {replica} has not joined, or was replaced"
        if contribution.seq <= log.last_seq.get(replica, -1):
            return f"payload {contribution.seq} of replica {replica} was counted already, or one after it"
        if contribution.base_round > log.round:
            return f"round {contribution.base_round} is still to come"
        if contribution.base_round < log.round - self.rules.max_stale:
            return f"it was made against round {contribution.base_round}, and this is round {log.round}"
        if len(log.norms) >= _FEWEST_NORMS:
            most = self.rules.norm_bound * statistics.median(log.norms)
            if contribution.norm > most:
                return f"its norm is {contribution.norm:.4g}, more than {most:.4g}"
        return None

    def cohort(self, contributions: Iterable[Contribution]) -> Cohort:
        """The replicas of an outer step, with their weights."""
        squared = self.rules.weights == "tokens_squared_per_step"
        return Cohort.weighted({c.replica: c.tokens**2 / c.steps if squared else c.tokens for c in contributions})

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
        fenced = (replace(m, fenced=True) if m.name == body.name else m for m in self.members)
        start = self.positions.get(slot, 0)
        joined = self.num_outer
        member = Member(name=body.name, key=body.key, slot=slot, start=start, joined=joined, last_outer=joined)
        return replace(self, members=(*fenced, member))

    def refusal_of_joiner(self, body: Join) -> str | None:
        """Why a replica can't join; None if it can."""
        if self.finished:
            return "joins a run that has ended"
        if self.creator and body.key not in self.allowed:
            return f"joins {body.name} with a key that is not on the run's allow-list"
        if not self.creator and body.key:
            return f"joins {body.name} with a key, in a run without keys"
        if any(member.name == body.name and member.key != body.key for member in self.members):
            return f"joins {body.name} with another key than that of the replica which had the name before"
        if self.free_slot(body.name) is None:
            return f"joins {body.name}, and all {self.rules.num_slots} slots of the text are taken"
        return f"joins after {MOST_REPLICAS} others" if len(self.members) >= MOST_REPLICAS else None

    def _rekeyed(self, entry: Entry, body: Keys) -> "RunState":
        if entry.author != -1 or not self.creator:
            self._refuse("changes the allow-list, which the creator of a run with keys alone may do")
        allowed = [key for key in dict.fromkeys((*self.allowed, *body.allowed)) if key not in body.revoked]
        members = (replace(m, left=True) if m.key in body.revoked else m for m in self.members)
        return replace(self, allowed=tuple(allowed), members=tuple(members), kept=(*self.kept, self.number))

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
        if self.rules.quorum == "all" and (missing or len(self.members) < self.rules.num_replicas):
            self._refuse(f"leaves out replicas {missing}, and the quorum is all")
        since = OuterRef(number=self.number, body=body)
        log = replace(
            log,
            round=body.round,
            before=(*log.before, body.before)[-self.rules.max_stale - 1 :],
            norms=(*log.norms, *(c.norm for c in body.contributions))[-_NORMS:],
            last_seq=log.last_seq | {c.replica: c.seq for c in body.contributions},
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


def may_decide(
    state: RunState,
    fragment: int,
    here: Mapping[int, Contribution],
    own: int,
    *,
    overlap_over: bool,
    patience_over: bool,
) -> tuple[Contribution, ...] | None:
    """The contributions of the fragment's next outer entry, if this replica may write it now; None if not yet.

    Args:
        state: after all entries.
        fragment: p.
        here: for each replica its newest payload of the fragment that was verified here.
        own: this replica.
        overlap_over: whether τ own inner steps have passed since its own send.
        patience_over: whether τ + patience have.
    """
    usable = [here[replica] for replica in sorted(here) if state.refusal(fragment, here[replica]) is None]
    replicas = {contribution.replica for contribution in usable}
    if own not in replicas or len(state.members) < state.rules.num_replicas:
        return None
    active = state.active
    is_whole = replicas.issuperset(active)
    is_majority = 2 * len(replicas.intersection(active)) > len(active)
    if is_whole or (state.rules.quorum == "majority" and (patience_over or (overlap_over and is_majority))):
        return tuple(usable)
    return None
