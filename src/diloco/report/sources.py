"""The runs and stores that a command line names: some may begin later, and a directory may gain runs."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.errors import UserError
from diloco.files import expanded
from diloco.rendezvous.log.log import is_store
from diloco.report.page import Page
from diloco.report.runs import run_sections
from diloco.report.setup import CommandOf
from diloco.report.stores import StoreTail, store_section
from diloco.report.text import labels
from diloco.training.config.config import TrainConfig
from diloco.training.records.runs import CONFIG_FILE, lock_of, no_run
from diloco.training.records.tail import RunTail

MOST_RUNS = 24
"""Runs of a directory that are shown: those that began last."""


class Sources:
    """Runs, directories of runs, and stores.

    Args:
        sources: runs' directories or their names in `runs`, directories of runs, URLs or directories of stores;
            nothing need be there yet.
        command_of: tells the command line of a run.

    Raises:
        UserError: if a source is below the home directory of a user that there is not.
    """

    def __init__(self, sources: Sequence[str], *, command_of: CommandOf = lambda _: "") -> None:
        for source in sources:
            is_store(source)  # refuses the home directory of nobody now
        self._sources, self._command_of = sources, command_of
        self._runs: dict[Path, RunTail] = {}
        self._stores: dict[str, StoreTail] = {}
        self._num_left_out = 0

    @property
    def runs(self) -> list[RunTail]:
        """The runs, in the order in which they were named; those of a directory by name."""
        return list(self._runs.values())

    @property
    def stores(self) -> list[StoreTail]:
        """The stores, in the order in which they were named."""
        return list(self._stores.values())

    def again(self) -> None:
        """Look at everything; what can't be read is told by its run or store."""
        self._find()
        for one in (*self.stores, *self.runs):
            one.again()

    def read(self) -> None:
        """Read everything as it is now.

        Raises:
            UserError: if a source holds neither a run that has taken a step nor a store's run.
            FileError: if a file is damaged.
            StoreError: if a store can't be read.
        """
        self._find()
        for one in (*self.stores, *self.runs):
            one.read()

    def check(self) -> None:
        """Look at everything, and refuse a source without a run, where none is about to begin either.

        Raises:
            UserError: naming it, and the nearest runs.
        """
        self.again()
        for store in self.stores:
            if store.status is None and store.trouble:
                raise UserError(store.trouble)
        for run in self.runs:
            if run.config is None and not run.trouble and not lock_of(run.directory).is_held:
                raise no_run(run.directory)

    def _find(self) -> None:
        self._num_left_out = 0
        stores = [source for source in self._sources if is_store(source)]
        paths = [path for source in self._sources if source not in stores for path in self._run_paths(source)]
        self._stores = {url: self._stores.get(url) or StoreTail(url) for url in stores}
        self._runs = {path: self._runs.get(path) or RunTail(path) for path in paths}

    def _run_paths(self, source: str) -> Iterator[Path]:
        """The directories of runs that a source stands for: itself, unless it has some below it."""
        path = expanded(source)
        configs: list[tuple[float, Path]] = []
        named = TrainConfig.runs / path
        with suppress(OSError):  # the run itself tells why it can't be read
            if not (path / CONFIG_FILE).exists():
                for file in path.glob(f"*/{CONFIG_FILE}"):
                    with suppress(OSError):  # it was removed a moment ago
                        configs.append((file.stat().st_mtime, file.parent))
                if not configs and (named / CONFIG_FILE).exists():
                    path = named
        self._num_left_out += max(0, len(configs) - MOST_RUNS)
        yield from sorted(run for _, run in sorted(configs)[-MOST_RUNS:]) or [path]

    @property
    def note(self) -> str:
        """A remark on all sources."""
        return f"{self._num_left_out} older runs are left out" if self._num_left_out else ""

    @property
    def is_behind(self) -> bool:
        """True if there is more to read than a look takes."""
        return any(one.is_behind for one in (*self.stores, *self.runs))

    @property
    def is_over(self) -> bool:
        """True if nothing more is to come."""
        finished = [one.status is not None and one.status.finished for one in self.stores]
        finished += [one.is_over for one in self.runs]
        return all(finished) and not self.is_behind

    def page(self, *, with_charts: bool = True) -> Page:
        """The page after the last look."""
        names = labels([run.directory.absolute().name for run in self.runs], self.runs)
        sections = [store_section(store, with_charts=with_charts) for store in self.stores]
        sections += run_sections(self.runs, names, with_charts=with_charts, command_of=self._command_of)
        return Page(note=self.note, sections=sections)
