"""Runs and stores that go on, as a terminal shows them."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.report.live.facts import run_facts
from diloco.report.live.watched import Watched
from diloco.report.terminal.store_status import rendered

_HEADINGS = {
    "": "",
    "step": "step",
    "loss": "loss",
    "held-out loss": "held-out",
    "tokens/s": "tokens/s",
    "compute utilization": "utilization",
    "sent per replica": "sent",
    "ETA": "ETA",
}
"""The facts for which a table of several runs has room."""


def view(watched: Watched) -> RenderableType:
    """A table of the runs, and the status of each store."""
    parts: list[RenderableType] = []
    if watched.runs:
        parts.append(_runs(watched))
    if watched.num_left_out:
        parts.append(Text(f"{watched.num_left_out} older runs are left out"))
    for store in watched.stores:
        if store.status is not None:
            parts.append(rendered(store.url, store.status, store.before, store.seconds))
        if store.trouble:
            parts.append(Text(f"{store.url}: {store.trouble}"))
    return Group(*parts)


def _runs(watched: Watched) -> Table:
    """A column for each fact; for a single run, a line."""
    facts = [{"": run.standing, **run_facts(run)} for run in watched.runs]
    names = list(map(str, watched.labels))
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
