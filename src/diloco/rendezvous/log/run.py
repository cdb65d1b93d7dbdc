"""The state of a run: a pure function of its log."""

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, NoReturn

import msgspec

from diloco.errors import UserError
from diloco.outer.cohort import Cohort, amount_of
from diloco.rendezvous.log.entries import (
    FORMAT,
    MOST_REPLICAS,
    Body,
    Checksum,
    Close,
    Contribution,
    Create,
    Digest,
    Entry,
    Join,
    Keys,
    Leave,
    LogError,
    Norm,
    Outer,
    Positive,
    PublicKey,
    Quorum,
    Rules,
    Snapshot,
)
from diloco.schema import Count, Name

MOST_TOKENS = 1 << 40
"""The most tokens that a replica may declare for one contribution."""
_MOST_NORMS = 64
"""Norms of which the running median is taken."""
_FEWEST_NORMS = 8
"""Norms that there must be before one is refused."""
_MOST_SHIFTS = 1000
"""Rounds that are remembered beyond max_stale, should they be shifts."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica that has joined."""

    name: Name
    key: PublicKey
    step_tokens: Positive
    """The most tokens that one of its inner steps reads, as it has declared."""
    most_steps: Positive
    """The most inner steps between two of its sends of a fragment that are counted, as it has declared."""
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
    sha256: Digest


@dataclass(frozen=True, kw_only=True)
class OuterRef:
    """An outer entry that may still have to be replayed."""

    number: Count
    body: Outer
    is_new: bool = False
    """As in `Cohort`."""


@dataclass(frozen=True, kw_only=True)
class FragmentLog:
    """The bookkeeping of one fragment."""

    round: Count = 0
    """Outer steps, shifts included."""
    num_shifts: Count = 0
    """The outer steps that were shifts."""
    averages: tuple[Positive, ...] = ()
    """The last rounds that were no shifts, max_stale + 1 of them at the most."""
    before: tuple[Checksum, ...] = ()
    """Digests of Θ_p before the last rounds, the newest last: before[-1] is that of round − 1."""
    norms: tuple[Norm, ...] = ()
    last_seq: dict[Count, Count] = field(default_factory=dict)
    """The newest payload that was counted, of each replica that is not fenced."""
    last_round: dict[Count, Count] = field(default_factory=dict)
    """For each slot the newest round that counted a replica which held it."""
    active: tuple[Count, ...] = ()
    """The slots of the replicas that were active at the first outer step, or once by half others were, sorted."""
    snapshots: tuple[SnapshotRef, ...] = ()
    """The last two snapshots."""
    since: tuple[OuterRef, ...] = ()
    """The outer entries since the older of the two snapshots."""

    @property
    def newest(self) -> int:
        """The newest round that was no shift: a payload against Θ_p of this or a later round is up to date."""
        return self.averages[-1] if self.averages else 0

    def oldest_base(self, max_stale: int) -> int:
        """The least base round of a payload that may be counted: shifts make none stale."""
        oldest = self.averages[0] if len(self.averages) > max_stale else 0
        return max(oldest, self.round - len(self.before))

    def stepped(self, body: Outer, max_stale: int, *, is_shift: bool) -> "FragmentLog":
        """The rounds and digests after one more outer step."""
        averages = self.averages if is_shift else (*self.averages, body.round)[-max_stale - 1 :]
        log = replace(self, round=body.round, averages=averages, before=(*self.before, body.before))
        log = replace(log, num_shifts=self.num_shifts + is_shift)
        num_kept = 1 + min(log.round - log.oldest_base(max_stale), max_stale + _MOST_SHIFTS)
        return replace(log, before=log.before[-num_kept:])

    @property
    def bases(self) -> dict[int, Checksum]:
        """Digests of Θ_p by round, of the last rounds but the newest."""
        return {self.round - back: base for back, base in enumerate(reversed(self.before), 1)}


@dataclass(frozen=True, kw_only=True)
class Written:
    """Entries that were written while the same number of replicas was active."""

    outer_steps: Count = 0
    contributions: Count = 0
    """Payloads that these outer steps counted."""
    others: Count = 0
    """Other entries, but for entry 0."""


LOSS_TAIL = 20
"""The training loss of a run is the mean over the last 1/20 of its steps."""
_MOST_PARTS = 256
_LossSum = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The training losses that contributions tell, added up over at most `_MOST_PARTS` equal parts of the run."""

    every: Positive = 1
    """Outer steps of a part; the last part may have fewer."""
    parts: tuple[tuple[_LossSum, Count], ...] = ()
    """For each part the sum of its losses, and their number."""

    def plus(self, losses: Sequence[float], num_outer: int) -> "Losses":
        """These losses, and those of the outer step after the first `num_outer`."""
        every, parts = self.every, list(self.parts)
        if num_outer == every * _MOST_PARTS:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            every, parts = 2 * every, [(a + c, b + d) for (a, b), (c, d) in pairs]
        total, count = parts.pop() if num_outer % every else (0.0, 0)
        return Losses(every=every, parts=(*parts, (total + sum(losses), count + len(losses))))

    def fit(self, num_outer: int) -> bool:
        """True if these can be the losses of a number of outer steps."""
        return len(self.parts) == -(-num_outer // self.every) <= _MOST_PARTS

    def curve(self, num_outer: int) -> tuple[tuple[int, float], ...]:
        """The mean of each part that tells a loss, after the outer steps up to it."""
        ends = (min(num_outer, self.every * number) for number in range(1, len(self.parts) + 1))
        return tuple((end, total / count) for end, (total, count) in zip(ends, self.parts, strict=True) if count)

    def last(self, num_outer: int) -> float | None:
        """The mean over the parts that hold the last 5 % of the outer steps.

        If none of them tells a loss, it is that of the newest part that does; None if no part does.
        """
        first = (num_outer - max(1, num_outer // LOSS_TAIL)) // self.every
        with_loss = [number for number, (_, count) in enumerate(self.parts) if count]
        last = self.parts[max(0, min([first, *with_loss[-1:]])) :]
        count = sum(count for _, count in last)
        return sum(total for total, _ in last) / count if count else None


class FencedError(UserError):
    """Another process has joined under this replica's name or got its slot of the text, or its key was revoked."""


def last_recent(num_outer: int, num_fragments: int) -> int:
    """The least `Member.last_outer` of replicas that decisions wait for, out of all outer entries and P."""
    return num_outer - 2 * num_fragments + 1


def least_payloads(quorum: Quorum, num_active: int, *, after_patience: bool) -> int:
    """The number of active replicas whose payloads a decision needs after τ; before τ it needs all of them.

    >>> [least_payloads(quorum, 6, after_patience=False) for quorum in ("all", "majority", 2)]
    [6, 4, 2]
    >>> [least_payloads(quorum, 6, after_patience=True) for quorum in ("all", "majority", 2)]
    [6, 1, 2]
    """
    if quorum == "all":
        return num_active
    if quorum == "majority":
        return 1 if after_patience else num_active // 2 + 1
    return min(quorum, num_active)


def differ_by_half(now: Collection[int], then: Collection[int]) -> bool:
    """True if fewer than half of those then are here now, or now they are twice as many; False if then was nobody.

    >>> [differ_by_half(now, (0, 1, 2, 3)) for now in ((0, 1), (0, 8, 9), range(7), range(8))]
    [False, True, False, True]
    """
    return bool(then) and (2 * len({*now} & {*then}) < len(then) or len(now) >= 2 * len(then))


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The bookkeeping of the entries 0 … k−1, and the step to that of one more."""

    number: Count
    """k, the number of the next entry."""
    previous: Digest
    """SHA-256 of entry k−1."""
    run: Digest
    """SHA-256 of entry 0, which names the run."""
    rules: Rules
    creator: PublicKey
    allowed: tuple[PublicKey, ...]
    """Keys that may join, revoked ones taken out."""
    kept: tuple[Count, ...] = ()
    """Entries that changed the allow-list: who starts from an index reads them, since the creator alone may."""
    members: tuple[Member, ...] = ()
    """The members by number."""
    positions: dict[Count, Count] = field(default_factory=dict)
    """The place that is reached in each slot of the text, in tokens."""
    fragments: tuple[FragmentLog, ...]
    is_complete: bool = False
    """True from the entry on at which so many replicas were present that the first inner step may be taken."""
    num_outer: Count = 0
    """Outer entries that are no shifts."""
    tokens: Count = 0
    """Tokens of all contributions."""
    losses: Losses = Losses()
    written: dict[Count, Written] = field(default_factory=dict)
    """Entries by the number of replicas that were active when they were written, and read them."""
    finished: bool = False
    """True if a replica has left because the token budget is spent: the others take no more inner steps."""
    closed: tuple[Checksum, ...] = ()
    """For each fragment the digest of the last Θ_p; empty until an entry closes the run, which is the last one."""

    @property
    def keys(self) -> int:
        """Number of the newest entry that changes the allow-list; 0 if none does."""
        return self.kept[-1] if self.kept else 0

    def is_bridge(self, replica: int) -> bool:
        """True for the run's bridge, which trains nothing: its outer gradients are shifts."""
        return self.members[replica].name == self.rules.bridge

    def is_shift(self, body: Outer) -> bool:
        """True for an outer step that takes no average: it counts the bridge."""
        return any(self.is_bridge(contribution.replica) for contribution in body.contributions)

    def num_shifts(self, outers: Sequence[OuterRef]) -> dict[int, int]:
        """For each of the log's last outer entries, by number, the shifts of its fragment up to it.

        Args:
            outers: all of the entry's fragment, or of all fragments, from some entry on.
        """
        counts, num_shifts = [log.num_shifts for log in self.fragments], dict[int, int]()
        for ref in reversed(outers):
            num_shifts[ref.number] = counts[ref.body.fragment]
            counts[ref.body.fragment] -= self.is_shift(ref.body)
        return num_shifts

    def is_active(self, replica: int) -> bool:
        """True if decisions wait for a replica."""
        member = self.members[replica]
        if member.left or member.fenced or self.closed or self.is_bridge(replica):
            return False
        return self.rules.quorum == "all" or (
            member.last_outer >= last_recent(self.num_outer, self.rules.num_fragments)
        )

    @property
    def active(self) -> tuple[int, ...]:
        """The active replicas."""
        return tuple(replica for replica in range(len(self.members)) if self.is_active(replica))

    @property
    def num_missing(self) -> int:
        """Number of replicas without which none that joins takes an inner step.

        It counts until the run begins; with the quorum "all" until the run ends, since replicas that all have left
        come back one after the other, and the first would go on alone.
        """
        is_free = self.finished if self.rules.quorum == "all" else self.is_complete
        return 0 if is_free else max(0, self.rules.num_replicas - len(self.present))

    @property
    def present(self) -> frozenset[str]:
        """The names of the replicas that have joined and not left, but for the bridge's."""
        names = frozenset(member.name for member in self.members if not (member.left or member.fenced))
        return names - {self.rules.bridge}

    def free_slot(self, name: str) -> int | None:
        """The slot that a joiner gets; None if active replicas hold all.

        Its name's last slot; or the lowest that nobody holds; or the lowest whose holder has left; or whose holder
        is not active. The join fences the former holder: its later uploads can't be counted beside the
        text that the joiner reads again. A bridge reads no text, and gets the highest in the place of the lowest.
        """
        holders = {member.slot: replica for replica, member in enumerate(self.members) if not member.fenced}

        def rank(slot: int) -> int:
            holder = holders.get(slot)
            if holder is None or self.members[holder].name == name:
                return 0
            is_kept = self.is_active(holder) or self.is_bridge(holder)
            return 1 if self.members[holder].left else 3 if is_kept else 2

        own = [member.slot for member in self.members if member.name == name]
        if own and rank(own[-1]) == 0:
            return own[-1]
        slots = range(self.rules.num_slots)
        slot = min(reversed(slots) if name == self.rules.bridge else slots, key=rank)
        return slot if rank(slot) < 3 else None

    def refusal(self, fragment: int, contribution: Contribution) -> str | None:
        """The reason why a payload can't enter the fragment's next outer step; None if it can"""
        log, replica = self.fragments[fragment], contribution.replica
        if self.closed:
            return "the run is closed"
        if replica >= len(self.members) or self.members[replica].fenced:
            return f"replica {replica} has not joined, or was replaced"
        if contribution.seq in self.last_seqs(replica) or contribution.seq <= log.last_seq.get(replica, -1):
            return f"payload {contribution.seq} of replica {replica} was counted already, or one after it"
        if contribution.base_round > log.round:
            return f"round {contribution.base_round} is still to come"
        is_bridge = self.is_bridge(replica)
        if contribution.base_round < log.oldest_base(self.rules.max_stale) and not is_bridge:
            return f"it was made against round {contribution.base_round}, and this is round {log.round}"
        if (reason := self._refusal_of_amounts(contribution)) or is_bridge:
            return reason
        return self.refusal_of_norm(fragment, contribution.norm)

    def _refusal_of_amounts(self, contribution: Contribution) -> str | None:
        """The reason why the tokens can't be true: they are more than the replica has declared at its join."""
        member, steps, tokens = self.members[contribution.replica], contribution.steps, contribution.tokens
        if steps > member.most_steps:
            return f"it claims {steps} inner steps, and {member.name} has declared {member.most_steps} at the most"
        if tokens > min(steps * member.step_tokens, MOST_TOKENS):
            declared = f"{member.name} has declared {member.step_tokens} per step at the most"
            return f"it claims {tokens} tokens in {steps} steps, and {declared}"
        most = max(self.positions.get(member.slot, 0), member.start) + member.most_steps * member.step_tokens
        if not member.start <= contribution.position <= most:
            return f"position {contribution.position} is not in the text from {member.start} to {most}"
        if max(self.tokens, member.steps) > MOST_TOKENS << 20:  # sums must fit 64 bits whatever an entry says
            return "the run has counted more tokens or steps than can be written down"
        return None

    def refusal_of_norm(self, fragment: int, norm: float) -> str | None:
        """The reason why a norm is out of bounds; with quorum "all" none is, since nobody can be left out."""
        norms = self.fragments[fragment].norms
        if self.rules.quorum == "all" or len(norms) < _FEWEST_NORMS:
            return None
        most = self.rules.norm_bound * statistics.median(norms)
        return f"its norm is {norm:.4g}, more than {most:.4g}" if 0 < most < norm else None

    @property
    def since(self) -> tuple[OuterRef, ...]:
        """The outer entries that may still have to be replayed, in the log's order."""
        return tuple(sorted((ref for log in self.fragments for ref in log.since), key=lambda ref: ref.number))

    def last_seqs(self, replica: int) -> tuple[int, ...]:
        """For each fragment a replica's newest payload that was counted; −1 if none was."""
        return tuple(log.last_seq.get(replica, -1) for log in self.fragments)

    def has_snapshot(self, fragment: int, round: int) -> bool:
        """True if there is a snapshot of a fragment after a round, the same round included."""
        refs = self.fragments[fragment].snapshots
        return bool(refs) and refs[-1].round >= round

    def outers_after(self, rounds: Sequence[int], older: Iterable[OuterRef] = ()) -> list[OuterRef]:
        """The outer entries which a replica that has taken so many rounds lacks.

        Args:
            rounds: by fragment.
            older: entries that it lacks, or has lacked; needed if snapshots stand for some of them.
        """
        known = {ref.number: ref for ref in (*older, *self.since) if ref.number < self.number}
        return [ref for ref in known.values() if ref.body.round > rounds[ref.body.fragment]]

    def cohort(self, contributions: Iterable[Contribution]) -> Cohort:
        """The replicas of an outer step, with their weights."""
        amount = partial(amount_of, self.rules.weights)
        return Cohort.weighted({c.replica: amount(tokens=c.tokens, steps=c.steps) for c in contributions})

    def refusal_of_replicas(self, replicas: Collection[int]) -> str | None:
        """The reason why an outer step can't count these replicas alone, however late; None if it can."""
        active, quorum = self.active, self.rules.quorum
        if quorum == "all" and (missing := [replica for replica in active if replica not in replicas]):
            return f"leaves out replicas {missing}, and the quorum is all"
        has_least = isinstance(quorum, int) and not self.finished
        if has_least and len(replicas) < least_payloads(quorum, len(active), after_patience=True):
            return f"counts {len(replicas)} of {len(active)} active replicas, and the quorum is {quorum}"
        return None

    def refusal_of_joiner(self, body: Join) -> str | None:
        """The reason why a replica can't join; None if it can."""
        if self.closed:
            return "joins a run that has ended"
        if self.creator and body.key not in self.allowed:
            return f"joins {body.name} with a key that is not on the run's allow-list"
        if not self.creator and body.key:
            return f"joins {body.name} with a key, in a run without keys"
        others = (m.key for m in self.members if m.name == body.name and m.key != body.key)
        if any(key in self.allowed for key in others):
            return f"joins {body.name} with another key than that of the replica which had the name before"
        if body.step_tokens * body.most_steps > MOST_TOKENS:
            return f"joins {body.name}, which declares more tokens for one outer gradient than {MOST_TOKENS}"
        if self.free_slot(body.name) is None:
            return f"joins {body.name}, and all {self.rules.num_slots} slots of the text are taken"
        return f"joins after {MOST_REPLICAS} others" if len(self.members) >= MOST_REPLICAS else None

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
        if self.closed:
            self._refuse("follows the entry that closes the run")
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
            self._check_author(entry)
            if isinstance(body, Outer):
                state = self._stepped(entry.author, body)
            elif isinstance(body, Snapshot):
                state = self._snapped(body)
            elif isinstance(body, Close):
                state = self._closing(body)
            else:
                state = self._left(entry.author, body)
        return replace(state, number=self.number + 1, previous=digest, written=self._written_with(body))

    def _written_with(self, body: Body) -> dict[int, Written]:
        """The entries by the number of active replicas, with one more; a replica that it counts is active."""
        counted = [c.replica for c in body.contributions] if isinstance(body, Outer) else []
        num_active = len({*self.active, *counted})
        before = self.written.get(num_active, Written())
        now = Written(
            outer_steps=before.outer_steps + isinstance(body, Outer),
            contributions=before.contributions + len(counted),
            others=before.others + (not isinstance(body, Outer)),
        )
        return {**self.written, num_active: now}

    def signer(self, entry: Entry) -> str:
        """The public key that must have signed an entry; empty in a run without keys."""
        if isinstance(entry.body, Join):
            return entry.body.key
        if entry.author == -1:
            return self.creator
        self._check_author(entry)
        return self.members[entry.author].key

    def check_goes_on(self, own: int, entry: Entry) -> None:
        """Check that a replica is still in the run after an entry, which it has not written, after its join.

        Raises:
            FencedError: if the entry ends it: another has its name or its slot, or its key was revoked.
            LogError: if somebody else has written in its name.
        """
        body, member = entry.body, self.members[own]
        if entry.author == own:
            does = f"lets {member.name} leave" if isinstance(body, Leave) else f"is {entry.kind} by {member.name}"
            raise LogError(
                f"entry {self.number - 1} of the log {does}, and {member.name} did not write it: somebody else "
                "writes to the store; create the run with keys (see diloco keys)"
            )
        if member.left:
            return  # it only waits for the end of the run, which others can close
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

    def _check_author(self, entry: Entry) -> None:
        author = entry.author
        if not 0 <= author < len(self.members):
            self._refuse(f"is by replica {author}, which has not joined")
        member, closes = self.members[author], isinstance(entry.body, Close)
        may_still = closes or (isinstance(entry.body, Outer) and self.finished)
        if member.fenced or (member.left and not may_still):
            self._refuse(f"is by replica {author}, which has left, or was replaced")
        if closes and not (member.left and (self.finished or not self.present)):
            self._refuse(
                "closes the run before its token budget is spent or all have left, or its author has left"
            )

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
        member = Member(
            name=body.name,
            key=body.key,
            step_tokens=body.step_tokens,
            most_steps=body.most_steps,
            slot=slot,
            start=start,
            joined=joined,
            last_outer=joined,
        )
        state = replace(state, members=(*state.members, member))
        return replace(state, is_complete=state.is_complete or len(state.present) >= self.rules.num_replicas)

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

    def _closing(self, body: Close) -> "RunState":
        if len(body.outer) != len(self.fragments):
            self._refuse(f"closes the run with {len(body.outer)} fragments, and there are {len(self.fragments)}")
        return replace(self, closed=body.outer)

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
        if not self.is_complete:
            self._refuse(f"steps before {self.rules.num_replicas} replicas were present together")
        is_shift, active = self.is_shift(body), log.active
        if is_shift and replicas != [author]:
            self._refuse(f"counts the bridge, {self.rules.bridge}, beside others")
        if not is_shift and (reason := self.refusal_of_replicas(replicas)):
            self._refuse(reason)
        if not is_shift:
            active = tuple(sorted({self.members[replica].slot for replica in (*self.active, *replicas)}))
        is_new = differ_by_half(active, log.active)
        norms = () if is_shift else tuple(c.norm for c in body.contributions)
        log = replace(
            log.stepped(body, self.rules.max_stale, is_shift=is_shift),
            norms=(*log.norms, *norms)[-_MOST_NORMS:],
            last_seq=log.last_seq | {c.replica: c.seq for c in body.contributions},
            last_round=log.last_round | {self.members[replica].slot: body.round for replica in replicas},
            active=active if is_new or not log.active else log.active,
            since=(*log.since, OuterRef(number=self.number, body=body, is_new=is_new)),
        )
        state = self._with(body.fragment, log)
        return state if is_shift else state._counted(body.contributions)

    def _counted(self, contributions: Sequence[Contribution]) -> "RunState":
        """The state with the contributions of its newest outer entry counted to their replicas."""
        members, positions, tokens = list(self.members), dict(self.positions), self.tokens
        losses = [c.loss for c in contributions if c.loss is not None]
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
            self,
            members=tuple(members),
            positions=positions,
            tokens=tokens,
            num_outer=self.num_outer + 1,
            losses=self.losses.plus(losses, self.num_outer),
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
