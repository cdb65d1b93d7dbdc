"""The exchange between replicas that are jobs of their own: no framework sees them as one distributed job."""

import ipaddress
import logging
import os
from datetime import timedelta
from functools import cache
from typing import cast

import torch.distributed as dist

from diloco.errors import ExchangeError, UserError
from diloco.exchange.encrypted.exchange import EncryptedGroup, Session
from diloco.exchange.encrypted.tls import security_of
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.loopback import LoopbackExchange
from diloco.exchange.meeting import Meeting, this_site
from diloco.exchange.notices import Notices, first_sentence, within
from diloco.exchange.process_group import Group, GroupExchange, check_num_connections, check_timeout
from diloco.exchange.transport import Store, Transport

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
            Without, whoever reaches the address can read and join.
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
    security = security_of(secret, certificates)
    meeting = Meeting(address, replica, num_replicas, this_site(), timeout_seconds)
    way = (
        _Plain(*meeting.open(timeout_seconds), timeout_seconds)
        if security is None
        else _Encrypted(meeting.open_encrypted(security, timeout_seconds), meeting.deadline)
    )
    processes = None if leader else meeting.site.size
    facts = {"num_replicas": num_replicas, "leader": leader, "num_connections": num_connections}
    meeting.compare(way.store, facts | {"processes a replica": processes})
    return _exchange(way, meeting, leader, num_connections, timeout_seconds)


def _exchange(
    way: "_Plain | _Encrypted", meeting: Meeting, leader: bool, num_connections: int, timeout_seconds: float
) -> Transport:
    """The exchange of this process, once all have met."""
    replica, num_replicas, site = meeting.replica, meeting.num_replicas, meeting.site
    notices = Notices(way.below("notices"), replica, num_replicas, sum(meeting.sizes.values()), on_close=way.close)

    def outside(name: str) -> GroupExchange:
        groups = [way.group(f"{name}, connection {i}", replica, num_replicas) for i in range(num_connections)]
        return GroupExchange(groups, notices, timeout_seconds=timeout_seconds)

    if not leader:
        return outside(f"process {site.rank}")
    leaders = outside("leaders") if site.rank == 0 else None
    if site.size == 1:
        assert leaders is not None, "a process alone is the leader"
        return leaders
    inside = way.group(f"replica {replica}", site.rank, site.size)
    return LeaderExchange(
        leaders, inside, notices, replica=replica, num_replicas=num_replicas, timeout_seconds=timeout_seconds
    )


class _Plain:
    """Groups of gloo, which torch.distributed does not know of, on the network interface of an address."""

    def __init__(self, store: dist.PrefixStore, address: str, timeout_seconds: float) -> None:
        self.store, self._address, self._timeout_seconds = store, address, timeout_seconds
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            _warn_of_no_secret(address)

    def below(self, name: str) -> Store:
        """A part of the store."""
        return dist.PrefixStore(name, self.store)

    def group(self, name: str, rank: int, size: int) -> Group:
        """A group of the processes that name it alike."""
        # torch has no public name for these options.
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=self._timeout_seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        store, seconds = dist.PrefixStore(name, self.store), self._timeout_seconds + _SECONDS_FOR_GLOOS_ERROR
        try:
            return cast(Group, within(seconds, dist.ProcessGroupGloo, store, rank, size, options))
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"{name}: the processes could not be connected ({first_sentence(error)}): one of them has ended, "
                "stands still, or can't be reached from this machine"
            ) from None

    def close(self) -> None:
        """Do nothing: gloo closes the groups that nobody uses."""


class _Encrypted:
    """Groups of a session."""

    def __init__(self, session: Session, deadline: float) -> None:
        self._session, self._deadline, self.store = session, deadline, session.store
        self.below, self.close = session.store.below, session.close

    def group(self, name: str, rank: int, size: int) -> Group:
        """A group of the processes that name it alike."""
        return EncryptedGroup(self._session, name, rank, size, self._deadline)


_SECONDS_FOR_GLOOS_ERROR = 1.0


@cache
def _warn_of_no_secret(address: str) -> None:
    _LOG.warning(
        "whoever reaches %s can read this run and join it: give diloco.connect a secret, or set DILOCO_SECRET",
        address,
    )


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
