"""Launches: a fleet is started on an engine, looked at, resized, and ended; each launch has a directory."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from diloco.errors import UserError
from diloco.files import make_directory, write_atomically, write_json
from diloco.fleets.engine import EXIT_SUFFIX, Engine, EngineName, Launch, State, Submission
from diloco.fleets.fleet_file import Fleet, index_of, kind_of
from diloco.fleets.kubernetes import Kubernetes
from diloco.fleets.local import Local
from diloco.fleets.ray import Ray
from diloco.fleets.skypilot import SkyPilot
from diloco.fleets.slurm import Slurm
from diloco.schema import Name, checked_name, read_json

LAUNCHES = Path("launches")
"""The directory of launches that are given by name."""
_RECORD = "launch.json"
_SECONDS_BETWEEN_RECORDS = 1.0
"""Slurm accepts twenty thousand machines at once, and a record of them has a megabyte."""
_ENGINES: Mapping[EngineName, Engine] = {
    "local": Local(),
    "slurm": Slurm(),
    "ray": Ray(),
    "skypilot": SkyPilot(),
    "kubernetes": Kubernetes(),
}


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The record of a launch on disk."""

    engine: EngineName
    """The engine."""
    name: Name
    """The launch's name."""
    fleet: Fleet
    """The fleet, as it was resized."""
    jobs: dict[str, str] = field(default_factory=dict)
    """As in `Launch`."""


def planned(fleet: Fleet, engine: EngineName, directory: Path) -> Submission:
    """Write the files that a launch of a fleet would submit; nothing is sent.

    Args:
        fleet: the machines.
        engine: the engine's name.
        directory: the launch's, whose name is the launch's name.

    Returns:
        The files, and the commands that would be run.

    Raises:
        UserError: if the fleet can't work on the engine.
    """
    _ENGINES[engine].check(fleet)
    directory = directory.absolute()
    launch = Launch(name=checked_name(directory.name), directory=directory, fleet=fleet)
    submission = _ENGINES[engine].submission(launch, fleet.names)
    _write(launch, submission)
    return submission


def start(fleet: Fleet, engine: EngineName, directory: Path) -> Launch:
    """Launch a fleet, and write its record to its directory as machines are submitted.

    Args:
        fleet: the machines.
        engine: the engine's name.
        directory: the launch's, whose name is the launch's name.

    Raises:
        UserError: if the fleet can't work on the engine, runs already, or has the name of another one that runs.
        DilocoError: if the engine refuses; the record holds what it has accepted.
    """
    directory = directory.absolute()
    if (directory / _RECORD).exists() and (running := _living(states(directory))):
        raise UserError(
            f"{directory} is launched already, and {running[0]} has not ended: stop the launch, or choose another "
            "output",
            "output",
        )
    planned(fleet, engine, directory)
    record = _Record(engine=engine, name=checked_name(directory.name), fleet=fleet)
    launch, known = _launch(record, directory), _ENGINES[engine]
    jobs = {name: job for name in fleet.names if (job := known.job(launch, name)) is not None}
    if jobs and (running := _living(known.states(launch.with_jobs(jobs)))):
        raise UserError(
            f"{engine} runs a launch of this name, {launch.name}, from another directory, whose {running[0]} has "
            "not ended: stop that one, or choose an output of another name",
            "output",
        )
    return _submit(record, directory, fleet.names)


def _living(states: Mapping[str, State]) -> list[str]:
    """The machines that run, or wait."""
    return [name for name, state in states.items() if state in ("waiting", "running")]


def states(directory: Path) -> Mapping[str, State]:
    """The state of each machine of a launch.

    Raises:
        UserError: if the directory holds no launch.
        DilocoError: if the engine does not answer.
    """
    record, launch = _opened(directory)
    return _ENGINES[record.engine].states(launch)


def stop(directory: Path) -> tuple[str, ...]:
    """End all machines of a launch, and return their names.

    Raises:
        UserError: if the directory holds no launch.
        DilocoError: if the engine does not answer.
    """
    record, launch = _opened(directory)
    names = tuple(launch.jobs)
    _ENGINES[record.engine].stop(launch, names)
    return names


def resize(directory: Path, counts: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give kinds of machines another number: those with the highest numbers end, or new ones are submitted.

    Args:
        directory: the launch's.
        counts: the number of machines by kind.

    Returns:
        The machines that are added, and those that are ended.

    Raises:
        UserError: for a kind that the fleet does not have, and for a fixed group.
        DilocoError: if the engine refuses.
    """
    record, launch = _opened(directory)
    fleet = record.fleet
    if fleet.launch.rendezvous is None:
        raise UserError(
            f"{directory} runs a fixed group, whose members stay: stop it, and launch one of another size"
        )
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name}={count}: at least one machine stays; stop the launch to end all")
        kind = fleet.kind(name)
        machines = tuple(replace(kind, count=count) if one is kind else one for one in fleet.machines)
        fleet = replace(fleet, machines=machines)
    surplus = tuple(name for name in launch.jobs if name not in fleet.names)
    _ENGINES[record.engine].stop(launch, surplus)
    record = replace(record, fleet=fleet, jobs={n: job for n, job in launch.jobs.items() if n not in surplus})
    _save(record, directory)
    added = tuple(name for name in fleet.names if name not in record.jobs)
    if added:
        _write(_launch(record, directory), _ENGINES[record.engine].submission(_launch(record, directory), added))
        _submit(record, directory, added)
    return added, surplus


def _submit(record: _Record, directory: Path, names: Sequence[str]) -> Launch:
    _save(record, directory)
    for name in names:
        (directory / f"{name}{EXIT_SUFFIX}").unlink(missing_ok=True)  # of an earlier launch
    saved = time.monotonic()
    try:
        for name, job in _ENGINES[record.engine].submit(_launch(record, directory), names):
            record.jobs[name] = job
            if time.monotonic() > saved + _SECONDS_BETWEEN_RECORDS:
                _save(record, directory)
                saved = time.monotonic()
    finally:
        _save(record, directory)
    return _launch(record, directory)


def _launch(record: _Record, directory: Path) -> Launch:
    by_kind = [kind.name for kind in record.fleet.machines]
    order = sorted(record.jobs, key=lambda name: (by_kind.index(kind_of(name)), index_of(name)))
    jobs = {name: record.jobs[name] for name in order}
    return Launch(name=record.name, directory=directory.absolute(), fleet=record.fleet, jobs=jobs)


def _opened(directory: Path) -> tuple[_Record, Launch]:
    if not (directory / _RECORD).exists():
        raise UserError(f"{directory} holds no launch: {directory / _RECORD} is missing")
    record = read_json(directory / _RECORD, _Record)
    return record, _launch(record, directory)


def _save(record: _Record, directory: Path) -> None:
    write_json(directory / _RECORD, asdict(record))


def _write(launch: Launch, submission: Submission) -> None:
    make_directory(launch.directory)
    for name, content in submission.files.items():
        # Another file: bash goes on reading the one that it runs.
        write_atomically(launch.directory / name, [content.encode()])
