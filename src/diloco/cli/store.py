"""`diloco store`: the store in which replicas that come and go meet."""

import asyncio
import dataclasses
import json as json_module
from collections.abc import Iterator
from pathlib import Path

import tyro
from safetensors.torch import load_file

from diloco.cli._command import choose
from diloco.errors import DilocoError, FileError, UserError
from diloco.files import expanded, reading
from diloco.outer.step import parameters_hash
from diloco.rendezvous.check import StoreCheck, check_store
from diloco.rendezvous.log.log import is_store, open_run
from diloco.rendezvous.replay import Initial, Replay
from diloco.report.stores import StoreTail, store_section
from diloco.report.terminal.screen import Screen
from diloco.report.terminal.watching import section_view
from diloco.training.records.runs import CONFIG_FILE
from diloco.training.records.store_runs import initial_parameters
from diloco.units import rate

HELP = "the store of replicas that come and go: diloco store check | status | verify URL"
ORDER = 12


def run(arguments: list[str]) -> None:
    """Do with a store what a command line asks."""
    choose(_COMMANDS, arguments, prog="diloco store")


def _check(url: tyro.conf.Positional[str], racers: int = 4, rounds: int = 50, json: bool = False) -> None:
    """Race for names with several clients, and time requests; ends with 1 if no run can trust the store.

    Args:
        url: Directory, s3://bucket/prefix, gs://…, az://… or hf://buckets/….
        racers: Clients that create the same name at once.
        rounds: Races, one after another.
        json: Print JSON.
    """
    _refuse_a_replicas(url)
    checked = check_store(url, racers=racers, rounds=rounds)
    if json:
        print(json_module.dumps(dataclasses.asdict(checked)))
    else:
        _print(checked)


def _print(checked: StoreCheck) -> None:
    print(f"{checked.url}: each of {checked.num_races} races of {checked.num_racers} had one winner")
    for name, (median, largest) in (("create", checked.create_seconds), ("get", checked.get_seconds)):
        print(f"{name} of 1 kB: median {1e3 * median:.1f} ms, largest {1e3 * largest:.1f} ms")
    up, down = (rate(8e-9 * bytes_s) for bytes_s in (checked.up_bytes_s, checked.down_bytes_s))
    print(f"one object of {checked.large_bytes >> 20} MiB: {up} up, {down} down")
    if checked.trouble:
        print(f"{checked.trouble}: old payloads can't be retired")


def _status(url: tyro.conf.Positional[str], json: bool = False) -> None:
    """Show a run's replicas, its progress, its traffic and about what that costs; nothing is written.

    `diloco watch URL` shows it again and again, with speeds.

    Args:
        url: The run's store.
        json: Print JSON.
    """
    _refuse_a_replicas(url)
    store = StoreTail(url, with_timeline=False)
    store.read()
    assert store.status is not None, "the store was read"
    if json:
        print(json_module.dumps(dataclasses.asdict(store.status)))
    else:
        Screen().print(section_view(store_section(store, with_charts=False)))


def _verify(
    url: tyro.conf.Positional[str],
    from_snapshot: bool = False,
    initial: Path | None = None,
) -> None:
    """Check a run offline, from its log: chain, signatures, payloads, outer steps; ends with 1 at a fault.

    Args:
        url: The run's store.
        from_snapshot: Begin at the newest index and snapshots; left out, at entry 0.
        initial: A safetensors file with the parameters with which the run began, by name; the trainer's runs need
            none.
    """
    _refuse_a_replicas(url)
    replay = Replay(open_run(url), initial=_initial(initial), from_snapshot=from_snapshot)
    try:
        asyncio.run(replay.run())
    except UserError as error:
        if not isinstance(error, FileError):
            raise
        print("\n".join(_checked(replay)))
        raise DilocoError(f"{url} is not sound: {error}") from None
    print("\n".join(_checked(replay)))
    if replay.is_whole:
        print(f"outer hash   {parameters_hash(replay.parameters())}")


def _refuse_a_replicas(url: str) -> None:
    """Refuse the directory of a run, in which a replica keeps its own files."""
    if "://" not in url and not is_store(url) and (expanded(url) / CONFIG_FILE).exists():
        raise UserError(
            f"{url} is a run's directory; a store is the directory or URL that rendezvous named", "url"
        )


def _initial(path: Path | None) -> Initial:
    if path is None:
        return initial_parameters
    with reading(f"initial={path}", "initial"):
        parameters = load_file(path)
    return lambda facts: parameters


def _checked(replay: Replay) -> Iterator[str]:
    done = replay.checked
    end = "" if done.closed_by is None else f"; entry {done.closed_by} closes the run"
    yield f"entries      {done.entries:,}: chain, signatures, validity{end}"
    yield (
        f"payloads     {done.payloads:,}, {done.payload_bytes:,} bytes: SHA-256, signature, codec, norm, base; "
        f"{done.retired:,} retired"
    )
    if done.averages:
        yield f"averages     {done.averages:,} of shares, made again: those in the store have these bits"
    yield f"outer steps  {done.steps:,} of {done.rounds:,} repeated, with the bits that the log names"
    yield f"snapshots    {done.snapshots:,}, indexes {done.indexes:,}"
    yield from (f"note: {note}" for note in replay.notes)


_COMMANDS = {"check": _check, "status": _status, "verify": _verify}
