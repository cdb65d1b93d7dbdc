"""Joining the other processes: which replica and shard this one is, and its groups."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import DisagreementError, UserError
from diloco.exchange import gloo
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.loopback import LoopbackExchange
from diloco.exchange.notices import Notices
from diloco.exchange.process_group import GroupExchange, ProcessGroupExchange
from diloco.exchange.transport import Transport
from diloco.rendezvous.store_rendezvous import StoreRendezvous
from diloco.training import launcher
from diloco.training.config import TrainConfig
from diloco.training.hardware import chosen_device, use_autocast
from diloco.training.rendezvous import meeting
from diloco.training.waiting import store_with_all

_LOG = logging.getLogger("diloco")


@dataclass(frozen=True)
class World:
    """The place of this process among the others: its number is replica · num_ranks + rank."""

    exchange: Transport
    """The exchange with the other replicas, of this process's shard where the replica is sharded."""
    everyone: Transport
    """The exchange with all processes, in the order of their ranks; `exchange` if a replica is one process."""
    mesh: DeviceMesh | None
    """Replicas × shards; None if a replica is not sharded."""
    own_group: dist.ProcessGroup | None
    """This replica's processes on gloo, for its checkpoints; None if there are no process groups."""
    own_device_group: dist.ProcessGroup | None
    """This replica's processes where they compute; None if a replica is one process."""
    device: torch.device
    """The device on which this process computes."""
    is_first_on_machine: bool
    """Whether this process writes the files that the processes of one machine share."""
    autocast: bool
    """Whether the forward pass runs in bfloat16 autocast."""
    rendezvous: StoreRendezvous | None = None
    """The run of replicas that come and go, in the place of the exchange, which has nobody to reach then; of a
    replica's processes only the first has joined it."""

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

    def name_of(self, replica: int) -> str:
        """The name of a replica in an outer step's cohort."""
        return str(replica) if self.rendezvous is None else self.rendezvous.state.members[replica].name

    def of_first(self, num_numbers: int, read: Callable[[], Sequence[int]]) -> list[int]:
        """Whole numbers, 0 to 2^53, that the first process of the replica reads; each of them must call it."""
        numbers = [*read()] if self.rank == 0 else [0] * num_numbers
        if self.own_device_group is None:
            return numbers
        together = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return [int(number) for number in self.reduced(together, dist.ReduceOp.MAX).tolist()]

    def over_ranks(self, value: float, operation: "dist.ReduceOp.RedOpType") -> float:
        """Reduce a number over the processes of the replica; each of them must call it."""
        if self.own_device_group is None:
            return value
        return self.reduced(torch.tensor(value, dtype=torch.float64, device=self.device), operation).item()

    def reduced(self, value: torch.Tensor, operation: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Reduce a tensor on the device, in place; each process of the replica must call it, and none waits."""
        if self.own_device_group is not None:
            dist.all_reduce(value, operation, group=self.own_device_group)
        return value


@contextmanager
def join(config: TrainConfig) -> Iterator[World]:
    """Join the world that torchrun or our own launcher describes in the environment, and leave it at the end.

    Raises:
        UserError: if its size is not the config's number of processes, or the device is missing.
        DisagreementError: if the processes were started with other numbers of replicas, processes or connections.
        TimeoutError: if the other processes don't join in time, or can't be reached.
    """
    if config.rendezvous is None:
        with _joined(config) as world:
            yield world
        return
    _check_shards(config)
    device = chosen_device(config, int(os.environ.get("LOCAL_RANK", "0")))
    one = nullcontext(replace(alone(config), device=device, autocast=use_autocast(config, device)))
    with _joined(config) if config.num_processes > 1 else one as world, meeting(config) as rendezvous:
        yield replace(world, rendezvous=rendezvous)


def _check_shards(config: TrainConfig) -> None:
    """Refuse a launcher's group of processes that is not one replica."""
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != str(config.num_processes):
        raise UserError(
            f"the launcher started {world_size} processes with rendezvous={config.rendezvous}, where they are the "
            f"shards of one replica, and shards_per_replica={config.num_shards}: set it to {world_size}",
            *("shards_per_replica", "rendezvous"),
        )


def _wrong_number(config: TrainConfig, world_size: int) -> UserError:
    """The refusal of a launcher's number of processes, with the replicas that they would make."""
    inside = {"shards_per_replica": config.num_shards, "ddp_per_replica": config.num_ddp}
    others = "".join(f" with {name}={number}" for name, number in inside.items() if number > 1)
    num_replicas, rest = divmod(world_size, config.processes_per_replica)
    remedy = "" if rest or not num_replicas else f", or set num_replicas={num_replicas}"
    return UserError(
        f"the launcher started {world_size} process{'es' * (world_size != 1)}, and "
        f"num_replicas={config.num_replicas}{others} needs {config.num_processes}: have it start "
        f"{config.num_processes}{remedy}",
        *("num_replicas", *inside),
    )


@contextmanager
def _joined(config: TrainConfig) -> Iterator[World]:
    """The world of several processes, or of one that a launcher started; it is left at the end."""
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except KeyError as missing:
        raise UserError(f"RANK is set, and {missing} is not: unset RANK, or use torchrun") from None
    except ValueError as error:
        raise UserError(f"RANK, WORLD_SIZE, LOCAL_RANK must be numbers: {error}") from None
    if world_size != config.num_processes:
        raise _wrong_number(config, world_size)
    device = chosen_device(config, local_rank)
    if rank == 0 and launcher.STORE not in os.environ:
        _warn_of_open_ports()
    timeout = timedelta(seconds=config.timeout_seconds)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        names, seconds = partial(_name_of, config), config.timeout_seconds
        store = store_with_all(rank=rank, world_size=world_size, name_of=names, timeout_seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        _agree_on_groups(config, world_size)
        world = world_of(config, device, timeout, is_first_on_machine=local_rank == 0)
    except RuntimeError as error:
        where = os.environ.get(launcher.STORE) or os.environ.get("MASTER_ADDR")
        raise TimeoutError(
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
        "whoever reaches them can read and disturb this run, and run code in it where torchrun meets by c10d, "
        "which loads pickles: use a VPN, a store with keys (rendezvous), or diloco.connect with a secret",
        os.environ.get("MASTER_PORT"),
        os.environ.get("MASTER_ADDR"),
        f"the interface {interface}" if interface else "the address of each host's name",
    )


def _name_of(config: TrainConfig, rank: int) -> str:
    """The name of a process, by its number among all."""
    replica, process = divmod(rank, config.processes_per_replica)
    return f"replica {replica}" if config.processes_per_replica == 1 else f"process {process} of replica {replica}"


def _agree_on_groups(config: TrainConfig, world_size: int) -> None:
    """Compare the settings that decide which groups there are, before any is made."""
    mine = torch.tensor([config.num_replicas, config.num_shards, config.num_ddp, config.num_connections])
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    everyones = [tuple(theirs.tolist()) for theirs in gathered]
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise DisagreementError(
                "the processes disagree on (num_replicas, shards_per_replica, ddp_per_replica, num_connections): "
                f"process 0 has {everyones[0]}, process {rank} has {theirs}; start them with the same settings",
                *("num_replicas", "shards_per_replica", "ddp_per_replica", "num_connections"),
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
    if config.num_shards > 1:
        # Data-Parallel sums gradients where they are; the payloads of an engine travel on gloo.
        between = group(by_rank, backend=None) if config.method == "data_parallel" else same_rank
        groups, names = [between, own_device_group], ("replica", "shard")
        mesh = DeviceMesh.from_group(groups, device.type, mesh=torch.tensor(ranks), mesh_dim_names=names)
    elif config.num_ddp > 1 and num_replicas > 1:
        others = _through_leaders(config, same_rank, group(ranks))
    others = others or exchange(same_rank, config.num_connections)
    return World(
        exchange=others,
        everyone=everyone or others,
        mesh=mesh,
        own_group=own_group,
        own_device_group=own_device_group,
        device=device,
        is_first_on_machine=is_first_on_machine,
        autocast=use_autocast(config, device),
    )


def _through_leaders(config: TrainConfig, same_rank: dist.ProcessGroup, inside: dist.ProcessGroup) -> Transport:
    """The exchange of replicas whose processes are equal: their first ones send and receive for all."""
    seconds, num_replicas = config.timeout_seconds, config.num_replicas
    store, replica = dist.PrefixStore("leaders", same_rank.get_group_store()), same_rank.rank()
    notices = Notices(store, replica, num_replicas, config.num_processes)
    outside = None
    if inside.rank() == 0:
        others = [gloo.group_like(same_rank, seconds) for _ in range(1, config.num_connections)]
        outside = GroupExchange([same_rank, *others], notices, timeout_seconds=seconds)
    return LeaderExchange(
        outside, inside, notices, replica=replica, num_replicas=num_replicas, timeout_seconds=seconds
    )


def alone(config: TrainConfig) -> World:
    """The world of one process on its CPU, without process groups."""
    exchange, cpu = LoopbackExchange(), torch.device("cpu")
    return World(
        exchange=exchange,
        everyone=exchange,
        mesh=None,
        own_group=None,
        own_device_group=None,
        device=cpu,
        is_first_on_machine=True,
        autocast=use_autocast(config, cpu),
    )
