"""The state that the page draws, as JSON: charts of curves, and a card for each run and store."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce

import numpy as np

from diloco.rendezvous.status import Timeline, binned
from diloco.report.labels import short
from diloco.report.live.facts import run_facts, store_facts
from diloco.report.live.watched import StoreFollower, Watched
from diloco.training.records.tail import MOST_BINS, Bin, ReplicaFollower, RunFollower

_MOST_ROWS = 100
_MOST_RATES = 32
_TOKENS = "tokens"
Points = list[tuple[float, float]]


@dataclass(kw_only=True)
class Series:
    """A curve."""

    label: str
    """The curve's name; empty for one that the legend leaves out."""
    color: int
    """Number of the colour; -1 is black."""
    points: Points
    thin: bool = False

    def __post_init__(self) -> None:
        """Leave out what is beyond a number's range, which JSON can't say."""
        self.points = [point for point in self.points if math.isfinite(point[1])]


@dataclass(kw_only=True)
class Chart:
    """Curves over one axis."""

    title: str
    x: str
    series: list[Series]
    from_zero: bool = False


@dataclass(kw_only=True)
class Card:
    """A run or a store."""

    title: str
    color: int
    """Number of the colour of its curves; -1 for none."""
    standing: str
    part: float | None = None
    """The share of the run that is over."""
    facts: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)


def snapshot(watched: Watched) -> bytes:
    """The state after the last look, as JSON."""
    names = watched.labels
    charts = [*_run_charts(watched.runs, short(names))]
    cards = [
        Card(
            title=str(name),
            color=index if len(names) > 1 else -1,
            standing=run.standing,
            part=run.part,
            facts=run_facts(run),
        )
        for index, (run, name) in enumerate(zip(watched.runs, names, strict=True))
    ]
    for store in watched.stores:
        charts += _store_charts(store) if store.timeline is not None else []
        cards.append(_store_card(store))
    for chart in charts:
        chart.series = [one for one in chart.series if one.points]
    charts = [chart for chart in charts if chart.series]
    left_out = f"{watched.num_left_out} older runs are left out" if watched.num_left_out else ""
    value = {"charts": [asdict(chart) for chart in charts], "cards": [asdict(card) for card in cards]}
    return json.dumps(value | {"note": left_out}, separators=(",", ":"), allow_nan=False).encode()


def _run_charts(runs: Sequence[RunFollower], names: Sequence[str]) -> Iterator[Chart]:
    """The charts of a run show its replicas, those of several runs their means over the replicas."""
    curves = _of_replicas(runs[0]) if len(runs) == 1 else _of_runs(runs, names)

    def chart(title: str, make: Callable[[Sequence[Bin]], Points], from_zero: bool = False) -> Chart:
        series = [
            Series(label=label, color=color, points=_mean(list(map(make, bins)))) for label, color, bins in curves
        ]
        return Chart(title=title, x=_TOKENS, series=series, from_zero=from_zero)

    loss = chart("Training loss, nats a token", _loss)
    replicas = [one.bins for run in runs for one in run.started]
    if len(runs) == 1 and len(replicas) > 1:
        for one in loss.series:
            one.thin = True
        loss.series.append(Series(label="mean", color=-1, points=_mean(list(map(_loss, replicas)))))
    elif len(runs) > 1:
        thin = [(index, one.bins) for index, run in enumerate(runs) for one in run.started if len(run.started) > 1]
        loss.series[:0] = [Series(label="", color=color, points=_loss(bins), thin=True) for color, bins in thin]
    yield loss
    yield chart("Held-out loss, nats a token", _held_out)
    yield chart("Tokens/s of all replicas", _speed, from_zero=True)
    yield chart("Compute utilization", _utilization, from_zero=True)
    if any(one.bytes_sent for run in runs for one in run.started):
        yield chart("Sent by a replica, Mbit/s", _sent, from_zero=True)
        yield chart("Merged by a replica, Mbit/s", _received, from_zero=True)


_Curves = list[tuple[str, int, list[list[Bin]]]]
"""Label, colour, and the bins of each replica, of which the mean is drawn."""


def _of_replicas(run: RunFollower) -> _Curves:
    return [(f"replica {m}", i, [one.bins]) for i, (m, one) in enumerate(sorted(run.replicas.items())) if one.last]


def _of_runs(runs: Sequence[RunFollower], names: Sequence[str]) -> _Curves:
    started: list[list[ReplicaFollower]] = [run.started for run in runs]
    return [(names[i], i, [one.bins for one in replicas]) for i, replicas in enumerate(started) if replicas]


def _mean(curves: list[Points]) -> Points:
    """The mean curve at the points of the shortest one."""
    curves = [curve for curve in curves if curve]
    if len(curves) < 2:
        return curves[0] if curves else []
    x = np.array(min(curves, key=lambda curve: curve[-1][0]))[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.mean([np.interp(x, *np.array(curve).T) for curve in curves], axis=0)
    return [_point(*point) for point in zip(x, y, strict=True)]


def _point(x: float, y: float) -> tuple[float, float]:
    return float(f"{x:.8g}"), float(f"{y:.5g}")


def _loss(bins: Sequence[Bin]) -> Points:
    return [_point(one.tokens, one.loss / one.num_steps) for one in bins]


def _held_out(bins: Sequence[Bin]) -> Points:
    return [_point(one.tokens, one.eval_loss / one.num_evals) for one in bins if one.num_evals]


def _rate(value: Callable[[Bin], float], seconds: str = "seconds") -> Callable[[Sequence[Bin]], Points]:
    """A rate over longer parts of the run, since a single step may send all or nothing."""

    def points(bins: Sequence[Bin]) -> Points:
        parts = (reduce(Bin.plus, part) for part in _parts(bins, _MOST_RATES))
        return [_point(one.tokens, value(one) / getattr(one, seconds)) for one in parts if getattr(one, seconds)]

    return points


def _parts(bins: Sequence[Bin], most: int) -> list[Sequence[Bin]]:
    """Equal parts; bins that do not fill a last one are left out, as its rate would say little."""
    size = max(1, -(-len(bins) // most))
    return [bins[end - size : end] for end in range(size, len(bins) + 1, size)]


_speed = _rate(lambda one: one.new_tokens, "timed_seconds")
_utilization = _rate(lambda one: one.seconds - one.blocked_seconds)
_sent = _rate(lambda one: 8e-6 * one.bytes_sent)
_received = _rate(lambda one: 8e-6 * one.bytes_received)


def _store_charts(store: StoreFollower) -> list[Chart]:
    assert isinstance(store.timeline, Timeline), "the caller has looked"
    values = {
        "Contributors of an outer step": store.timeline.contributors,
        "Tokens counted": store.timeline.tokens,
    }
    return [
        Chart(
            title=title,
            x="outer steps of all fragments",
            series=[Series(label="", color=0, points=[_point(*point) for point in binned(numbers, MOST_BINS)])],
            from_zero=True,
        )
        for title, numbers in values.items()
        if numbers
    ]


def _store_card(store: StoreFollower) -> Card:
    status = store.status
    if status is None:
        return Card(title=store.url, color=-1, standing=store.trouble or "not read yet")
    going = "running" if status.num_active else "no replica is active"
    standing = store.trouble or ("finished" if status.finished else "reading" if store.is_behind else going)
    shown = sorted(status.replicas, key=lambda one: (one.standing != "active", -one.number))[:_MOST_ROWS]
    rows = [
        (
            f"{one.number} {one.name}",
            one.standing,
            f"{one.tokens:,}",
            f"{one.steps:,}",
            f"{one.counted} of {status.last}",
        )
        for one in shown
    ]
    return Card(
        title=store.url,
        color=-1,
        standing=standing,
        facts=store_facts(status, store.before, store.seconds),
        columns=("replica", "", "tokens", "steps", "lately"),
        rows=rows,
    )
