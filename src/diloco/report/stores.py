"""The run of a store, finished or not: its replicas from joining to ending, and who was in each outer step.

Time is counted in outer steps, since the log has no clock.
"""

import time

from diloco.errors import DilocoError
from diloco.rendezvous.status import Look, RunStatus, Timeline, binned
from diloco.report.page import Chart, Lane, Section, Series, Table
from diloco.report.text import megabytes

_ENTRIES_A_LOOK = 2000
_MOST_FRAGMENTS = 24
_MOST_LANES = 40
_MOST_POINTS = 256
_MOST_ROWS = 100
_OUTER_STEPS = "outer steps of all fragments"


class StoreTail:
    """The log of a store's run while it grows.

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
        self._log: Look | None = None
        self._base: tuple[RunStatus | None, float] = (None, 0.0)

    def again(self) -> None:
        """Look at the store; an error becomes `trouble`."""
        self.trouble = ""
        try:
            self._look()
        except (DilocoError, OSError) as error:
            self.trouble = str(error)

    def read(self) -> None:
        """Read the whole log as it is now.

        Raises:
            UserError: if the store holds no run.
            FileError: if its log is damaged.
            StoreError: if the store can't be read.
        """
        self._look()
        while self.is_behind:
            self._look()

    def _look(self) -> None:
        if self._log is None:
            self._log = Look(self.url, with_timeline=True, most_entries=_ENTRIES_A_LOOK)
        was_behind, self.status = self.is_behind, self._log.again()
        now, (self.before, then) = time.monotonic(), self._base
        self.seconds = now - then
        if self.before is None or was_behind or self.status.outer_steps > self.before.outer_steps:
            self._base = self.status, now

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than a look takes."""
        return self._log is not None and self._log.is_behind and not self.trouble

    @property
    def timeline(self) -> Timeline | None:
        """The run up to the last look."""
        return None if self._log is None else self._log.timeline

    @property
    def standing(self) -> str:
        """The state of the run in a few words."""
        if self.trouble or self.status is None:
            return self.trouble or "not read yet"
        if self.status.finished:
            return "finished"
        if self.is_behind:
            return "reading"
        return "running" if self.status.num_active else "no replica is active"


def store_section(store: StoreTail) -> Section:
    """The section of a store's run."""
    status, timeline = store.status, store.timeline
    if status is None or timeline is None:
        return Section(title=store.url, standing=store.standing)
    return Section(
        title=store.url,
        standing=store.standing,
        notes=["A replica that became inactive without leaving counts as dead."] if timeline.count("died") else [],
        facts=store_facts(store, status, timeline),
        charts=_charts(timeline) if timeline.contributors else [],
        table=_table(status, timeline),
    )


def store_facts(store: StoreTail, status: RunStatus, timeline: Timeline) -> dict[str, str]:
    """The progress of a store's run, by name."""
    before, seconds = store.before, store.seconds
    speed = f"{(status.tokens - before.tokens) / seconds:,.0f}" if before is not None and seconds else ""
    mean = sum(timeline.contributors) / max(1, len(timeline.contributors))
    facts = {
        "replicas active": f"{status.num_active} of {len(status.replicas)}",
        "outer steps": f"{status.outer_steps:,}",
        "tokens counted": f"{status.tokens:,}",
        "tokens/s": "" if status.finished else speed,
        "contributors, lately": f"{status.contributors:.1f}",
        "contributors, mean": f"{mean:.2f}",
        "left": str(timeline.count("left")),
        "deaths": str(timeline.count("died", "replaced")),
        "fragments": str(len(status.rounds)),
        "rounds by fragment": rounds_text(status),
        "entries": f"{status.entries:,}",
        "up, about": megabytes(status.traffic.bytes_up),
        "down, about": megabytes(status.traffic.bytes_down),
    }
    return {name: value for name, value in facts.items() if value}


def rounds_text(status: RunStatus) -> str:
    """The rounds of the first fragments."""
    return " ".join(map(str, status.rounds[:_MOST_FRAGMENTS])) + " …" * (len(status.rounds) > _MOST_FRAGMENTS)


def _table(status: RunStatus, timeline: Timeline) -> Table:
    """A row for each of the last replicas, the active ones first."""
    shown = sorted(status.replicas, key=lambda one: (one.standing != "active", -one.number))[:_MOST_ROWS]
    lives = [timeline.lives[one.number] for one in shown]
    rows = [
        (
            f"{one.number} {one.name}",
            life.end,
            f"{life.joined:,}",
            f"{life.ended:,}",
            f"{len(life.counted):,}",
            f"{one.counted} of {status.last}",
            f"{one.tokens:,}",
            f"{one.steps:,}",
        )
        for one, life in zip(shown, lives, strict=True)
    ]
    columns = ("replica", "", "joined", "ended", "outer steps", "lately", "tokens", "inner steps")
    return Table(columns=columns, rows=rows)


def _charts(timeline: Timeline) -> list[Chart]:
    first = max(0, len(timeline.lives) - _MOST_LANES)
    lanes = [
        Lane(
            label=f"{number} {life.name}"[:24],
            color=0,
            bars=[(life.joined, life.ended)],
            dots=life.counted[:: max(1, len(life.counted) // _MOST_POINTS)],
            end=life.end,
        )
        for number, life in enumerate(timeline.lives[first:], first)
    ]
    values = {"Contributors of an outer step": timeline.contributors, "Tokens counted": timeline.tokens}
    return [
        Chart(
            title="Replicas",
            x=_OUTER_STEPS,
            about="A dot is an outer step that counted the replica; × died, ◆ replaced or revoked, | left.",
            lanes=lanes,
        ),
        *(
            Chart(
                title=title,
                x=_OUTER_STEPS,
                series=[Series(label="", color=0, points=binned(numbers, _MOST_POINTS))],
                from_zero=True,
            )
            for title, numbers in values.items()
        ),
    ]
