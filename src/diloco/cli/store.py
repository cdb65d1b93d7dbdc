"""`diloco store`: the store in which replicas that come and go meet."""

import dataclasses
import json as json_module

import tyro

from diloco.cli._command import choose
from diloco.rendezvous.check import StoreCheck, check_store
from diloco.rendezvous.store import StoreError

HELP = "the store of replicas that come and go: diloco store check URL"
ORDER = 12


def run(arguments: list[str]) -> None:
    """Do with a store what a command line asks."""
    choose(_COMMANDS, arguments, prog="diloco store")


def _check(url: tyro.conf.Positional[str], racers: int = 4, rounds: int = 50, json: bool = False) -> None:
    """Race for names from several processes, and time requests; ends with 1 if no run can trust the store.

    Args:
        url: Directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        racers: Processes that create the same name at once.
        rounds: Races, one after another.
        json: Print JSON.
    """
    checked = check_store(url, racers=racers, rounds=rounds)
    if json:
        print(json_module.dumps(dataclasses.asdict(checked) | {"refusal": checked.refusal()}))
    else:
        _print(checked)
    if refusal := checked.refusal():
        raise StoreError(refusal)


def _print(checked: StoreCheck) -> None:
    one_won = checked.num_races - checked.several_won - checked.none_won
    print(f"{checked.url}: {one_won} of {checked.num_races} races of {checked.num_racers} had one winner")
    for name, (median, largest) in (("create", checked.create_seconds), ("get", checked.get_seconds)):
        print(f"{name} of 1 kB: median {1e3 * median:.1f} ms, largest {1e3 * largest:.1f} ms")
    print(
        f"one object of 16 MiB: {checked.up_bytes_s / 1e6:.0f} MB/s up, {checked.down_bytes_s / 1e6:.0f} MB/s down"
    )
    for trouble in checked.trouble:
        print(f"{trouble}: old payloads can't be retired")


_COMMANDS = {"check": _check}
