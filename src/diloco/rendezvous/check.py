"""Check a store: races for the same name, reads after writes, latency and throughput.

A log needs one guarantee of a store: of all clients that create the same name, one wins, and all read its bytes
from then on. Some stores promise it and let every racer win.

The racers are clients in one process, each with connections of its own; in a directory, each request has a thread
of its own. A race proves that the store decides between requests that overlap. It does not prove that two
computers see the same store, such as a directory that both should mount.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from diloco.errors import UserError
from diloco.rendezvous.store import Store, StoreError

FOLDER = "check"
"""The place of a check's objects below the store's URL, each check's in a folder of its own."""
_PATIENCE_SECONDS = 20.0
_NUM_TIMED = 20
_SMALL_BYTES = 1000
_LARGE_BYTES = 1 << 24
_SLOW_LINK_BYTES, _SLOW_LINK_SECONDS, _SLOW_LINK_REQUESTS = 1 << 20, 0.5, 4
"""The object that a slow link is measured with. Both ways take longer there than these seconds (34 Mbit/s) and so
many small requests: TCP begins with few bytes per round trip, on a fast link to a far store, too."""


@dataclass(frozen=True, kw_only=True)
class StoreCheck:
    """The figures of a store that a run can trust."""

    url: str
    num_races: int
    """Races, each with one winner whose bytes all have read."""
    num_racers: int
    """Clients that raced for the same name each time, each with connections of its own."""
    create_seconds: tuple[float, float]
    """Median and largest time of creating an object of 1 kB."""
    get_seconds: tuple[float, float]
    """Median and largest time of reading it."""
    large_bytes: int
    """Size of the object that gives the rates: 16 MiB, on a slow link 1 MiB."""
    up_bytes_s: float
    """Rate of creating it, latency included."""
    down_bytes_s: float
    """Rate of reading it."""
    trouble: str
    """The reason why what is deleted stays in the store; empty if nothing stays."""


def check_store(url: str, *, racers: int = 4, rounds: int = 50) -> StoreCheck:
    """Race for names, and time requests; what was written is deleted.

    Args:
        url: of the store, as `Store.open` takes it.
        racers: clients that create the same name at once, at least 2.
        rounds: races, one after another.

    Raises:
        UserError: for a URL that can't be right, or too few racers or races.
        StoreError: if no run can trust the store, or it refuses what a run needs, or can't be reached.
    """
    if racers < 2:
        raise UserError(f"racers={racers} must be at least 2", "racers")
    if rounds < 1:
        raise UserError(f"rounds={rounds} must be at least 1", "rounds")
    return asyncio.run(_check(Store.open(url), racers, rounds))


async def assert_sound(store: Store) -> None:
    """Race for a few names, before a run trusts the store.

    Raises:
        StoreError: if two have won, or a read gave other bytes than the winner's.
    """
    folder, num_races = _new_folder(), 4
    try:
        await _race(store, folder, 4, num_races)
    finally:
        # A member whose rights don't include it leaves a few bytes.
        with suppress(StoreError):
            names = [f"{folder}/{race}" for race in range(num_races)]
            await store.delete(names, patience_seconds=_PATIENCE_SECONDS)


async def _check(store: Store, num_racers: int, num_races: int) -> StoreCheck:
    """Time small and large objects, race for names, compare a list with what is there, and delete all of it."""
    folder, trouble = _new_folder(), ""
    try:
        small = [await _seconds(store, f"{folder}/small/{i}", _SMALL_BYTES) for i in range(_NUM_TIMED + 1)]
        creates, gets = (sorted(times) for times in zip(*small[1:], strict=True))  # the first one connects
        medians = creates[_NUM_TIMED // 2], gets[_NUM_TIMED // 2]
        large_bytes, up, down = await _large(store, folder, sum(medians))
        await _race(store, folder, num_racers, num_races)
        names = await _listed(store, folder)
    finally:
        try:
            await store.delete(await _listed(store, folder), patience_seconds=_PATIENCE_SECONDS)
            if store.keeps_versions:
                trouble = f"{store.url} keeps every version of its objects: have the bucket keep one"
        except StoreError as error:
            trouble = str(error)
    if num_unlisted := sum(f"{folder}/{race}" not in names for race in range(num_races)):
        raise StoreError(
            f"{store.url}: a list lacked {num_unlisted} of {num_races} objects that were there, and a run needs "
            "lists: correct the endpoint, or take another store"
        )
    return StoreCheck(
        url=store.url,
        num_races=num_races,
        num_racers=num_racers,
        create_seconds=(medians[0], creates[-1]),
        get_seconds=(medians[1], gets[-1]),
        large_bytes=large_bytes,
        up_bytes_s=large_bytes / up,
        down_bytes_s=large_bytes / down,
        trouble=trouble,
    )


Lap = tuple[bool, bytes | None]
"""One racer's part in a race: True if the store said that it has won, and the bytes that it read afterwards."""


def refusal(laps: Iterable[Sequence[Lap]]) -> str | None:
    """The reason why nobody can trust the store of some races, from each race's laps in racers' order."""
    num_races = num_several = num_none = num_wrong = 0
    for race in laps:
        winners = [racer for racer, (has_won, _) in enumerate(race) if has_won]
        contents = {_content(racer) for racer in winners}
        num_races += 1
        num_several += len(winners) > 1
        num_none += not winners
        num_wrong += sum(read not in contents for _, read in race)
    if num_several:
        return (
            f"in {num_several} of {num_races} races the store told more than one racer that it had created the "
            "object, so no run can trust it: take another store, or a newer version of it"
        )
    if num_none:
        return f"in {num_none} of {num_races} races nobody created the absent object: take another store"
    if num_wrong:
        return (
            f"{num_wrong} reads after {num_races} races did not give what the winner had written: take another "
            "store, or one without a cache before it"
        )
    return None


async def _race(store: Store, folder: str, num_racers: int, num_races: int) -> None:
    """Let several clients race for some names, one after another; raises the refusal."""
    racers = [store, *(Store.open(store.url) for _ in range(num_racers - 1))]
    laps: list[list[Lap]] = []
    for name in (f"{folder}/{race}" for race in range(num_races)):
        await asyncio.gather(*(_read(racer, name) for racer in racers))  # a cache may keep that it was absent
        laps.append(await asyncio.gather(*(_lap(racer, name, i) for i, racer in enumerate(racers))))
    if reason := refusal(laps):
        raise StoreError(f"{store.url}: {reason}")


async def _lap(store: Store, name: str, racer: int) -> Lap:
    has_won = await store.create(name, _content(racer), patience_seconds=_PATIENCE_SECONDS) is None
    return has_won, await _read(store, name)


def _content(racer: int) -> bytes:
    return b"racer %d" % racer


async def _read(store: Store, name: str) -> bytes | None:
    data = await store.get(name, most_bytes=_LARGE_BYTES, patience_seconds=_PATIENCE_SECONDS)
    return None if data is None else bytes(data)


async def _large(store: Store, folder: str, small_seconds: float) -> tuple[int, float, float]:
    """Bytes of an object, and the seconds of creating and reading it; a small one takes `small_seconds`."""
    up, down = await _seconds(store, f"{folder}/slow", _SLOW_LINK_BYTES)
    if up + down > _SLOW_LINK_SECONDS + _SLOW_LINK_REQUESTS * small_seconds:
        return _SLOW_LINK_BYTES, up, down
    return _LARGE_BYTES, *await _seconds(store, f"{folder}/large", _LARGE_BYTES)


async def _seconds(store: Store, name: str, num_bytes: int) -> tuple[float, float]:
    """Seconds that it takes to create an object, and to read it."""

    async def seconds(request: Awaitable[object]) -> float:
        start = time.perf_counter()
        await request
        return time.perf_counter() - start

    data = os.urandom(num_bytes)
    created = await seconds(store.create(name, data, patience_seconds=_PATIENCE_SECONDS))
    return created, await seconds(store.get(name, most_bytes=num_bytes, patience_seconds=_PATIENCE_SECONDS))


def _new_folder() -> str:
    return f"{FOLDER}/{secrets.token_hex(8)}"


async def _listed(store: Store, folder: str) -> list[str]:
    """The names of a check's objects."""
    return [name for name, _ in await store.list(folder, patience_seconds=_PATIENCE_SECONDS)]
