"""A run at one moment, from the state that its log makes: its replicas, its progress, its traffic."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.entries import Entry, Outer
from diloco.rendezvous.log.index import newest_state
from diloco.rendezvous.log.log import MOST_AT_ONCE, Log, first_entry, open_run
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.rendezvous.prices import Traffic, exchange
from diloco.rendezvous.replay import RunFacts

End = Literal["active", "left", "died", "replaced", "revoked"]


@dataclass
class Life:
    """One replica in a run."""

    name: str
    joined: int
    """Outer steps before its join."""
    ended: int
    """Outer steps before its end, or up to the log's."""
    end: End = "active"
    """left: it left, or was active until the run was closed; died: it became inactive without leaving; replaced: a
    process of its name joined while it was active."""
    counted: list[int] = field(default_factory=list)
    """The outer steps that counted it, from 1."""


@dataclass(kw_only=True)
class Timeline:
    """A run."""

    lives: list[Life] = field(default_factory=list)
    """The replicas' lives, by their numbers."""
    contributors: list[int] = field(default_factory=list)
    """Replicas in each outer step."""
    tokens: list[int] = field(default_factory=list)
    """Tokens counted after each outer step, on average over the fragments."""
    state: RunState
    """The state after the last entry."""

    def add(self, entry: Entry, state: RunState) -> None:
        """Go on by one entry, to the state after it."""
        before, self.state = self.state, state
        for number, member in enumerate(state.members):
            if number == len(self.lives):
                self.lives.append(Life(name=member.name, joined=state.num_outer, ended=state.num_outer))
            was = before.members[number] if number < len(before.members) else member
            if state.closed and (before.is_active(number) or state.is_bridge(number)):
                self._end(number, "left")
            if member.left and not was.left:
                self._end(number, "left")
            elif member.fenced and not was.fenced and not was.left:
                revoked = member.key and member.key not in state.allowed
                how: End = "replaced" if before.is_active(number) else "died"
                self._end(number, "revoked" if revoked else how)
        if isinstance(entry.body, Outer) and not state.is_shift(entry.body):
            self.contributors.append(len(entry.body.contributions))
            self.tokens.append(state.tokens // len(state.fragments))
            for counted in entry.body.contributions:
                self.lives[counted.replica].counted.append(state.num_outer)
                self.lives[counted.replica].ended = state.num_outer

    def close(self) -> None:
        """Settle who is active after the last entry so far, and who has died."""
        for number, life in enumerate(self.lives):
            if life.end in ("active", "died"):
                is_there = self.state.is_active(number) or (self.state.is_bridge(number) and not self.state.closed)
                self._end(number, "active" if is_there else "died")

    def _end(self, number: int, end: End) -> None:
        life = self.lives[number]
        life.end = end
        if end != "died":
            life.ended = self.state.num_outer

    def count(self, *ends: End) -> int:
        """Replicas that ended in one of these ways."""
        return sum(life.end in ends for life in self.lives)


def binned(values: Sequence[int], most: int) -> list[tuple[int, float]]:
    """Means of equal parts of a sequence, each with the number of its last element, from 1.

    >>> binned([1, 2, 3, 4], 2)
    [(2, 1.5), (4, 3.5)]
    """
    count = min(most, len(values))
    edges = [len(values) * part // count for part in range(count + 1)] if count else []
    return [(stop, sum(values[start:stop]) / (stop - start)) for start, stop in pairwise(edges)]


Standing = Literal["active", "inactive", "bridge", "left", "replaced"]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica."""

    number: int
    name: str
    standing: Standing
    """inactive: nobody waits for it; bridge: nor for it, which brings what another run decides; replaced: another
    took its name or slot, or its key was revoked."""
    slot: int
    """The replica's part of the text."""
    tokens: int
    """Counted tokens, on average over the fragments."""
    steps: int
    """Counted inner steps, on average over the fragments."""
    counted: int
    """Number of the last outer steps that counted it."""
    staleness: float | None
    """Rounds between the base of its payloads and the Θ that they updated, on average over the last ones."""
    lag: int
    """Outer steps since one counted it last, or since it joined."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run: its replicas and fragments."""

    entries: int
    outer_steps: int
    rounds: tuple[int, ...]
    """Outer steps of each fragment."""
    tokens: int
    """Counted tokens, on average over the fragments."""
    steps: int
    """Counted inner steps of all replicas, on average over the fragments."""
    finished: bool
    """True if an entry closes the run."""
    training_loss: float | None
    """Mean of the last 5 % of the outer steps; None if no replica tells losses."""
    losses: tuple[tuple[int, float], ...]
    """Mean training losses of equal parts of the run, each after the number of outer steps up to its end."""
    replicas: tuple[ReplicaStatus, ...]
    last: int
    """Number of outer steps over which averages are taken: the last ones."""
    contributors: float
    """Replicas in an outer step, on average over the last ones."""
    traffic: Traffic
    """Estimated traffic so far: of what was counted, read by the replicas that were active then.

    Looks for something new and the start of a joiner are left out.
    """

    @property
    def num_active(self) -> int:
        """Replicas that decisions wait for."""
        return sum(replica.standing == "active" for replica in self.replicas)


def status_of(state: RunState, form: Form, *, num_slots: int) -> RunStatus:
    """The status after a state.

    Args:
        state: of the log.
        form: of the run's payloads.
        num_slots: vectors that the outer rule keeps beside Θ.
    """
    num_fragments = len(state.fragments)
    last = tuple(ref for ref in state.since if not state.is_shift(ref.body))[-4 * num_fragments :]
    return RunStatus(
        entries=state.number,
        outer_steps=state.num_outer,
        rounds=tuple(log.round for log in state.fragments),
        tokens=state.tokens // num_fragments,
        steps=sum(member.steps for member in state.members) // num_fragments,
        finished=bool(state.closed),
        training_loss=state.losses.last(state.num_outer),
        losses=state.losses.curve(state.num_outer),
        replicas=tuple(_replica(state, number, last) for number in range(len(state.members))),
        last=len(last),
        contributors=sum(len(ref.body.contributions) for ref in last) / max(1, len(last)),
        traffic=_traffic(state, form, num_slots),
    )


def _replica(state: RunState, number: int, last: Sequence[OuterRef]) -> ReplicaStatus:
    """A member's standing, and its part in the last outer steps."""
    member, num_fragments = state.members[number], len(state.fragments)
    standing: Standing = "inactive"
    if member.fenced:
        standing = "replaced"
    elif replace(state, closed=()).is_active(number):
        standing = "left" if state.closed else "active"
    elif member.left:
        standing = "left"
    elif state.is_bridge(number):
        standing = "bridge"
    shifts = [(ref.body.fragment, ref.body.round) for ref in state.since if state.is_shift(ref.body)]
    stale = [
        ref.body.round
        - 1
        - counted.base_round
        - sum(p == ref.body.fragment and counted.base_round < shift < ref.body.round for p, shift in shifts)
        for ref in last
        for counted in ref.body.contributions
        if counted.replica == number
    ]
    return ReplicaStatus(
        number=number,
        name=member.name,
        standing=standing,
        slot=member.slot,
        tokens=member.tokens // num_fragments,
        steps=member.steps // num_fragments,
        counted=len(stale),
        staleness=sum(stale) / len(stale) if stale else None,
        lag=state.num_outer - member.last_outer,
    )


def _traffic(state: RunState, form: Form, num_slots: int) -> Traffic:
    """The traffic so far: payloads and averages have the mean size over the fragments."""
    fragments, num_shares = range(len(form.sizes)), form.num_shares
    payload_bytes = num_shares * sum(map(form.share_bytes, fragments)) / len(fragments)
    average_bytes = num_shares * sum(map(form.average_bytes, fragments)) / len(fragments)
    every = state.rules.snapshot_rounds
    snapshots = [max(0, log.round - 1) // every for log in state.fragments]
    snapshot_bytes = sum(
        count * 4 * size * (1 + num_slots) for count, size in zip(snapshots, form.sizes, strict=True)
    )
    traffic = Traffic(creates=1 + sum(snapshots), gets=0, bytes_up=snapshot_bytes, bytes_down=0)  # with entry 0
    for num_active, written in state.written.items():
        traffic += Traffic(creates=written.others, gets=num_active * written.others, bytes_up=0, bytes_down=0)
        traffic += exchange(
            num_replicas=num_active,
            num_payloads=written.contributions,
            num_steps=written.outer_steps,
            payload_bytes=payload_bytes,
            average_bytes=average_bytes,
            num_shares=num_shares,
        )
    return traffic


class Look:
    """Reads a run's log; the first look begins at the newest index, or for a timeline at the first entry.

    Args:
        url: of the run's store.
        with_timeline: keep the run's timeline.
        most_entries: entries that one look reads, about; None is all.

    Raises:
        UserError: for a wrong URL, or a directory without a run.
    """

    def __init__(self, url: str, *, with_timeline: bool = False, most_entries: int | None = None) -> None:
        self._store = open_run(url)
        self._log: Log | None = None
        self._facts: RunFacts
        self._with_timeline, self._most_entries = with_timeline, most_entries
        self.facts: Mapping[str, Any] = {}
        """The settings that all replicas share, by name."""
        self.timeline: Timeline | None = None
        """The timeline up to the last look, if it was asked for."""
        self.is_behind = False
        """True if there is more to read than a look takes."""

    def again(self) -> RunStatus:
        """The status now.

        Raises:
            UserError: if the store holds no run.
            FileError: naming an entry that is damaged, forged or not valid.
            StoreError: if the store can't be read.
        """
        return asyncio.run(self._again())

    async def _again(self) -> RunStatus:
        """Read what the log has gained."""
        at_once = MOST_AT_ONCE if self._log is None or self.is_behind else 2
        if self._log is None:
            create, first = await first_entry(self._store)
            self._facts, self.facts = RunFacts.of(create), create.facts
            if self._with_timeline:
                self.timeline = Timeline(state=first)
            else:
                first = await newest_state(self._store, first)
            self._log = Log(self._store, first)
        begin, self.is_behind = self._log.state.number, False
        async for number, entry in self._log.read(at_once=at_once):
            if self.timeline is not None:
                self.timeline.add(entry, self._log.state)
            if self._most_entries is not None and number - begin + 1 >= self._most_entries:
                self.is_behind = True
                break
        if self.timeline is not None:
            self.timeline.close()
        slots = () if self._facts.outer is None else self._facts.outer.slots
        return status_of(self._log.state, self._facts.form, num_slots=len(slots))
