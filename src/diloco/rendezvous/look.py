"""Looks at a run in its store, one after another: each reads what is new, and nothing else."""

import asyncio

from diloco.rendezvous.archive import newest_state
from diloco.rendezvous.facts import RunFacts
from diloco.rendezvous.history import entries_after, first_entry, open_run
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.status import RunStatus, status_of
from diloco.rendezvous.timeline import Timeline


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
        self._state: RunState | None = None
        self._facts: RunFacts
        self._with_timeline, self._most_entries = with_timeline, most_entries
        self.timeline: Timeline | None = None
        """The timeline up to the last look, if it was asked for."""
        self.is_behind = False
        """Whether there is more to read than a look takes."""

    def again(self) -> RunStatus:
        """The status now.

        Raises:
            UserError: if the store holds no run.
            FileError: naming an entry that is damaged, forged or not valid.
            StoreError: if the store can't be read.
        """
        return asyncio.run(self._again())

    async def _again(self) -> RunStatus:
        if self._state is None:
            create, first = await first_entry(self._store)
            self._facts = RunFacts.of(create)
            if self._with_timeline:
                self._state, self.timeline = first, Timeline(state=first)
            else:
                self._state = await newest_state(self._store, first)
            after = entries_after(self._store, self._state)
        else:
            after = entries_after(self._store, self._state, **({} if self.is_behind else {"at_once": 2}))
        begin, self.is_behind = self._state.number, False
        async for number, entry, state in after:
            self._state = state
            if self.timeline is not None:
                self.timeline.add(entry, state)
            if self._most_entries is not None and number - begin + 1 >= self._most_entries:
                self.is_behind = True
                break
        if self.timeline is not None:
            self.timeline.close()
        slots = () if self._facts.outer is None else self._facts.outer.slots
        return status_of(self._state, self._facts.form, num_slots=len(slots))
