"""The runs and stores that a command line names: some may begin later, and a directory may gain runs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.errors import DilocoError
from diloco.files import expanded
from diloco.rendezvous.log.log import is_store
from diloco.rendezvous.status import Look, RunStatus, Timeline
from diloco.report.labels import Label, labels
from diloco.training.records.runs import CONFIG_FILE
from diloco.training.records.tail import RunFollower

MOST_RUNS = 24
"""Runs of a directory that are shown: those that began last."""
_ENTRIES_A_LOOK = 2000


class StoreFollower:
    """The run of a store.

    Args:
        url: of the store.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.status: RunStatus | None = None
        """The status at the last look that could read the store."""
        self.before: RunStatus | None = None
        """The status at the newest earlier look at which there were new outer steps."""
        self.seconds = 0.0
        """Time from `before` to `status`."""
        self.trouble = ""
        """The reason why the last look could not read the store."""
        self._look: Look | None = None
        self._base: tuple[RunStatus | None, float] = (None, 0.0)

    def again(self) -> None:
        """Look at the store; an error becomes `trouble`."""
        self.trouble = ""
        try:
            if self._look is None:
                self._look = Look(self.url, with_timeline=True, most_entries=_ENTRIES_A_LOOK)
            was_behind, self.status = self.is_behind, self._look.again()
        except (DilocoError, OSError) as error:
            self.trouble = str(error)
            return
        now, (self.before, then) = time.monotonic(), self._base
        self.seconds = now - then
        if self.before is None or was_behind or self.status.outer_steps > self.before.outer_steps:
            self._base = self.status, now

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than a look takes."""
        return self._look is not None and self._look.is_behind and not self.trouble

    @property
    def timeline(self) -> Timeline | None:
        """The run up to the last look."""
        return None if self._look is None else self._look.timeline


class Watched:
    """Runs, directories of runs, and stores.

    Args:
        sources: runs' directories, directories of runs, URLs or directories of stores; nothing need be there yet.

    Raises:
        UserError: if a source is below the home directory of a user that there is not.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        for source in sources:
            if not _is_store(source):
                expanded(source)  # refuse the home directory of nobody now
        self._sources = sources
        self._runs: dict[Path, RunFollower] = {}
        self._stores: dict[str, StoreFollower] = {}
        self.num_left_out = 0
        """Runs of directories with more than `MOST_RUNS`."""

    @property
    def runs(self) -> list[RunFollower]:
        """The runs, in the order in which they were named; those of a directory by name."""
        return list(self._runs.values())

    @property
    def labels(self) -> list[Label]:
        """A name for each of the runs."""
        return labels([run.directory.name for run in self.runs], [run.config for run in self.runs])

    @property
    def stores(self) -> list[StoreFollower]:
        """The stores, in the order in which they were named."""
        return list(self._stores.values())

    def again(self) -> None:
        """Look at everything."""
        self.num_left_out = 0
        stores = [source for source in self._sources if _is_store(source)]
        paths = [path for source in self._sources if source not in stores for path in self._run_paths(source)]
        self._stores = {url: self._stores.get(url) or StoreFollower(url) for url in stores}
        self._runs = {path: self._runs.get(path) or RunFollower(path) for path in paths}
        for one in (*self.stores, *self.runs):
            one.again()

    def _run_paths(self, source: str) -> Iterator[Path]:
        """The directories of runs that a source stands for: itself, unless it has some below it."""
        path = expanded(source).absolute()
        configs: list[tuple[float, Path]] = []
        with suppress(OSError):  # the run itself tells why it can't be read
            if not (path / CONFIG_FILE).exists():
                for file in path.glob(f"*/{CONFIG_FILE}"):
                    with suppress(OSError):  # it was removed a moment ago
                        configs.append((file.stat().st_mtime, file.parent))
        self.num_left_out += max(0, len(configs) - MOST_RUNS)
        yield from sorted(run for _, run in sorted(configs)[-MOST_RUNS:]) or [path]

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than a look takes."""
        return any(one.is_behind for one in (*self.stores, *self.runs))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        finished = [one.status is not None and one.status.finished for one in self.stores]
        finished += [one.summary is not None for one in self.runs]
        return all(finished) and not self.is_behind


def _is_store(source: str) -> bool:
    """True as `is_store` has it; False for a directory that can't be read."""
    try:
        return is_store(source)
    except OSError:
        return False
