"""Looks at a run in its store, one after another: each reads what is new, and nothing else."""

import asyncio

from diloco.rendezvous.archive import newest_state
from diloco.rendezvous.facts import RunFacts
from diloco.rendezvous.history import entries_after, first_entry, open_run
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.status import RunStatus, status_of


class Look:
    """Reads a run's log; the first look begins at the newest index.

    Args:
        url: of the run's store.

    Raises:
        UserError: for a wrong URL, or a directory without a run.
    """

    def __init__(self, url: str) -> None:
        self._store = open_run(url)
        self._state: RunState | None = None
        self._facts: RunFacts

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
            self._state = await newest_state(self._store, first)
            after = entries_after(self._store, self._state)
        else:
            after = entries_after(self._store, self._state, at_once=2)
        async for _, _, state in after:
            self._state = state
        slots = () if self._facts.outer is None else self._facts.outer.slots
        return status_of(self._state, self._facts.form, num_slots=len(slots))
