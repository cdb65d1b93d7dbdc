"""`diloco launch`: a fleet of machines on an engine that people have, from its start to its end."""

import shlex
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from diloco.cli._command import asks_for_help, choose
from diloco.cli._streams import hinted
from diloco.errors import UserError
from diloco.files import expanded
from diloco.fleets.engine import EngineName
from diloco.fleets.fleet_file import read_launch
from diloco.fleets.launch import LAUNCHES, planned, resize, start, states, stop

HELP = "machines that train: diloco launch FLEET.toml --on ENGINE [--dry-run] | status | stop | resize LAUNCH"
ORDER = 11
_LAUNCH: TypeAlias = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="LAUNCH")]
_Counts: TypeAlias = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="KIND=COUNT …")]


def run(arguments: list[str]) -> None:
    """Launch a fleet, or do with a launch what a command line asks."""
    if arguments and (arguments[0].endswith(".toml") or Path(arguments[0]).is_file()):
        arguments = ["start", *arguments]
    if arguments and arguments[0].startswith("--") and not asks_for_help(arguments):
        raise UserError("name the fleet's file before the flags: diloco launch FLEET.toml --on ENGINE")
    choose(_COMMANDS, arguments, prog="diloco launch")


def _start(
    fleet: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FLEET.toml")],
    on: EngineName,
    output: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Start each machine of a fleet file; the word `start` may be left out.

    Args:
        fleet: A file with [launch] and [[machines]].
        on: The engine that has the machines; local is this one.
        output: Directory of the launch, whose last word is its name; left out, launches/ and the file's name.
        dry_run: Write what would be submitted, and print the commands; nothing is sent.
    """
    directory = LAUNCHES / fleet.stem if output is None else expanded(output)
    read = read_launch(expanded(fleet))
    if dry_run:
        plan = planned(read, on, directory)
        for name in plan.files:
            print(directory / name)
        for command in plan.commands:
            print(" ".join(command) if command[0] == "#" else shlex.join(command))
        return
    look = shlex.join(["diloco", "launch", "status", str(directory)])
    with hinted(f"see what runs: {look}", when=lambda: (directory / "launch.json").exists()):
        launch = start(read, on, directory)
    for name, job in launch.jobs.items():
        print(f"{name}  {job}")
    print(f"next: {look}")


def _status(launch: _LAUNCH) -> None:
    """Show the state of each machine: waiting, running, finished, failed, stopped, or lost.

    Args:
        launch: The launch's directory, or its name in launches/.
    """
    for name, state in states(_directory(launch)).items():
        print(f"{name}  {state}")


def _stop(launch: _LAUNCH) -> None:
    """End all machines of a launch; the replicas save, and leave the run.

    Args:
        launch: The launch's directory, or its name in launches/.
    """
    for name in stop(_directory(launch)):
        print(f"{name}  stops")


def _resize(launch: _LAUNCH, counts: _Counts) -> None:
    """Add machines of a kind, or end those with the highest numbers.

    Args:
        launch: The launch's directory, or its name in launches/.
        counts: The number of machines by kind, such as 4090=6.
    """
    sizes: dict[str, int] = {}
    for word in counts:
        kind, equals, count = word.rpartition("=")
        if not equals or not count.isdecimal():
            raise UserError(f"{word!r:.80} is not KIND=COUNT, such as 4090=6")
        sizes[kind] = int(count)
    if not sizes:
        raise UserError("name a kind and its number, such as 4090=6")
    added, ended = resize(_directory(launch), sizes)
    for name in added:
        print(f"{name}  starts")
    for name in ended:
        print(f"{name}  stops")


def _directory(launch: Path) -> Path:
    directory = expanded(launch)
    return LAUNCHES / directory if not directory.exists() and (LAUNCHES / directory).exists() else directory


_COMMANDS = {"start": _start, "status": _status, "stop": _stop, "resize": _resize}
