"""Joining the other processes: which replica and shard this one is, and its groups."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import DilocoError, DisagreementError, ExchangeError, UserError, setting
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.notices import Notices
from diloco.exchange.process_group import GroupExchange, ProcessGroupExchange, TorchGroup, group_like
from diloco.exchange.transport import Group, LoopbackExchange, OneProcess, Transport, wait_for_all
from diloco.training.config.config import TrainConfig
from diloco.training.config.resolve import facts_with_rendezvous, text_facts
from diloco.training.hardware import chosen_device, chosen_precision, warn_of_emulation
from diloco.training.processes import STORE, process_name, under_a_launcher

if TYPE_CHECKING:
    from diloco.rendezvous.store_rendezvous import StoreRendezvous

_SECONDS_TO_LEAVE = 25.0
"""Time to leave a run: less than the launcher, torchrun, and providers of spot instances wait before they kill."""


@contextmanager
def rendezvous_of(config: TrainConfig) -> Iterator["StoreRendezvous"]:
    """The rendezvous of a run; the engine joins it, and at the end of the context this replica leaves.

    Raises:
        UserError: for a URL or a name that can't be right.
    """
    from diloco.rendezvous.store_rendezvous import (
        StoreRendezvous,  # with its libraries, which no fixed group needs
    )

    assert config.rendezvous is not None and config.data.prepared is not None, "the config is resolved"
    if config.name == (elastic := config.elastic).bridge:
        raise UserError(f"name={config.name} is the bridge's: give this replica another", "name", "elastic.bridge")
    with setting("rendezvous", config.rendezvous):
        rendezvous = StoreRendezvous(
            config.rendezvous,
            name=config.name,
            num_replicas=config.num_replicas,
            **vars(elastic),
            step_tokens=config.replica_tokens,
            timeout_seconds=config.timeout_seconds,
            facts=facts_with_rendezvous(config) | text_facts(config.data).shared,
        )
    with leaving(rendezvous):
        yield rendezvous


@contextmanager
def leaving(rendezvous: "StoreRendezvous") -> Iterator[None]:
    """A context at whose end this replica leaves its run.

    After an error and on a signal, too: payloads on their way are uploaded before, and still counted.
    """
    try:
        yield
    except BaseException:
        with suppress(DilocoError):  # the first error is the one to report
            rendezvous.leave(seconds=_SECONDS_TO_LEAVE)
        raise
    rendezvous.leave()


_LOG = logging.getLogger("diloco")


_MOST_NAMES = 8
_REMEDY = "start the replicas within that time of each other, or raise timeout_seconds"


def store_with_all(
    *, rank: int, world_size: int, name_of: Callable[[int], str], timeout_seconds: float
) -> dist.Store:
    """The store of all processes, once they all have come to it; after a moment it is said who has not.

    It is a file of our own launcher, which opens no port, and else the one that torchrun describes in the
    environment.

    Args:
        rank: of this process.
        world_size: number of processes.
        name_of: how a process is called, such as `replica 1`.
        timeout_seconds: how long to wait.

    Raises:
        UserError: if the port at which they are to meet is in use.
        ExchangeError: naming the processes that have not come.
        RuntimeError: if what listens at the address is no such store.
    """
    timeout, begin = timedelta(seconds=timeout_seconds), time.monotonic()
    path = os.environ.get(STORE)
    store = dist.FileStore(path, world_size) if path else _torchruns_store(rank, name_of(0), timeout, begin)
    store.set_timeout(timeout)
    meeting = _Meeting(store, rank, world_size)
    wait_for_all(
        lambda: ", ".join(map(name_of, (meeting.missing() or [])[:_MOST_NAMES])),
        begin=begin,
        seconds=timeout_seconds,
        remedy=_REMEDY,
    )
    return meeting.store


class _Meeting:
    """The meeting of the processes of one attempt, at a store that may hold the keys of earlier ones.

    torchrun restarts all processes at the same store, and its count of restarts differs between machines. So
    the first process names the attempt by a number that nobody has used, the others write their own numbers
    under that name, and the attempt has met once the first process has answered with the numbers of all.

    Args:
        store: of all processes.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._everyones, self._rank, self._ranks = store, rank, range(world_size)
        self._attempt, self._own = "", secrets.token_hex(8)
        self._waiting = [*self._ranks]
        self.store = store
        """The keys of this attempt alone, once its processes have met."""
        if rank == 0:
            store.set(_ATTEMPT, self._own)

    def missing(self) -> list[int] | None:
        """The processes that have not come; None once all have."""
        if not self._everyones.check([_ATTEMPT]):
            return [0]
        if (attempt := self._everyones.get(_ATTEMPT).decode()) != self._attempt:
            self._attempt, self._waiting = attempt, [*self._ranks]
            self.store = dist.PrefixStore(f"diloco/{attempt}", self._everyones)
            self.store.set(_key(self._rank), self._own)
        self._waiting = _missing(self.store, self._waiting)
        if self._waiting:
            return self._waiting
        if self._rank == 0:
            self.store.set(_ANSWER, " ".join(self.store.get(_key(rank)).decode() for rank in self._ranks))
        # An earlier attempt has an answer, too, which doesn't hold this process's number.
        met = self.store.check([_ANSWER]) and self._own in self.store.get(_ANSWER).decode().split()
        return None if met else [0]


_ATTEMPT, _ANSWER = "diloco: the attempt", "diloco: all are here"


def _torchruns_store(rank: int, first: str, timeout: timedelta, begin: float) -> dist.Store:
    """The store that the environment describes; the first process opens it, unless torchrun has."""
    host, port = _address()
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not opens:
        wait_for_all(
            lambda: "" if _is_reached(host, port) else first,
            begin=begin,
            seconds=timeout.total_seconds(),
            where=f" at {host}, port {port}",
            remedy=f"{_REMEDY}, and check that this machine reaches that address",
        )
    try:
        store = dist.TCPStore(host, port, is_master=opens, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {port} of {host} is in use: set MASTER_PORT to another one, the same for all"
            ) from error
        raise
    return store


def name_for_all(own: str, config: TrainConfig) -> str:
    """The name of a run that was given none: `own`, if this process is the first to reach torchrun's store.

    Processes that are started again read the same name there, as if it had been given.

    Raises:
        UserError: if torchrun holds no such store, where all would meet before the first process opens one.
        ExchangeError: if it can't be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError("under this launcher set name: all replicas must know their run by it", "name")
    first, timeout = process_name(config.processes_per_replica, 0), timedelta(seconds=config.timeout_seconds)
    try:
        store = _torchruns_store(int(os.environ["RANK"]), first, timeout, time.monotonic())
        return store.compare_set(_NAME, "", own).decode(errors="replace")
    except ExchangeError:  # it says that the first process was not reached
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ExchangeError(f"torchrun's store does not tell the run's name ({reason}): set name") from error


_NAME = "diloco: the run's name"


def _address() -> tuple[str, int]:
    """Host and port of torchrun's store.

    Raises:
        UserError: if the environment lacks them, or the port is none.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"RANK is set in the environment, but {' and '.join(missing)} {verb} missing: use torchrun"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f"MASTER_PORT={port!r:.40} in the environment is no port: use torchrun")
    return host, int(port)


def _missing(store: dist.Store, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"diloco: process {rank} is here"


def _is_reached(host: str, port: int) -> bool:
    """True if somebody listens there; a name that can't be resolved may belong to a machine that starts later."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class World:
    """The place of this process among the others: its number is replica · num_ranks + rank."""

    exchange: Transport
    """The exchange with the other replicas, of this process's shard where the replica is sharded."""
    everyone: Transport
    """The exchange with all processes, in the order of their ranks; `exchange` if a replica is one process."""
    mesh: DeviceMesh | None
    """replica × copy × shard × tensor, without those of the last three that have one process; None if a replica is
    not sharded."""
    group: Group
    """This replica's processes, where they compute."""
    host_group: Group
    """This replica's processes on their hosts, for its checkpoints, which a thread writes."""
    device: torch.device
    """The device on which this process computes."""
    is_first_on_machine: bool
    """True if this process writes the files that the processes of one machine share."""
    precision: str
    """bf16, fp32 or bf16-params: the config's, where `auto` is decided by the device."""
    num_readers: int = 1
    """The processes of this replica, or groups of processes in a row, that read sequences of their own."""
    rendezvous: "StoreRendezvous | None" = None
    """The run of replicas that come and go, in the place of the exchange, which has nobody to reach then; of a
    replica's processes only the first has joined it."""
    store: dist.Store | None = None
    """A store of all processes, in which a stop of the run is announced; None in a process alone."""

    @property
    def autocast(self) -> bool:
        """True if the forward pass runs in bfloat16 autocast."""
        return self.precision == "bf16"

    @property
    def replica(self) -> int:
        """This replica, from 0; with a rendezvous 0, since its directory is its own."""
        return self.exchange.replica

    @property
    def num_replicas(self) -> int:
        """M."""
        return self.exchange.num_replicas

    @property
    def num_ranks(self) -> int:
        """The number of processes in a replica."""
        return self.everyone.num_replicas // self.num_replicas

    @property
    def rank(self) -> int:
        """This process within its replica, from 0."""
        return self.everyone.replica % self.num_ranks

    @property
    def reader(self) -> int:
        """This process, or its group, among those of the replica that read sequences of their own."""
        return self.rank * self.num_readers // self.num_ranks

    def name_of(self, replica: int) -> str:
        """The name of a replica in an outer step's cohort."""
        return str(replica) if self.rendezvous is None else self.rendezvous.state.members[replica].name

    def over_ranks(self, value: float) -> float:
        """The sum of a number over the processes of the replica; each of them must call it."""
        if self.group.size == 1:
            return value
        return self.group.reduce(torch.tensor(value, dtype=torch.float64, device=self.device)).item()


@contextmanager
def join(config: TrainConfig) -> Iterator[World]:
    """Join the world that torchrun or our own launcher describes in the environment, and leave it at the end.

    Raises:
        UserError: if its size is not the config's number of processes, or the device is missing.
        DisagreementError: if the processes were started with other numbers of replicas, processes or connections.
        ExchangeError: if the other processes don't join in time, or can't be reached.
    """
    rank, world_size, local_rank = _place()
    if world_size != config.num_processes:
        raise _wrong_number(config, world_size)
    # Its collectives run on the GPU, where one process per GPU can take part.
    shares = config.method != "data_parallel" and config.processes_per_replica == 1
    device, is_alone = chosen_device(config.device, local_rank, shares=shares), world_size == 1
    if local_rank == 0:
        warn_of_emulation(config.precision, device)
    processes = (
        nullcontext(alone(config.precision, device)) if is_alone else _joined(config, device, rank, local_rank)
    )
    with processes as world, nullcontext() if config.rendezvous is None else rendezvous_of(config) as rendezvous:
        yield replace(world, rendezvous=rendezvous)


def _place() -> tuple[int, int, int]:
    """This process's number, how many there are, and its number on this machine, as a launcher has set them."""
    if not under_a_launcher():
        return 0, 1, 0
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except KeyError as missing:
        raise UserError(f"RANK is set, and {missing} is not: unset RANK, or use torchrun") from None
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK must be numbers: {error}") from None
    return rank, world_size, local_rank


def _wrong_number(config: TrainConfig, world_size: int) -> UserError:
    """The refusal of a launcher's number of processes, with the replicas, or shards, that they would make."""
    started = f"the launcher started {world_size} process{'es' * (world_size != 1)}"
    if config.rendezvous is not None:
        return UserError(
            f"{started} with rendezvous={config.rendezvous}, where they are the shards of one replica, and "
            f"shards_per_replica={config.shards_per_replica}: set it to {world_size}",
            *("shards_per_replica", "rendezvous"),
        )
    inside = {name: getattr(config, name) for name in ("shards_per_replica", "ddp_per_replica")}
    others = "".join(f" with {name}={number}" for name, number in inside.items() if number > 1)
    num_replicas, rest = divmod(world_size, config.processes_per_replica)
    remedy = "" if rest or not num_replicas else f", or set num_replicas={num_replicas}"
    return UserError(
        f"{started}, and num_replicas={config.num_replicas}{others} needs {config.num_processes}: have it start "
        f"{config.num_processes}{remedy}",
        *("num_replicas", *inside),
    )


@contextmanager
def _joined(config: TrainConfig, device: torch.device, rank: int, local_rank: int) -> Iterator[World]:
    """The world of several processes, which is left at the end."""
    if rank == 0 and STORE not in os.environ:
        _warn_of_open_ports()
    timeout, world_size = timedelta(seconds=config.timeout_seconds), config.num_processes
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        names, seconds = partial(process_name, config.processes_per_replica), config.timeout_seconds
        store = store_with_all(rank=rank, world_size=world_size, name_of=names, timeout_seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        _agree_on_groups({name: getattr(config, name) for name in _GROUPS})
        world = replace(world_of(config, device, timeout, is_first_on_machine=local_rank == 0), store=store)
    except ExchangeError:  # it says who is missing
        raise
    except RuntimeError as error:
        where = os.environ.get(STORE) or os.environ.get("MASTER_ADDR")
        raise ExchangeError(
            f"the {world_size} processes could not join at {where}: start them within "
            f"{config.timeout_seconds:g} s of each other, check the address, and name the network interface "
            f"between them in GLOO_SOCKET_IFNAME ({str(error).splitlines()[0]})"
        ) from error
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _warn_of_open_ports() -> None:
    """Say what torch opens under torchrun, and to whom."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    _LOG.warning(
        "torch listens on port %s of every network interface of %s, and gloo on ports of %s, without a password: "
        "anybody who reaches them can read and disturb this run, and run code in it where torchrun meets by c10d, "
        "which loads pickles: use a VPN, a store with keys (rendezvous), or diloco.connect with a secret",
        os.environ.get("MASTER_PORT"),
        os.environ.get("MASTER_ADDR"),
        f"the interface {interface}" if interface else "the address of each host's name",
    )


_GROUPS = ("num_replicas", "shards_per_replica", "tensor_parallel", "ddp_per_replica", "num_connections")
"""The settings that decide which groups there are."""


def _agree_on_groups(numbers: Mapping[str, int]) -> None:
    """Compare the numbers of these settings, before any group is made."""
    names, mine = [*numbers], torch.tensor([*numbers.values()], dtype=torch.int64, device="cpu")
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    everyones = [tuple(theirs.tolist()) for theirs in gathered]
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise DisagreementError(
                f"the processes disagree on ({', '.join(names)}): process 0 has {everyones[0]}, process {rank} "
                f"has {theirs}; start them with the same settings",
                *names,
            )


def world_of(config: TrainConfig, device: torch.device, timeout: timedelta, *, is_first_on_machine: bool) -> World:
    """Make the groups of this process; payloads travel on gloo from the CPU, while the device computes."""
    num_replicas, num_ranks = config.num_local_replicas, config.processes_per_replica

    def group(
        ranks: list[list[int]], backend: str | None = "gloo", timeout: timedelta = timeout
    ) -> dist.ProcessGroup:
        """This process's group, of several that all processes make together."""
        mine = None
        for members in ranks:
            made = dist.new_group(members, backend=backend, timeout=timeout)
            mine = made if dist.get_rank() in members else mine
        assert isinstance(mine, dist.ProcessGroup), "every process is a member of one"
        return mine

    def exchange(group: dist.ProcessGroup, num_connections: int = 1) -> Transport:
        if group.size() == 1:
            return LoopbackExchange()
        seconds = config.timeout_seconds
        return ProcessGroupExchange(group, timeout_seconds=seconds, num_connections=num_connections)

    ranks = [[replica * num_ranks + rank for rank in range(num_ranks)] for replica in range(num_replicas)]
    by_rank = [list(others) for others in zip(*ranks, strict=True)]
    same_rank, own_group = group(by_rank), group(ranks)
    others = everyone = own_device_group = mesh = None
    if num_ranks > 1:
        everyone = exchange(group([list(range(config.num_processes))]))
        # Longer than an exchange's own, so that its error, which names the replicas, comes first.
        own_device_group = group(ranks, backend=None, timeout=3 * timeout)
    if config.shards_per_replica > 1:
        # Data-Parallel sums gradients where they are; the payloads of an engine travel on gloo.
        between = group(by_rank, backend=None) if config.method == "data_parallel" else same_rank
        sizes = {
            "copy": config.ddp_per_replica,
            "shard": config.shards_per_replica // config.tensor_parallel,
            "tensor": config.tensor_parallel,
        }
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        ranks_MxS = torch.tensor(ranks, dtype=torch.int64, device="cpu").view(-1, *sizes.values())
        groups: list[Any] = [between, own_device_group]
        if len(sizes) > 1:
            along = (ranks_MxS.movedim(dim, -1).flatten(0, -2).tolist() for dim in range(1, ranks_MxS.ndim))
            groups = [between, *(group(members, backend=None, timeout=3 * timeout) for members in along)]
        names = ("replica", *sizes)
        mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks_MxS, mesh_dim_names=names)
    elif config.ddp_per_replica > 1 and num_replicas > 1:
        others = _through_leaders(config, same_rank, group(ranks))
    others = others or exchange(same_rank, config.num_connections)
    return World(
        exchange=others,
        everyone=everyone or others,
        mesh=mesh,
        group=OneProcess() if own_device_group is None else TorchGroup(own_device_group, device),
        host_group=TorchGroup(own_group, torch.device("cpu")),
        device=device,
        is_first_on_machine=is_first_on_machine,
        precision=chosen_precision(config.precision, device),
        num_readers=config.readers_per_replica,
    )


def _through_leaders(config: TrainConfig, same_rank: dist.ProcessGroup, inside: dist.ProcessGroup) -> Transport:
    """The exchange of replicas whose processes are equal: their first ones send and receive for all."""
    seconds, num_replicas = config.timeout_seconds, config.num_replicas
    store, replica = dist.PrefixStore("leaders", same_rank.get_group_store()), same_rank.rank()
    notices = Notices(store, replica, num_replicas, config.num_processes)
    outside = None
    if inside.rank() == 0:
        others = [group_like(same_rank, seconds) for _ in range(1, config.num_connections)]
        outside = GroupExchange([same_rank, *others], notices, timeout_seconds=seconds)
    return LeaderExchange(
        outside, inside, notices, replica=replica, num_replicas=num_replicas, timeout_seconds=seconds
    )


def alone(precision: str = "auto", device: torch.device | None = None) -> World:
    """The world of one process, without process groups; for a config's `precision`, and by default on the CPU."""
    exchange, device = LoopbackExchange(), device or torch.device("cpu")
    return World(
        exchange=exchange,
        everyone=exchange,
        mesh=None,
        group=OneProcess(),
        host_group=OneProcess(),
        device=device,
        is_first_on_machine=True,
        precision=chosen_precision(precision, device),
    )
