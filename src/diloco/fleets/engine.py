"""The contract of the engines that start machines, and the commands by which they are asked."""

import math
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from diloco.errors import DilocoError, UserError
from diloco.files import require
from diloco.fleets.fleet_file import Fleet, kind_of
from diloco.schema import Name

EngineName = Literal["local", "slurm", "ray", "skypilot", "kubernetes"]
State = Literal["waiting", "running", "finished", "failed", "stopped", "lost"]
"""`waiting` for a machine, also after a preemption; `stopped` by a signal; `lost`: the engine does not know it."""

EXIT_SUFFIX = ".exit"
"""The end of the name of the file with the exit code of a machine's program."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A fleet on an engine."""

    name: Name
    """The launch, as engines call it."""
    directory: Path
    """The directory with its record, what is submitted, and logs where machines see this directory."""
    fleet: Fleet
    """The machines, and what they run."""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """The engine's name of the job of each machine that was submitted."""

    def of_kind(self, kind: str) -> list[str]:
        """The machines of a kind that were submitted."""
        return [name for name in self.jobs if kind_of(name) == kind]

    def file(self, name: str) -> str:
        """The path of a file of the launch."""
        return str(self.directory / name)

    def with_jobs(self, jobs: Mapping[str, str]) -> "Launch":
        """The launch with these jobs alone."""
        return replace(self, jobs=dict(jobs))


@dataclass(frozen=True, kw_only=True)
class Submission:
    """All that would be submitted."""

    files: Mapping[str, str]
    """Contents by name, to be written to the launch's directory."""
    commands: tuple[tuple[str, ...], ...]
    """The commands, in order."""


class Engine(Protocol):
    """One of the engines."""

    def check(self, fleet: Fleet) -> None:
        """Refuse a fleet that can't work on this engine.

        Raises:
            UserError: with the reason.
        """
        ...

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """The files and commands by which machines would be submitted; nothing is sent."""
        ...

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Submit machines, whose files are written: each one's name, and its job, as soon as it is submitted."""
        ...

    def job(self, launch: Launch, name: str) -> str | None:
        """The job of a machine where it has the launch's name in it; None where the engine gives it a number."""
        ...

    def states(self, launch: Launch) -> Mapping[str, State]:
        """The state of each machine that was submitted."""
        ...

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """End the jobs of machines; their replicas save and leave."""
        ...


def asked(command: Sequence[str], *, engine: str, seconds: float = 120.0) -> str:
    """The output of an engine's command.

    Args:
        command: the program and its arguments.
        engine: its name, for errors.
        seconds: how long it may take.

    Raises:
        UserError: if the program is not installed here.
        DilocoError: if it fails, with the last line that it wrote.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=True, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here: launch where {engine} is") from None
    except subprocess.TimeoutExpired:
        raise DilocoError(f"{command[0]} has not answered within {seconds:g} s: try again later") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        raise DilocoError(f"{engine} refuses {' '.join(command[:3])}: {lines[-1] if lines else error}") from None
    return done.stdout


def as_yaml(value: Any) -> str:
    """A value of JSON as YAML that people read: texts of several lines as they are.

    All others are in quotes: parsers differ in which of them, such as 1e3, are numbers.

    >>> print(as_yaml({"a": [1, {"b": "x", "c": "1\\n2\\n"}]}))
    "a":
    - 1
    - "b": "x"
      "c": |
        1
        2
    <BLANKLINE>
    """
    yaml = require("yaml", extra="train")
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    tag = "tag:yaml.org,2002:str"
    dumper.add_representer(str, lambda to, text: to.represent_scalar(tag, text, '"|'["\n" in text]))
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def ended(launch: Launch, name: str) -> State:
    """The state of a machine that has no process any more, by the exit code that its script wrote."""
    try:
        code = int((launch.directory / f"{name}{EXIT_SUFFIX}").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return "lost"
    return "finished" if code == 0 else "stopped" if code > 128 else "failed"


def refuse_group(fleet: Fleet, reason: str) -> None:
    """Refuse a fixed group where the engine starts none.

    Raises:
        UserError: if the fleet is one.
    """
    if fleet.launch.rendezvous is None:
        raise UserError(
            f"command={fleet.launch.command!r:.200} has no rendezvous: {reason}", *("command", "rendezvous")
        )


def refuse_image(fleet: Fleet, reason: str) -> None:
    """Refuse an image where the engine starts none.

    Raises:
        UserError: if the fleet has one.
    """
    if fleet.launch.image is not None:
        raise UserError(f"image={fleet.launch.image!r:.200}: {reason}", "image")


def refuse_directory_store(fleet: Fleet, engine: str) -> None:
    """Refuse a store that other machines can't see.

    Raises:
        UserError: if the store is a directory.
    """
    url = fleet.launch.rendezvous
    if url is not None and ("://" not in url or url.startswith("file:")):
        raise UserError(
            f"rendezvous={url} is a directory, which no other machine of {engine} sees: take a bucket, such as "
            "s3://bucket/run",
            *("rendezvous", "command"),
        )
