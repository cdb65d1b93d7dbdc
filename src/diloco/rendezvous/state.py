"""The records that all replicas keep after the same entries, and the questions that one can ask of them.

A replica is *active* if it has joined, or contributed to an outer step, within the last 2P outer entries, and has
neither left nor been fenced.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco.reduction.cohort import Cohort
from diloco.rendezvous.entries import (
    MOST_REPLICAS,
    Checksum,
    Contribution,
    Digest,
    Join,
    Key,
    Name,
    Norm,
    Outer,
    Rules,
)
from diloco.schema import Count

_MOST_TOKENS = 1 << 40
"""Largest number of tokens, or steps, of one contribution."""
MOST_NORMS = 64
"""Norms of which the running median is taken."""
_FEWEST_NORMS = 8
"""Norms that there must be before one is refused."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica that has joined."""

    name: Name
    key: Key
    slot: Count
    """The replica's part of the text."""
    start: Count
    """The replica's first token in the slot."""
    joined: Count
    """Outer entries before its join."""
    last_outer: Count
    """Outer entries up to its last contribution, or its join."""
    tokens: Count = 0
    """Counted tokens, over all fragments: P times those of whole rounds."""
    steps: Count = 0
    left: bool = False
    """True once the replica has left: nobody waits for it, and its uploads still count."""
    fenced: bool = False
    """True once its name or slot went to a later joiner, or its key was revoked: its payloads count no more."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRef:
    """A snapshot in the store."""

    round: Count
    number: Count
    """The number of its entry."""
    sha256: tuple[Digest, ...]


@dataclass(frozen=True, kw_only=True)
class OuterRef:
    """An outer entry that may still have to be replayed."""

    number: Count
    body: Outer


@dataclass(frozen=True, kw_only=True)
class FragmentLog:
    """The bookkeeping of one fragment."""

    round: Count = 0
    """Outer steps."""
    before: tuple[Checksum, ...] = ()
    """Digests of Θ_p before the last rounds, the newest last: before[-1] is that of round − 1."""
    norms: tuple[Norm, ...] = ()
    last_seq: dict[Count, Count] = field(default_factory=dict)
    """The newest payload that was counted, of each replica that is not fenced."""
    last_round: dict[Count, Count] = field(default_factory=dict)
    """For each slot the newest round that counted a replica which held it."""
    snapshots: tuple[SnapshotRef, ...] = ()
    """The last two snapshots."""
    since: tuple[OuterRef, ...] = ()
    """The outer entries since the older of the two snapshots."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The bookkeeping of the entries 0 … k−1."""

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
    """Entries that changed the allow-list: who starts from an index reads them, since the creator alone may."""
    members: tuple[Member, ...] = ()
    """The members by number."""
    positions: dict[Count, Count] = field(default_factory=dict)
    """The place that is reached in each slot of the text, in tokens."""
    fragments: tuple[FragmentLog, ...]
    num_outer: Count = 0
    """Outer entries."""
    tokens: Count = 0
    """Tokens of all contributions."""
    finished: bool = False
    """Whether a replica has left because the token budget was spent."""

    @property
    def keys(self) -> int:
        """Number of the newest entry that changes the allow-list; 0 if none does."""
        return self.kept[-1] if self.kept else 0

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

    @property
    def names(self) -> frozenset[str]:
        """The names of all replicas that have joined."""
        return frozenset(member.name for member in self.members)

    @property
    def present(self) -> frozenset[str]:
        """The names of the replicas that have joined and not left."""
        return frozenset(member.name for member in self.members if not (member.left or member.fenced))

    @property
    def is_complete(self) -> bool:
        """Whether so many replicas have joined that the first inner step may be taken; a name counts once."""
        return len(self.names) >= self.rules.num_replicas

    def free_slot(self, name: str) -> int | None:
        """The slot that a joiner gets; None if active replicas hold all.

        Its name's last slot; or the lowest that nobody holds; or the lowest whose holder has left; or whose holder
        is not active. Who held it is fenced by the join, so that what it still uploads can't be counted beside
        the text that the joiner reads again.
        """
        holders = {member.slot: replica for replica, member in enumerate(self.members) if not member.fenced}

        def rank(slot: int) -> int:
            holder = holders.get(slot)
            if holder is None or self.members[holder].name == name:
                return 0
            return 1 if self.members[holder].left else 3 if self.is_active(holder) else 2

        own = [member.slot for member in self.members if member.name == name]
        if own and rank(own[-1]) == 0:
            return own[-1]
        slot = min(range(self.rules.num_slots), key=rank)
        return slot if rank(slot) < 3 else None

    def refusal(self, fragment: int, contribution: Contribution) -> str | None:
        """The reason why a payload can't enter the fragment's next outer step; None if it can"""
        log, replica = self.fragments[fragment], contribution.replica
        if replica >= len(self.members) or self.members[replica].fenced:
            return f"replica {replica} has not joined, or was replaced"
        is_counted = any(contribution.seq == other.last_seq.get(replica) for other in self.fragments)
        if is_counted or contribution.seq <= log.last_seq.get(replica, -1):
            return f"payload {contribution.seq} of replica {replica} was counted already, or one after it"
        if contribution.base_round > log.round:
            return f"round {contribution.base_round} is still to come"
        if contribution.base_round < log.round - self.rules.max_stale:
            return f"it was made against round {contribution.base_round}, and this is round {log.round}"
        return self._refusal_of_amounts(contribution) or self.refusal_of_norm(fragment, contribution.norm)

    def _refusal_of_amounts(self, contribution: Contribution) -> str | None:
        """The reason why the tokens can't be true: sums must fit 64 bits whatever an entry says."""
        member = self.members[contribution.replica]
        most = max(self.positions.get(member.slot, 0), member.start) + _MOST_TOKENS
        if not member.start <= contribution.position <= most:
            return f"position {contribution.position} is not in the text from {member.start} to {most}"
        if max(contribution.tokens, contribution.steps) > _MOST_TOKENS:
            return f"no replica reads {contribution.tokens} tokens in {contribution.steps} steps between two sends"
        if max(self.tokens, member.steps) > _MOST_TOKENS << 20:
            return "the run has counted more tokens or steps than can be written down"
        return None

    def refusal_of_norm(self, fragment: int, norm: float) -> str | None:
        """The reason why a norm is out of bounds; with quorum "all" none is, since nobody can be left out."""
        norms = self.fragments[fragment].norms
        if self.rules.quorum == "all" or len(norms) < _FEWEST_NORMS:
            return None
        most = self.rules.norm_bound * statistics.median(norms)
        return f"its norm is {norm:.4g}, more than {most:.4g}" if 0 < most < norm else None

    def has_snapshot(self, fragment: int, round: int) -> bool:
        """Whether there is a snapshot of a fragment after a round, the same round included."""
        refs = self.fragments[fragment].snapshots
        return bool(refs) and refs[-1].round >= round

    def cohort(self, contributions: Iterable[Contribution]) -> Cohort:
        """The replicas of an outer step, with their weights."""
        squared = self.rules.weights == "tokens_squared_per_step"
        return Cohort.weighted({c.replica: c.tokens**2 / c.steps if squared else c.tokens for c in contributions})

    def refusal_of_joiner(self, body: Join) -> str | None:
        """The reason why a replica can't join; None if it can."""
        if self.finished:
            return "joins a run that has ended"
        if self.creator and body.key not in self.allowed:
            return f"joins {body.name} with a key that is not on the run's allow-list"
        if not self.creator and body.key:
            return f"joins {body.name} with a key, in a run without keys"
        others = (m.key for m in self.members if m.name == body.name and m.key != body.key)
        if any(key in self.allowed for key in others):
            return f"joins {body.name} with another key than that of the replica which had the name before"
        if self.free_slot(body.name) is None:
            return f"joins {body.name}, and all {self.rules.num_slots} slots of the text are taken"
        return f"joins after {MOST_REPLICAS} others" if len(self.members) >= MOST_REPLICAS else None
