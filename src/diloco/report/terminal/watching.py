"""Runs, stores and grids of runs that go on, as a terminal shows them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.report.page import BLACK, Page, Section
from diloco.report.runs import LOSS
from diloco.report.text import duration
from diloco.training.records.tail import RunTail

if TYPE_CHECKING:
    from diloco.experiments.runner.grid import GridProgress

_WITHOUT_ROOM = ("time",)
"""Columns of a comparison of runs that a terminal leaves out."""


def page_view(page: Page) -> RenderableType:
    """A page without its charts; of several runs, their comparison alone."""
    sections = [section_view(section) for section in page.sections if section.color == BLACK]
    return Group(*sections, *([Text(page.note)] if page.note else []))


def section_view(section: Section) -> RenderableType:
    """A section without its charts."""
    parts: list[RenderableType] = [Text(": ".join(filter(None, (section.title, section.standing))))]
    if section.facts:
        facts = Table(box=None, show_header=False)
        for name, value in section.facts.items():
            facts.add_row(Text(name), Text(value))
        parts.append(facts)
    if section.table is not None:
        table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
        shown = [index for index, name in enumerate(section.table.columns) if name not in _WITHOUT_ROOM]
        for index in shown:
            table.add_column(
                section.table.columns[index], justify="right" if index > 1 else "left", overflow="fold"
            )
        for row in section.table.rows:
            table.add_row(*(Text(row[index]) for index in shown))
        parts.append(table)
    return Group(*parts, *map(Text, section.notes))


class GridView:
    """A grid in a terminal: runs done, running and left, and a line for each that runs.

    Args:
        name: of the grid.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.progress: GridProgress | None = None
        """The newest progress; set it whenever there is news."""
        self._runs: dict[Path, RunTail] = {}
        self._start: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def rendered(self) -> RenderableType:
        """The lines at this moment; any thread may ask for them."""
        with self._lock:
            return Group(*(Text(line) for line in self._lines()))

    def _lines(self) -> Iterator[str]:
        progress = self.progress
        assert progress is not None, "there is something to show"
        running = progress.running
        self._runs = {path: self._runs.get(path) or RunTail(path) for path in running}
        for run in self._runs.values():
            run.again()
        num_done, num_runs = len(progress.results), len(progress.jobs)
        failed = f" ({progress.num_failed} failed)" if progress.num_failed else ""
        left = num_runs - num_done - len(running)
        part = progress.part({path: run.part for path, run in self._runs.items()})
        eta = self._eta(part)
        yield (
            f"{self._name}: {num_done} of {num_runs} runs done{failed}, {len(running)} running, {left} left, "
            f"{part:.1%}" + (f"  ETA {duration(eta)}" if eta is not None else "")
        )
        if (text := progress.preparing) is not None:
            yield f"  {text.stage}: {text.num_documents:,} documents, {text.num_bytes:,} bytes"
        for path, run in self._runs.items():
            yield f"  {progress.labels[path] or path.name}  {_of_run(run)}"

    def _eta(self, part: float) -> float | None:
        """Time to the end at the pace since the beginning; None as long as nothing was done, and at the end."""
        now = time.monotonic()
        start, done = self._start = self._start or (now, part)
        return (now - start) * (1 - part) / (part - done) if done < part < 1 else None


def _of_run(run: RunTail) -> str:
    if run.trouble:
        return run.trouble
    if run.summary is not None:
        return "evaluating"
    if run.config is None or run.last is None or run.loss is None:
        return "starting"
    eta = f"  ETA {duration(run.eta_seconds)}" if run.eta_seconds is not None else ""
    return f"step {run.last.step}/{run.config.num_steps}  {LOSS} {run.loss:.4f}{eta}"
