"""A grid of runs in a terminal: runs done, running and left, and a line for each that runs."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from diloco.experiments.runner.grid import GridProgress
from diloco.report.terminal.training import duration
from diloco.training.records.tail import RunFollower


class GridView:
    """Follows the metrics of the runs that run now.

    Args:
        name: of the grid.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.progress: GridProgress | None = None
        """The newest progress; set it whenever there is news."""
        self._runs: dict[Path, RunFollower] = {}
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
        self._runs = {path: self._runs.get(path) or RunFollower(path) for path in running}
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


def _of_run(run: RunFollower) -> str:
    if run.trouble:
        return run.trouble
    if run.summary is not None:
        return "evaluating"
    if run.config is None or run.last is None or run.loss is None:
        return "starting"
    eta = f"  ETA {duration(run.eta_seconds)}" if run.eta_seconds is not None else ""
    return f"step {run.last.step}/{run.config.num_steps}  loss {run.loss:.3f}{eta}"
