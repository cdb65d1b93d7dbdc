"""Runs, stores and grids of runs that go on, as a terminal shows them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.rendezvous.prices import PROVIDERS, Traffic, polling
from diloco.rendezvous.status import RunStatus
from diloco.report.runs import LOSS, run_facts
from diloco.report.sources import Sources
from diloco.report.stores import rounds_text
from diloco.report.text import duration, megabytes
from diloco.training.records.tail import RunTail

if TYPE_CHECKING:
    from diloco.experiments.runner.grid import GridProgress

_HEADINGS = {
    "": "",
    "step": "step",
    LOSS: "loss",
    "held-out loss": "held-out",
    "tokens/s": "tokens/s",
    "compute utilization": "utilization",
    "sent per replica": "sent",
    "ETA": "ETA",
}
"""The facts for which a table of several runs has room."""
_DAY_SECONDS = 86400.0
_POLL_SECONDS = 0.5
"""Time between two looks of a replica into a bucket, by default."""


def view(sources: Sources) -> RenderableType:
    """A table of the runs, and the status of each store."""
    parts: list[RenderableType] = []
    if sources.runs:
        parts.append(_runs(sources))
    if sources.note:
        parts.append(Text(sources.note))
    for store in sources.stores:
        if store.status is not None:
            parts.append(store_view(store.url, store.status, store.before, store.seconds))
        if store.trouble:
            parts.append(Text(f"{store.url}: {store.trouble}"))
    return Group(*parts)


def _runs(sources: Sources) -> Table:
    """A column for each fact; for a single run, a line."""
    facts = [{"": run.standing, **run_facts(run)} for run in sources.runs]
    names = list(map(str, sources.labels))
    if len(facts) == 1:
        table = Table(box=None, show_header=False)
        for name, value in {"run": names[0], **facts[0]}.items():
            table.add_row(Text(name), Text(value))
        return table
    table = Table(box=None, header_style="bold")
    table.add_column("run", overflow="fold")
    for heading in _HEADINGS.values():
        is_text = not heading  # the only other column that may take several lines
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for label, one in zip(names, facts, strict=True):
        table.add_row(*(Text(cell) for cell in (label, *(one.get(name, "") for name in _HEADINGS))))
    return table


def store_view(
    url: str, status: RunStatus, before: RunStatus | None = None, seconds: float = 0.0
) -> RenderableType:
    """The table of the replicas, and lines about the whole run.

    Args:
        url: of the store.
        status: now.
        before: at an earlier look.
        seconds: between the two.
    """
    table = Table(box=None, header_style="bold")
    table.add_column("replica", justify="right")
    table.add_column("name")
    table.add_column("")
    for name in ("slot", "tokens", "steps", "steps/s", f"in the last {status.last}", "staleness", "lag"):
        table.add_column(name, justify="right")
    steps_before = {replica.number: replica.steps for replica in before.replicas} if before is not None else {}
    for replica in status.replicas:
        speed = "–"
        if seconds and replica.number in steps_before:
            speed = f"{(replica.steps - steps_before[replica.number]) / seconds:.2f}"
        stale = "–" if replica.staleness is None else f"{replica.staleness:.1f}"
        numbers = (replica.slot, f"{replica.tokens:,}", f"{replica.steps:,}", speed, replica.counted, stale)
        cells = (replica.number, replica.name, replica.standing, *numbers, replica.lag)
        table.add_row(*map(str, cells), style=None if replica.standing == "active" else "dim")
    return Group(table, *(Text(line) for line in _lines(url, status, before, seconds)))


def _lines(url: str, status: RunStatus, before: RunStatus | None, seconds: float) -> Iterator[str]:
    end = ", finished" if status.finished else ""
    yield f"{url}: {status.entries:,} entries, {status.num_active} of {len(status.replicas)} replicas active{end}"
    yield (
        f"{status.outer_steps:,} outer steps (rounds by fragment: {rounds_text(status)}), in the last "
        f"{status.last} on average {status.contributors:.1f} contributors"
    )
    speed = ""
    if before is not None and seconds:
        speed = (
            f"; since the last look {(status.steps - before.steps) / seconds:.2f} steps/s of all replicas, "
            f"{(status.tokens - before.tokens) / seconds:,.0f} tokens/s"
        )
    yield f"{status.tokens:,} tokens counted{speed}"
    yield from _bill(status)


def _bill(status: RunStatus) -> Iterator[str]:
    traffic = status.traffic
    yield (
        f"so far about {megabytes(traffic.bytes_up)} up, {megabytes(traffic.bytes_down)} down, "
        f"{traffic.creates + traffic.gets:,.0f} requests: {_dollars(traffic)}"
    )
    looks = polling(status.num_active, poll_seconds=_POLL_SECONDS, seconds=_DAY_SECONDS)
    yield f"looks for something new, every {_POLL_SECONDS:g} s, cost beside that a day: {_dollars(looks)}"
    yield "list prices of buckets; a directory costs nothing"


def _dollars(traffic: Traffic) -> str:
    return ", ".join(f"{traffic.dollars(prices):,.2f} $ on {prices.name}" for prices in PROVIDERS)


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
    return f"step {run.last.step}/{run.config.num_steps}  loss {run.loss:.3f}{eta}"
