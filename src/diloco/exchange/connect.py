"""The exchange between replicas that are jobs of their own: no framework sees them as one distributed job."""

import ipaddress
import logging
import os
import socket
from datetime import timedelta
from functools import cache, partial
from typing import cast

import torch.distributed as dist

from diloco.errors import ExchangeError, UserError
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.meeting import SECONDS_FOR_THE_LAST_ANSWER, Meeting, Way, listen
from diloco.exchange.notices import Notices, first_sentence, within
from diloco.exchange.private_torch import gloo_backend
from diloco.exchange.process_group import Backend, GroupExchange, check_num_connections, check_timeout
from diloco.exchange.transport import LoopbackExchange, Transport

_LOG = logging.getLogger("diloco")


def connect(
    address: str | None = None,
    *,
    replica: int | None = None,
    num_replicas: int | None = None,
    leader: bool = False,
    timeout_seconds: float = 600.0,
    num_connections: int = 1,
    secret: str | None = None,
    certificates: str | os.PathLike[str] | None = None,
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
        secret: at least 16 random characters, the same for all; None is DILOCO_SECRET. With a secret, or with
            certificates, all that this exchange sends is encrypted (TLS 1.3), and only who has them can take part.
            Without, everybody who reaches the address can read and join.
        certificates: instead of a secret, a directory with tls.crt and tls.key, this process's certificate and
            key, and ca.crt, the authority that signed the certificates of all, in PEM; None is
            DILOCO_CERTIFICATES.

    Raises:
        UserError: if the address, the secret or the certificates can't be used, a replica has come already, or two
            replicas are one job.
        ExchangeError: if a replica does not come in time, or replica 0 has another secret.
    """
    address, replica, num_replicas = _settings(address, replica, num_replicas)
    check_timeout(timeout_seconds)
    check_num_connections(num_connections)
    if num_replicas == 1:
        return LoopbackExchange()
    if secret is None and certificates is None:
        secret, certificates = os.environ.get("DILOCO_SECRET"), os.environ.get("DILOCO_CERTIFICATES")
    meeting = Meeting(address, replica, num_replicas, timeout_seconds)

    def make() -> Way:
        if secret is None and certificates is None:
            return _InTheClear(meeting, timeout_seconds)
        # Without a proof, neither TLS nor the library of its keys is loaded.
        from diloco.exchange.encrypted.session import Session

        return Session(meeting, secret, certificates, timeout_seconds)

    way = meeting.arrive(make, leader=leader, num_connections=num_connections)
    meeting.compare(way)
    return _exchange(way, meeting, leader, num_connections, timeout_seconds)


def _exchange(way: Way, meeting: Meeting, leader: bool, num_connections: int, timeout_seconds: float) -> Transport:
    """The exchange of this process, once all have met."""
    replica, num_replicas, rank = meeting.replica, meeting.num_replicas, meeting.rank
    notices = Notices(way.store, replica, num_replicas, sum(meeting.sizes.values()), on_close=way.close)

    def outside(name: str) -> GroupExchange:
        backends = [way.backend(f"{name}, connection {i}", replica, num_replicas) for i in range(num_connections)]
        return GroupExchange(backends, notices, timeout_seconds=timeout_seconds)

    if not leader:
        return outside(f"process {rank}")
    leaders = outside("leaders") if rank == 0 else None
    if meeting.num_processes == 1:
        assert leaders is not None, "a process alone is the leader"
        return leaders
    inside = way.backend(f"replica {replica}", rank, meeting.num_processes, member="process")
    return LeaderExchange(
        leaders, inside, notices, replica=replica, num_replicas=num_replicas, timeout_seconds=timeout_seconds
    )


class _InTheClear:
    """The connections of gloo, on the network interface of an address, and torch's own store: a `Way`.

    torch.distributed does not know of its backends.

    Raises:
        ExchangeError: if replica 0 stands still, or has a secret.
    """

    refused = None

    def __init__(self, meeting: Meeting, timeout_seconds: float) -> None:
        self._timeout_seconds, timeout = timeout_seconds, timedelta(seconds=timeout_seconds)
        host, port = meeting.host_and_port
        if meeting.is_host:
            listener, self._address = listen(host, port)
            store = dist.TCPStore(
                *(self._address, port),
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        else:
            with meeting.reach(partial(socket.create_connection, (host, port), timeout=5)) as connection:
                self._address = connection.getsockname()[0]
            store = _store_of_replica_0(meeting, min(timeout, timedelta(seconds=_SECONDS_TO_ANSWER)))
            store.set_timeout(timeout)
        self.store = dist.PrefixStore("diloco", store)
        if not ipaddress.ip_address(self._address.partition("%")[0]).is_loopback:
            _warn_of_no_secret(self._address)

    def backend(self, name: str, rank: int, size: int, *, member: str = "replica") -> Backend:
        """A backend of the processes that give the same name."""
        store, seconds = dist.PrefixStore(name, self.store), self._timeout_seconds + _SECONDS_FOR_GLOOS_ERROR
        plural = "replicas" if member == "replica" else "processes"
        try:
            made = within(seconds, gloo_backend, store, rank, size, self._address, self._timeout_seconds)
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"{name}: the {plural} could not be connected ({first_sentence(error)}): one of them has ended, "
                "stands still, or can't be reached from this machine"
            ) from None
        return cast(Backend, made)

    def close(self) -> None:
        """Do nothing: gloo closes the backends that nobody uses."""


def _store_of_replica_0(meeting: Meeting, timeout: timedelta) -> dist.Store:
    """The store for gloo's meeting, where replica 0 listens without encryption."""
    host, port = meeting.host_and_port
    # torch waits longer between tries each time, and so beyond its timeout.
    seconds = 2 * timeout.total_seconds() + SECONDS_FOR_THE_LAST_ANSWER
    try:
        return within(seconds, dist.TCPStore, host, port, wait_for_workers=False, timeout=timeout)
    except TimeoutError:
        raise ExchangeError(
            f"replica 0 listens at {meeting.address} and does not answer: its process or its machine stands still",
            (0,),
        ) from None
    except RuntimeError:
        raise ExchangeError(
            f"what listens at {meeting.address} is no replica 0 without a secret: give this replica the same "
            "secret (DILOCO_SECRET), or check the address",
            (0,),
        ) from None


_SECONDS_TO_ANSWER = 10.0
_SECONDS_FOR_GLOOS_ERROR = 1.0


@cache
def _warn_of_no_secret(address: str) -> None:
    _LOG.warning(
        "everybody who reaches %s can read this run and join it: give diloco.connect a secret, or set "
        "DILOCO_SECRET",
        address,
    )


_EVERY_INTERFACE = ("0.0.0.0", "::", "*")
"""Hosts at which a program can listen, and which no other can reach."""


def _settings(address: str | None, replica: int | None, num_replicas: int | None) -> tuple[str, int, int]:
    """The arguments, or what the environment has for them, checked."""
    address = os.environ.get("DILOCO_ADDRESS") if address is None else address
    host, _, port = (address or "").rpartition(":")
    if address is None or not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"address={address} must be host:port of replica 0, with a port from 1 to {(1 << 16) - 1}: give "
            "it, or set DILOCO_ADDRESS",
            "address",
        )
    if host.strip("[]") in _EVERY_INTERFACE:
        raise UserError(
            f"address={address} is no place to reach: give the address of replica 0's machine on the network "
            "that the others share; there alone it listens",
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
