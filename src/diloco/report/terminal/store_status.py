"""The status of a run in a store, as a terminal shows it."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.rendezvous.prices import PROVIDERS, Traffic, polling
from diloco.rendezvous.status import RunStatus

_DAY_SECONDS = 86400.0
_POLL_SECONDS = 0.5
"""Time between two looks of a replica into a bucket, by default."""
_MOST_FRAGMENTS = 24


def rendered(url: str, status: RunStatus, before: RunStatus | None = None, seconds: float = 0.0) -> RenderableType:
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
    rounds = " ".join(map(str, status.rounds[:_MOST_FRAGMENTS])) + " …" * (len(status.rounds) > _MOST_FRAGMENTS)
    yield (
        f"{status.outer_steps:,} outer steps (rounds by fragment: {rounds}), in the last {status.last} on average "
        f"{status.contributors:.1f} contributors"
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
        f"so far about {_bytes(traffic.bytes_up)} up, {_bytes(traffic.bytes_down)} down, "
        f"{traffic.creates + traffic.gets:,.0f} requests: {_dollars(traffic)}"
    )
    looks = polling(status.num_active, poll_seconds=_POLL_SECONDS, seconds=_DAY_SECONDS)
    yield f"looks for something new, every {_POLL_SECONDS:g} s, cost beside that a day: {_dollars(looks)}"
    yield "list prices of buckets; a directory costs nothing"


def _dollars(traffic: Traffic) -> str:
    return ", ".join(f"{traffic.dollars(prices):,.2f} $ on {prices.name}" for prices in PROVIDERS)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
