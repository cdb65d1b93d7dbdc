"""Check a store: races for the same name, reads after writes, latency and throughput.

A log needs one thing of a store: of all who create the same name, one wins, and everybody reads its bytes from
then on. Some stores promise it and let every racer win.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
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


@dataclass(frozen=True)
class Lap:
    """One racer's part in one race."""

    was_absent: bool
    """True if the name was absent before the race."""
    won: bool
    """True if the store said that this racer had created the object."""
    read: bytes | None
    """The object's bytes, or None if it was absent, as this racer read them after its own create."""


@dataclass(frozen=True, kw_only=True)
class StoreCheck:
    """A check's results."""

    url: str
    num_races: int
    num_racers: int
    """Clients that raced for the same name each time, each with connections of its own."""
    several_won: int
    """Races with more than one winner."""
    none_won: int
    """Races without a winner."""
    wrong_reads: int
    """Reads after a race that gave other bytes than the winner's, or none."""
    unlisted: int
    """Objects of the races that a list of them lacked."""
    create_seconds: tuple[float, float]
    """Median and largest time of creating an object of 1 kB."""
    get_seconds: tuple[float, float]
    """Median and largest time of reading it."""
    up_bytes_s: float
    """Rate of creating one object of 16 MiB, latency included."""
    down_bytes_s: float
    """Rate of reading it."""
    trouble: tuple[str, ...]
    """The store's refusals to delete what was written."""

    def refusal(self) -> str | None:
        """The reason why a run can't use the store; None if it can."""
        if refusal := _refusal(self.url, self.several_won, self.none_won, self.wrong_reads, self.num_races):
            return refusal
        if self.unlisted:
            return (
                f"{self.url}: a list lacked {self.unlisted} of {self.num_races} objects that were there, and a "
                "run needs lists: correct the endpoint, or take another store"
            )
        return None


def check_store(url: str, *, racers: int = 4, rounds: int = 50) -> StoreCheck:
    """Race for names, and time requests; what was written is deleted.

    Args:
        url: of the store, as `Store.open` takes it.
        racers: clients that create the same name at once, at least 2.
        rounds: races, one after another.

    Raises:
        UserError: for a URL that can't be right, or too few racers or races.
        StoreError: if the store refuses what a run needs, or can't be reached.
    """
    if racers < 2:
        raise UserError(f"racers={racers} must be at least 2", "racers")
    if rounds < 1:
        raise UserError(f"rounds={rounds} must be at least 1", "rounds")
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    return asyncio.run(_check(Store.open(url), folder, racers, rounds))


async def _check(store: Store, folder: str, num_racers: int, num_races: int) -> StoreCheck:
    try:
        create, get, up, down = await _timed(store, folder)
        laps = await _raced(store, folder, num_racers, num_races)
        names = await _listed(store, folder)
    finally:
        trouble = await _clean(store, folder)
    several, none, wrong = judged(laps)
    return StoreCheck(
        url=store.url,
        num_races=num_races,
        num_racers=num_racers,
        several_won=several,
        none_won=none,
        wrong_reads=wrong,
        unlisted=sum(f"{folder}/{race}" not in names for race in range(num_races)),
        create_seconds=create,
        get_seconds=get,
        up_bytes_s=up,
        down_bytes_s=down,
        trouble=trouble,
    )


async def assert_sound(store: Store, *, num_racers: int = 4, num_races: int = 4) -> None:
    """Race for a few names, before a run trusts the store.

    Raises:
        StoreError: if two have won, or a read gave other bytes than the winner's.
    """
    folder = f"{FOLDER}/{secrets.token_hex(8)}"
    try:
        laps = await _raced(store, folder, num_racers, num_races)
    finally:
        # A member whose rights don't include it leaves a few bytes.
        with suppress(StoreError):
            names = [f"{folder}/{race}" for race in range(num_races)]
            await store.delete(names, patience_seconds=_PATIENCE_SECONDS)
    if refusal := _refusal(store.url, *judged(laps), num_races):
        raise StoreError(refusal)


def judged(laps: Iterable[Sequence[Lap]]) -> tuple[int, int, int]:
    """Races that several won, races that nobody won, and wrong reads, of each race's laps in racers' order."""
    several = none = wrong = 0
    for race in laps:
        winners = [racer for racer, lap in enumerate(race) if lap.won]
        several += len(winners) > 1
        none += not winners
        expected = {_content(racer) for racer in winners}
        wrong += sum(lap.read not in expected or not lap.was_absent for lap in race)
    return several, none, wrong


def _refusal(url: str, several_won: int, none_won: int, wrong_reads: int, num_races: int) -> str | None:
    if several_won:
        return (
            f"{url}: in {several_won} of {num_races} races the store told more than one racer that it had created "
            "the object, so no run can trust it: take another store, or a newer version of it"
        )
    if none_won:
        return f"{url}: in {none_won} of {num_races} races nobody created the absent object: take another store"
    if wrong_reads:
        return (
            f"{url}: {wrong_reads} reads after {num_races} races did not give what the winner had written: take "
            "another store, or one without a cache before it"
        )
    return None


def _content(racer: int) -> bytes:
    return b"racer %d" % racer


async def _is_absent(store: Store, name: str) -> bool:
    return await store.get(name, most_bytes=100, patience_seconds=_PATIENCE_SECONDS) is None


async def _lap(store: Store, name: str, racer: int, was_absent: bool) -> Lap:
    won = await store.create(name, _content(racer), patience_seconds=_PATIENCE_SECONDS) is None
    read = await store.get(name, most_bytes=100, patience_seconds=_PATIENCE_SECONDS)
    return Lap(was_absent=was_absent, won=won, read=None if read is None else bytes(read))


async def _raced(store: Store, folder: str, num_racers: int, num_races: int) -> list[list[Lap]]:
    """The laps of each race, in racers' order; each racer has a client of its own."""
    racers = [store, *(Store.open(store.url) for _ in range(num_racers - 1))]
    laps = []
    for race in range(num_races):
        name = f"{folder}/{race}"
        absent = await asyncio.gather(*(_is_absent(racer, name) for racer in racers))
        laps.append(await asyncio.gather(*(_lap(r, name, i, absent[i]) for i, r in enumerate(racers))))
    return laps


async def _timed(store: Store, folder: str) -> tuple[tuple[float, float], tuple[float, float], float, float]:
    """Median and largest seconds of a create and of a read of 1 kB; bytes a second up and down of 16 MiB."""
    small, large = os.urandom(_SMALL_BYTES), os.urandom(_LARGE_BYTES)

    async def seconds(request: Callable[[str], Awaitable[object]], name: str) -> float:
        start = time.perf_counter()
        await request(f"{folder}/{name}")
        return time.perf_counter() - start

    def create(data: bytes) -> Callable[[str], Awaitable[object]]:
        return lambda name: store.create(name, data, patience_seconds=_PATIENCE_SECONDS)

    def get(name: str) -> Awaitable[object]:
        return store.get(name, most_bytes=_LARGE_BYTES, patience_seconds=_PATIENCE_SECONDS)

    await store.create(f"{folder}/first", small, patience_seconds=_PATIENCE_SECONDS)  # connects
    creates = sorted([await seconds(create(small), f"small/{i}") for i in range(_NUM_TIMED)])
    gets = sorted([await seconds(get, f"small/{i}") for i in range(_NUM_TIMED)])
    up, down = await seconds(create(large), "large"), await seconds(get, "large")
    middle = _NUM_TIMED // 2
    return (creates[middle], creates[-1]), (gets[middle], gets[-1]), _LARGE_BYTES / up, _LARGE_BYTES / down


async def _listed(store: Store, folder: str) -> list[str]:
    """The names of a check's objects."""
    return [name for name, _ in await store.list(folder, patience_seconds=_PATIENCE_SECONDS)]


async def _clean(store: Store, folder: str) -> tuple[str, ...]:
    """Delete a check's objects; the refusals of listing or deleting."""
    try:
        await store.delete(await _listed(store, folder), patience_seconds=_PATIENCE_SECONDS)
    except StoreError as error:
        return (str(error),)
    return ()
