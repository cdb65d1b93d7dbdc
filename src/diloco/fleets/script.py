"""The bash script of a machine: it prepares, starts the program, and passes signals on to it."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import UserError
from diloco.fleets.engine import EXIT_SUFFIX
from diloco.fleets.fleet_file import Fleet, Kind

DEFAULT_PORT = "29500"
"""Port of the meeting of a fixed group."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine as its script finds it, in expressions of bash."""

    index: str
    """The number among its kind."""
    first: str = ""
    """HOST of the first machine of all (a fixed group)."""
    site: str = ""
    """HOST of the first machine of its kind (a fixed group)."""
    site_port: int = 29400
    """Port of the meeting inside its kind (a fixed group)."""


def program_of(fleet: Fleet, kind: Kind, place: Place) -> list[str]:
    """The lines of bash that set a machine's variables, and last the one that is its program."""
    program, own = fleet.launch, kind.launch.arguments
    *lines, run = [program.command] if program.rendezvous is not None else _group_program(fleet, kind, place)
    name = (
        '--name "$DILOCO_NAME"' if program.is_train and program.rendezvous and not program.value_of("name") else ""
    )
    return [*lines, " ".join(filter(None, (run, own, name)))]


def _group_program(fleet: Fleet, kind: Kind, place: Place) -> list[str]:
    """One torchrun over all machines for `diloco train`; for another program one per kind, joined by `connect`."""
    program, kinds = fleet.launch, fleet.machines
    number = kinds.index(kind)
    address = program.address or f"{place.first}:{DEFAULT_PORT}"
    host, _, port = address.rpartition(":")
    if program.is_train:
        before = sum(other.count for other in kinds[:number])
        nodes, rank = sum(other.count for other in kinds), f"$(({before} + {place.index}))"
        # As it is written: bash expands its variables.
        settings = re.split(r"diloco['\"]?\s+['\"]?train['\"]?(?=\s|$)", program.command, maxsplit=1)[1]
        return [f"{_torchrun(nodes, kind.launch.processes, rank, host, port)} -m diloco train{settings}"]
    arguments = program.command.split(maxsplit=1)[1]
    exports = [
        f"export DILOCO_ADDRESS={address}",
        f"export DILOCO_REPLICA={number}",
        f"export DILOCO_NUM_REPLICAS={len(kinds)}",
    ]
    run = _torchrun(kind.count, kind.launch.processes, place.index, place.site, str(place.site_port))
    return [*exports, f"{run} {arguments}"]


def _torchrun(nodes: int, processes: int, rank: str, host: str, port: str) -> str:
    return (
        f'torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank "{rank}" --master-addr "{host}" '
        f"--master-port {port}"
    )


def preparation(fleet: Fleet) -> list[str]:
    """The lines of bash before a machine's program; one that fails ends the script."""
    program = fleet.launch
    return [
        "set -e",
        entering(program.directory),
        *(f"export {name}={shlex.quote(value)}" for name, value in program.environment.items()),
        *program.setup,
    ]


def entering(directory: str) -> str:
    """The line of bash that goes to a working directory, which may begin with ~/, the machine's own home.

    >>> entering("~/my work")
    "cd -- ~/'my work'"
    """
    home = "~/" if directory.startswith("~/") else ""
    return f"cd -- {home}{shlex.quote(directory.removeprefix(home))}"


def named(kind: Kind, place: Place) -> str:
    """The line of bash that gives a machine's program its name."""
    return f'export DILOCO_NAME="{kind.name}-{place.index}"'


def script(
    fleet: Fleet, kind: Kind, place: Place, *, exits: Path | None = None, after_notice: str | None = None
) -> str:
    """The script of a machine whose engine sends signals to its shell alone, or to all its processes.

    Args:
        fleet: the machines.
        kind: of the machine.
        place: the machine.
        exits: the directory with a file for its exit code; None for none.
        after_notice: the line that follows when the program has ended by SIGUSR1, the notice of a time limit.
    """
    *exports, program = program_of(fleet, kind, place)
    record = []
    if exits is not None:
        file = f'exit_file={shlex.quote(str(exits))}/"$DILOCO_NAME{EXIT_SUFFIX}"'
        record = [file, 'rm -f "$exit_file"', "trap 'echo $? > \"$exit_file\"' EXIT"]
    lines = [
        named(kind, place),
        *record,
        *preparation(fleet),
        *exports,
        f"{program} &",
        "child=$!",
        *(f"trap 'kill -s {signal} \"$child\" 2>/dev/null || true' {signal}" for signal in ("TERM", "USR1")),
        "set +e",
        'while kill -0 "$child" 2>/dev/null; do wait "$child"; done',
        'wait "$child"',
        "code=$?",
    ]
    if after_notice is not None:
        lines.append(f"if [ $code -eq {128 + 10} ]; then {after_notice}; fi")  # SIGUSR1 is 10 on Linux
    return "\n".join([*lines, "exit $code", ""])


def check_address(fleet: Fleet, *, sites: str) -> None:
    """Refuse a fixed group of several sites that do not know where they meet.

    Raises:
        UserError: if its address is missing.
    """
    if fleet.launch.rendezvous is None and len(fleet.machines) > 1 and fleet.launch.address is None:
        raise UserError(
            f"a fixed group of {len(fleet.machines)} {sites} needs an address: HOST:PORT of the first machine of "
            f"{fleet.machines[0].name}",
            "address",
        )
