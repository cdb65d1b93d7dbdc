"""The fleet file as launchers read it: what each machine runs, and how an engine asks for one of them."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec

from diloco.errors import UserError
from diloco.schema import Name, converted, read_toml
from diloco.simulator.fleet import FleetRun, Machines

Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """A machine as Slurm is asked for it."""

    partition: str | None = None
    """The partition; None is the cluster's default."""
    gres: str | None = None
    """Generic resources, such as `gpu:a100:8`."""
    time: str | None = None
    """The time limit, such as `12:00:00`; a replica of a store is requeued when it is over."""
    qos: str | None = None
    """The quality of service."""
    account: str | None = None
    """The account that pays."""
    options: tuple[str, ...] = ()
    """Other options of sbatch, each as a line of its script has it."""


@dataclass(frozen=True, kw_only=True)
class RayRequest:
    """A machine as Ray is asked for it."""

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """The bundle of its placement group, such as CPU = 8, GPU = 1."""


@dataclass(frozen=True, kw_only=True)
class SkyPilotRequest:
    """A machine as SkyPilot is asked for it."""

    accelerators: str | None = None
    """Kind and number of GPUs, such as `A100:8`."""
    cloud: str | None = None
    """The cloud, such as `aws`; None is the cheapest."""
    region: str | None = None
    """The region in it."""
    cpus: str | None = None
    """Number of cores, such as `8+`."""
    memory: str | None = None
    """Memory in GB, such as `32+`."""


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest:
    """A machine as Kubernetes is asked for it."""

    resources: Mapping[str, str] = field(default_factory=dict)
    """Requests and limits of its container, such as `nvidia.com/gpu` = "8"."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes."""
    tolerations: tuple[Mapping[str, str], ...] = ()
    """Taints of the nodes that its pod tolerates."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become environment variables, such as a bucket's credentials."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One machine of a kind, as each engine is asked for it.

    Raises:
        UserError: if its arguments are not one line.
    """

    spot: bool = False
    """True if it may be taken away at any time."""
    arguments: str = ""
    """Words that follow the command on these machines, such as a batch of their own."""
    processes: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Processes per machine of a fixed group."""
    slurm: SlurmRequest = field(default_factory=SlurmRequest)
    """Slurm's."""
    ray: RayRequest = field(default_factory=RayRequest)
    """Ray's."""
    skypilot: SkyPilotRequest = field(default_factory=SkyPilotRequest)
    """SkyPilot's."""
    kubernetes: KubernetesRequest = field(default_factory=KubernetesRequest)
    """Kubernetes'."""

    def __post_init__(self) -> None:
        """Refuse line breaks, at which bash would end the program's command."""
        if "\n" in self.arguments:
            raise UserError(
                f"arguments={self.arguments!r:.200} must be one line: leave out the line breaks", "arguments"
            )


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Machines of one kind; in a fixed group they are one site."""

    name: Name
    """The kind; its machines are called NAME-0, NAME-1, and so on."""
    count: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    """Machines of it."""
    launch: Request = field(default_factory=Request)
    """Each of them, as engines are asked for it."""

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines' names."""
        return tuple(f"{self.name}-{index}" for index in range(self.count))


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of every machine, and what it needs.

    Raises:
        UserError: if the program could not be run so on several machines.
    """

    command: str
    """The program with its arguments. With a rendezvous each machine is a replica, and gets a name of its own:
    that of `diloco train`, and for other programs the variable DILOCO_NAME. Without one, all are a fixed group."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    directory: str = "."
    """The working directory on each machine."""
    setup: tuple[str, ...] = ()
    """Lines of bash that come before the program."""
    image: str | None = None
    """The container's image (SkyPilot, Kubernetes)."""
    address: str | None = None
    """HOST:PORT of the first machine, at which a fixed group of several sites meets."""
    ray_address: str = "auto"
    """Address of the Ray cluster."""

    def __post_init__(self) -> None:
        words = self.words
        if not words or {"&", "&&", "|", "||", ";"} & {*words} or any(word.endswith(";") for word in words):
            raise UserError(
                f"command={self.command!r:.200} must be one program: what comes before it belongs to setup",
                *("command", "setup"),
            )
        if "\n" in self.command:
            raise UserError(
                f"command={self.command!r:.200} must be one line: leave out the line breaks",
                "command",
            )
        if words[0].partition("=")[0].isidentifier() and "=" in words[0]:
            raise UserError(
                f"command={self.command!r:.200} must begin with a program: {words[0]} belongs to environment",
                *("command", "environment"),
            )
        if self.is_train and self.value_of("name") not in (None, "$DILOCO_NAME"):
            raise UserError(
                f"command={self.command!r:.200} gives all replicas one name: leave it out, each gets its own",
                "command",
            )
        for name in self.environment:
            if not name.isidentifier() or not name.isascii():
                raise UserError(f"environment: {name!r:.80} is no name of a variable", "environment")
        if self.address is not None and not self.address.rpartition(":")[2].isdecimal():
            raise UserError(f"address={self.address!r:.80} must be HOST:PORT", "address")

    @property
    def words(self) -> list[str]:
        """The command's words."""
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"command={self.command!r:.200} can't be read: {error}", "command") from None

    @property
    def is_train(self) -> bool:
        """True if the program is `diloco train`."""
        names = [PurePath(word).name for word in self.words]
        return ("diloco", "train") in pairwise(names)

    @property
    def rendezvous(self) -> str | None:
        """The store at which replicas meet; None for a fixed group."""
        return self.value_of("rendezvous")

    def value_of(self, field: str) -> str | None:
        """The value that the command gives a setting; None where it gives none."""
        flag = f"--{field}"
        for word, after in zip(self.words, [*self.words[1:], ""], strict=True):
            if word == flag or word.startswith(f"{flag}="):
                return after if word == flag else word.partition("=")[2]
        return None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines, and what they run.

    Raises:
        UserError: if that can't work on any engine.
    """

    launch: Program
    """The program."""
    machines: tuple[Kind, ...]
    """The machines by kind."""

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.machines]
        if not names:
            raise UserError("the fleet has no machines", "machines")
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"two kinds of machines have the name {twice[0]}, and two replicas would have the name "
                f"{twice[0]}-0: rename one",
                "machines",
            )
        if self.launch.rendezvous is None:
            self._check_group()
            return
        many = [kind for kind in self.machines if kind.launch.processes > 1]
        if many or self.launch.address is not None:
            field, value = ("processes", many[0].launch.processes) if many else ("address", self.launch.address)
            raise UserError(
                f"{field}={value} is for a fixed group, and command has a rendezvous: leave it out; the processes "
                "of a replica are its shards_per_replica",
                *(field, "command"),
            )

    def _check_group(self) -> None:
        program, words = self.launch, self.launch.words
        for kind in self.machines:
            if kind.launch.spot:
                raise UserError(
                    f"spot=true of {kind.name}: a fixed group ends when one of its machines is taken away; give "
                    "command a rendezvous, so that replicas may come and go",
                    *("spot", "command"),
                )
        if not program.is_train and (words[0] not in ("python", "python3") or len(words) == 1):
            raise UserError(
                f"command={program.command!r:.200} has no rendezvous, and torchrun starts a fixed group: "
                "it must be diloco train …, or python PROGRAM …",
                "command",
            )
        if program.is_train and len({kind.launch.processes for kind in self.machines}) > 1:
            raise UserError(
                "processes differ between the kinds of machines, and one torchrun spans them: give all the same",
                "processes",
            )

    def kind(self, name: str) -> Kind:
        """The kind of this name.

        Raises:
            UserError: if there is none.
        """
        for kind in self.machines:
            if kind.name == name:
                return kind
        known = ", ".join(kind.name for kind in self.machines)
        raise UserError(f"the fleet has no machines {name!r:.80}: it has {known}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all machines."""
        return tuple(name for kind in self.machines for name in kind.machines)


def kind_of(machine: str) -> str:
    """The kind of a machine.

    >>> kind_of("a100-80-3")
    'a100-80'
    """
    return machine.rpartition("-")[0]


def index_of(machine: str) -> int:
    """The number of a machine among its kind.

    >>> index_of("a100-80-3")
    3
    """
    return int(machine.rpartition("-")[2])


def read_launch(path: Path) -> Fleet:
    """The part of a fleet file that launchers read; that of the simulator may stand there, too.

    Raises:
        FileError: if it is no such file, naming what is wrong.
    """
    values = read_toml(path)
    if "launch" not in values:
        raise UserError(f"{path} says how fast machines are, and not what they run: add [launch] with command = …")
    kinds = values.get("machines")
    if isinstance(kinds, list):
        kinds = [_without(kind, Machines, Kind) if isinstance(kind, dict) else kind for kind in kinds]
        values = values | {"machines": kinds}
    return converted(_without(values, FleetRun, Fleet), Fleet, source=str(path))


def _without(values: Table, simulated: type, launched: type) -> dict[str, Any]:
    """A table without the fields that only the simulator reads."""
    names = {each.name for each in fields(simulated)} - {each.name for each in fields(launched)}
    return {name: value for name, value in values.items() if name not in names}
