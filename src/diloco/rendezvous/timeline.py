"""A run from its first entry to its last: when replicas joined and ended, and who was in each outer step.

Time is counted in outer steps of all fragments: the log has no clock.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from diloco.rendezvous.entries import Entry, Outer
from diloco.rendezvous.history import entries_after, first_entry, open_run
from diloco.rendezvous.machine import RunState

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
    """died: it became inactive without leaving; replaced: a process of its name joined while it was active."""
    counted: list[int] = field(default_factory=list)
    """The outer steps that it was in, from 1."""


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
            if member.left and not was.left:
                self._end(number, "left")
            elif member.fenced and not was.fenced and not was.left:
                revoked = member.key and member.key not in state.allowed
                how: End = "replaced" if before.is_active(number) else "died"
                self._end(number, "revoked" if revoked else how)
        if isinstance(entry.body, Outer):
            self.contributors.append(len(entry.body.contributions))
            self.tokens.append(state.tokens // len(state.fragments))
            for counted in entry.body.contributions:
                self.lives[counted.replica].counted.append(state.num_outer)
                self.lives[counted.replica].ended = state.num_outer

    def close(self) -> None:
        """Settle who is active after the last entry so far, and who has died."""
        for number, life in enumerate(self.lives):
            if life.end in ("active", "died"):
                self._end(number, "active" if self.state.is_active(number) else "died")

    def _end(self, number: int, end: End) -> None:
        life = self.lives[number]
        life.end = end
        if end != "died":
            life.ended = self.state.num_outer

    def count(self, *ends: End) -> int:
        """Replicas that ended in one of these ways."""
        return sum(life.end in ends for life in self.lives)


def read_timeline(url: str) -> Timeline:
    """The timeline of the run of a URL.

    Raises:
        UserError: if there is no run.
        FileError: naming an entry that is damaged, forged or not valid.
        StoreError: if the store can't be read.
    """
    return asyncio.run(_read(url))


async def _read(url: str) -> Timeline:
    store = open_run(url)
    _, first = await first_entry(store)
    timeline = Timeline(state=first)
    async for _, entry, state in entries_after(store, first):
        timeline.add(entry, state)
    timeline.close()
    return timeline


def binned(values: Sequence[int], most: int) -> list[tuple[int, float]]:
    """Means of equal parts of a sequence, each with the number of its last element, from 1.

    >>> binned([1, 2, 3, 4], 2)
    [(2, 1.5), (4, 3.5)]
    """
    count = min(most, len(values))
    edges = [len(values) * part // count for part in range(count + 1)] if count else []
    return [(stop, sum(values[start:stop]) / (stop - start)) for start, stop in pairwise(edges)]
