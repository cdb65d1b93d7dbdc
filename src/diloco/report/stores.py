"""The run of a store, finished or not: its replicas, its progress, its traffic, and about what that costs.

With a timeline, its replicas from joining to ending, and who was in each outer step, too. Time is counted in outer
steps, since the log has no clock.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from diloco.errors import DilocoError, UserError
from diloco.rendezvous.prices import PROVIDERS, Traffic, polling
from diloco.rendezvous.status import Look, RunStatus, Timeline, binned
from diloco.report.page import Chart, Lane, Section, Series, Table
from diloco.report.runs import LOSS, NATS
from diloco.report.setup import config_setup
from diloco.report.text import duration, megabytes, rounded, sparkline
from diloco.training.records.store_runs import config_of
from diloco.training.records.tail import LOSS_MEANING

_ENTRIES_A_LOOK = 2000
_MOST_FRAGMENTS = 24
_MOST_LANES = 40
_MOST_POINTS = 256
_MOST_ROWS = 100
_OUTER_STEPS = "outer steps of all fragments"
_LOSS_MEANING = LOSS_MEANING.replace("steps", "outer steps")
_DAY_SECONDS = 86400.0
_POLL_SECONDS = 0.5
"""Time between two looks of a replica into a bucket, by default."""


class StoreTail:
    """The log of a store's run while it grows.

    Args:
        url: of the store.
        with_timeline: read it from its first entry on; else from the newest index on.
    """

    def __init__(self, url: str, *, with_timeline: bool = True) -> None:
        self.url, self._with_timeline = url, with_timeline
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
        self._start: tuple[int, float] | None = None
        """The tokens counted at the first look at the present, and its time."""

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
            self._log = Look(self.url, with_timeline=self._with_timeline, most_entries=_ENTRIES_A_LOOK)
        was_behind, self.status = self.is_behind, self._log.again()
        now, (self.before, then) = time.monotonic(), self._base
        self.seconds = now - then
        if was_behind:
            self.before = None  # it was no look at the present
        if self.before is None or was_behind or self.status.outer_steps > self.before.outer_steps:
            self._base = self.status, now
        if self._start is None and not self.is_behind:
            self._start = self.status.tokens, now

    @property
    def facts(self) -> Mapping[str, Any]:
        """The settings that all replicas share, by name; none before the first look."""
        return {} if self._log is None else self._log.facts

    @property
    def num_tokens(self) -> int | None:
        """The token budget of the run, if its replicas have agreed on one."""
        budget = self.facts.get("num_tokens")
        return budget if isinstance(budget, int) and budget > 0 else None

    @property
    def part(self) -> float | None:
        """The share of the budget that outer steps have counted."""
        if self.status is None or self.num_tokens is None:
            return None
        return 1.0 if self.status.finished else min(1.0, self.status.tokens / self.num_tokens)

    @property
    def eta_seconds(self) -> float | None:
        """Time until the budget is counted, at the pace since the first look; None if it is not known."""
        if self.status is None or self.num_tokens is None or self._start is None or self.standing != "running":
            return None
        tokens, begun = self._start
        new, seconds = self.status.tokens - tokens, time.monotonic() - begun
        return seconds * max(0, self.num_tokens - self.status.tokens) / new if new else None

    @property
    def is_behind(self) -> bool:
        """True if there is more to read than a look takes."""
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


def store_section(store: StoreTail, *, with_charts: bool = True) -> Section:
    """The section of a store's run, with charts or without, where a line of text shows the loss."""
    status, timeline = store.status, store.timeline
    if status is None:
        return Section(title=store.url, standing=store.standing)
    notes = ["Costs are by the list prices of buckets; a directory costs nothing."]
    if timeline is not None and timeline.count("died"):
        notes.append("A replica that became inactive without leaving counts as dead.")
    charts: list[Chart] = []
    if with_charts and timeline is not None and timeline.contributors:
        charts = [*_loss_chart(status), *_charts(timeline)]
    facts = _facts(status, timeline, _per_second(store, lambda status: status.tokens))
    if not with_charts and len(status.losses) > 1:
        facts = {"loss so far": sparkline([loss for _, loss in status.losses])} | facts
    if status.training_loss is not None:
        facts = {LOSS: f"{_loss_text(status)}, {_LOSS_MEANING}"} | facts
    if store.part is not None:
        facts = {"part of the run": f"{store.part:.1%}"} | facts
    if store.eta_seconds is not None:
        facts = {"ETA": duration(store.eta_seconds)} | facts
    return Section(
        title=store.url,
        standing=store.standing,
        eta=facts.get("ETA", ""),
        part=store.part,
        headline=_headline(store, status),
        notes=notes,
        facts=facts,
        main=_MAIN,
        setup=_setup(store) if with_charts else {},
        charts=charts,
        table=_table(store, status, timeline),
    )


_MAIN = (
    *("part of the run", LOSS, "tokens counted", "tokens/s", "replicas active", "outer steps"),
    *("contributors, mean", "up, about", "down, about"),
)
"""Facts that a page shows large."""


def _headline(store: StoreTail, status: RunStatus) -> str:
    """A sentence that says how far the run is."""
    tokens, num_tokens = rounded(status.tokens), store.num_tokens
    counted = f"{tokens} of {rounded(num_tokens)} tokens counted" if num_tokens else f"{tokens} tokens counted"
    names = len({one.name for one in status.replicas if one.tokens})
    replicas = f"{names} replica{'s' * (names != 1)} contributed"
    if not status.finished:
        replicas += f", {status.num_active} {'is' if status.num_active == 1 else 'are'} active"
    return f"{counted} in {status.outer_steps:,} outer steps; {replicas}"


def _setup(store: StoreTail) -> dict[str, str]:
    """The settings of the trainer's runs; nothing for another program's, whose log does not tell them."""
    try:
        config = config_of(store.facts)
    except UserError:
        return {}
    return {} if config is None else config_setup(config)


def _per_second(store: StoreTail, count: Callable[[RunStatus], int]) -> float | None:
    """The growth of a count since an earlier look; None without one, and at the end of the run."""
    if store.status is None or store.before is None or not store.seconds or store.status.finished:
        return None
    return (count(store.status) - count(store.before)) / store.seconds


def _facts(status: RunStatus, timeline: Timeline | None, speed: float | None) -> dict[str, str]:
    """The progress of a store's run, by name."""
    rounds, traffic = status.rounds, status.traffic
    looks = polling(status.num_active, poll_seconds=_POLL_SECONDS, seconds=_DAY_SECONDS)
    facts = {
        "replicas active": f"{status.num_active} of {len(status.replicas)}",
        "outer steps": f"{status.outer_steps:,}",
        "tokens counted": f"{status.tokens:,}",
        "tokens/s": "" if speed is None else f"{speed:,.0f}",
        "contributors, lately": f"{status.contributors:.1f}",
    }
    if timeline is not None:
        mean = sum(timeline.contributors) / max(1, len(timeline.contributors))
        facts |= {
            "contributors, mean": f"{mean:.2f}",
            "left": str(timeline.count("left")),
            "deaths": str(timeline.count("died", "replaced")),
        }
    facts |= {
        "fragments": str(len(rounds)),
        "rounds by fragment": " ".join(map(str, rounds[:_MOST_FRAGMENTS]))
        + " …" * (len(rounds) > _MOST_FRAGMENTS),
        "entries": f"{status.entries:,}",
        "up, about": megabytes(traffic.bytes_up),
        "down, about": megabytes(traffic.bytes_down),
        "requests, about": f"{traffic.creates + traffic.gets:,.0f}",
        "cost so far": _dollars(traffic),
        "cost of looks, per day, at most": _dollars(looks),
    }
    return {name: value for name, value in facts.items() if value}


def _dollars(traffic: Traffic) -> str:
    return ", ".join(f"{traffic.dollars(prices):,.2f} $ on {prices.name}" for prices in PROVIDERS)


def _table(store: StoreTail, status: RunStatus, timeline: Timeline | None) -> Table:
    """A row for each of the last replicas, the active ones first."""
    shown = sorted(status.replicas, key=lambda one: (one.standing != "active", -one.number))[:_MOST_ROWS]
    rows = []
    for one in shown:
        speed = _per_second(store, partial(_steps, one.number))
        cells = {"replica": f"{one.number} {one.name}", "": one.standing}
        if timeline is not None:
            life = timeline.lives[one.number]
            cells |= {"": life.end, "joined": f"{life.joined:,}", "ended": f"{life.ended:,}"}
            cells |= {"outer steps": f"{len(life.counted):,}"}
        cells |= {
            "lately": f"{one.counted} of {status.last}",
            "tokens counted": f"{one.tokens:,}",
            "inner steps": f"{one.steps:,}",
            "steps/s": "–" if speed is None else f"{speed:.2f}",
            "slot": str(one.slot),
            "staleness": "–" if one.staleness is None else f"{one.staleness:.1f}",
            "lag": f"{one.lag:,}",
        }
        rows.append(cells)
    return Table(columns=list(rows[0]) if rows else [], rows=[list(cells.values()) for cells in rows])


def _steps(number: int, status: RunStatus) -> int:
    return sum(replica.steps for replica in status.replicas if replica.number == number)


def _loss_text(status: RunStatus) -> str:
    return "" if status.training_loss is None else f"{status.training_loss:.4f}"


def _loss_chart(status: RunStatus) -> list[Chart]:
    """The curve of the training loss, if replicas tell it."""
    if len(status.losses) < 2:
        return []
    return [
        Chart(
            title="Training loss",
            x=_OUTER_STEPS,
            y=NATS,
            about="Error in predicting the text that is trained on, the mean over an outer step's contributors; "
            f"lower is better. The number is the {_LOSS_MEANING}.",
            series=[Series(label="", color=0, points=status.losses, value=_loss_text(status))],
        )
    ]


def _charts(timeline: Timeline) -> list[Chart]:
    """The charts of a run in a store: its replicas' lives, and what its outer steps counted."""
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
    values = {
        "Contributors of an outer step": ("replicas", timeline.contributors, "Replicas whose work it has merged."),
        "Tokens counted": ("tokens", timeline.tokens, "Tokens whose work the outer steps have merged so far."),
    }
    return [
        Chart(
            title="Replicas from joining to ending",
            x=_OUTER_STEPS,
            about="A dot is an outer step that counted the replica; × died, ◆ replaced or revoked, | left.",
            lanes=lanes,
        ),
        *(
            Chart(
                title=title,
                x=_OUTER_STEPS,
                y=y,
                about=about,
                series=[Series(label="", color=0, points=binned(numbers, _MOST_POINTS))],
                from_zero=True,
            )
            for title, (y, numbers, about) in values.items()
        ),
    ]
