"""The exchange between replicas that are jobs of their own: no framework sees them as one distributed job."""

import os
import time
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from diloco.errors import UserError
from diloco.exchange.gloo import Group
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.loopback import LoopbackExchange
from diloco.exchange.meeting import Meeting
from diloco.exchange.notices import Notices
from diloco.exchange.process_group import GroupExchange, check_timeout
from diloco.exchange.site import this_site
from diloco.exchange.transport import Transport


def connect(
    address: str | None = None,
    *,
    replica: int | None = None,
    num_replicas: int | None = None,
    leader: bool = False,
    timeout_seconds: float = 600.0,
    num_connections: int = 1,
) -> Transport:
    """Meet the other replicas, each a job of its own; every process of every replica must call it.

    The exchange stands beside torch.distributed, which may be initialised before, after, or not at all: a replica
    is one process, or the processes of one torchrun, with DDP or FSDP among themselves. Process i of a replica
    exchanges with process i of the others.

    Args:
        address: "host:port" on which all replicas reach replica 0, whose first process listens there; None is
            DILOCO_ADDRESS in the environment. Payloads travel on the network interface that leads to it.
        replica: this replica, from 0; None is DILOCO_REPLICA.
        num_replicas: M; None is DILOCO_NUM_REPLICAS.
        leader: let only the first process of each replica exchange with the other replicas, and hand what it
            receives to its other processes: for DDP, where all hold the same parameters.
        timeout_seconds: how long to wait for the other replicas, now and for each payload.
        num_connections: TCP connections between two processes, as of `ProcessGroupExchange`.

    Raises:
        UserError: if the address can't be used, a replica has come already, or two replicas are one job.
        ExchangeError: if a replica does not come in time.
    """
    address, replica, num_replicas = _settings(address, replica, num_replicas)
    check_timeout(timeout_seconds)
    if num_connections < 1:
        raise UserError(f"num_connections={num_connections} must be at least 1", "num_connections")
    if num_replicas == 1:
        return LoopbackExchange()
    site = this_site()
    meeting = Meeting(address, replica, num_replicas, site, time.monotonic() + timeout_seconds)
    store, own_address = meeting.open(timeout_seconds)
    facts = {"num_replicas": num_replicas, "leader": leader, "num_connections": num_connections}
    meeting.compare(store, facts | {"processes a replica": None if leader else site.size})

    def exchange(name: str, rank: int, size: int) -> GroupExchange:
        stores = [dist.PrefixStore(f"{name}, connection {i}", store) for i in range(num_connections)]
        groups = [_group(prefixed, rank, size, own_address, timeout_seconds) for prefixed in stores]
        return GroupExchange(groups, notices, timeout_seconds=timeout_seconds)

    num_processes = sum(meeting.sizes)
    notices = Notices(dist.PrefixStore("notices", store), replica, num_replicas, num_processes)
    if not leader:
        return exchange(f"process {site.rank}", replica, num_replicas)
    outside = exchange("leaders", replica, num_replicas) if site.rank == 0 else None
    if site.size == 1:
        assert outside is not None, "a process alone is the leader"
        return outside
    inside_store = dist.PrefixStore(f"replica {replica}", store)
    inside = _group(inside_store, site.rank, site.size, own_address, timeout_seconds)
    return LeaderExchange(
        outside, inside, notices, replica=replica, num_replicas=num_replicas, timeout_seconds=timeout_seconds
    )


def _group(store: dist.Store, rank: int, size: int, address: str, timeout_seconds: float) -> Group:
    """A gloo group that torch.distributed does not know of, on the network interface of an address."""
    # torch has no public name for these options.
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return cast(Group, dist.ProcessGroupGloo(store, rank, size, options))


def _settings(address: str | None, replica: int | None, num_replicas: int | None) -> tuple[str, int, int]:
    """The arguments, or what the environment has for them, checked."""
    address = os.environ.get("DILOCO_ADDRESS") if address is None else address
    if address is None or not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise UserError(
            f"address={address} must be host:port of replica 0: give it, or set DILOCO_ADDRESS",
            "address",
        )
    numbers = {}
    for name, value in (("replica", replica), ("num_replicas", num_replicas)):
        variable = f"DILOCO_{name.upper()}"
        text = os.environ.get(variable) if value is None else value
        try:
            numbers[name] = int(str(text))
        except ValueError:
            raise UserError(f"{name}={text} must be a whole number: give it, or set {variable}", name) from None
    if not 0 <= numbers["replica"] < numbers["num_replicas"]:
        raise UserError(
            f"replica={numbers['replica']} must be from 0 to below num_replicas={numbers['num_replicas']}",
            *("replica", "num_replicas"),
        )
    return address, numbers["replica"], numbers["num_replicas"]
