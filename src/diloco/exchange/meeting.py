"""The start of an exchange between jobs: all meet at the store of replica 0, and compare their settings."""

import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from diloco.errors import ExchangeError, UserError
from diloco.exchange.notices import ask
from diloco.exchange.process_group import Backend
from diloco.exchange.transport import Store, wait_for_all

_LOG = logging.getLogger("diloco")


def _rank_and_size() -> tuple[int, int]:
    """The number of this process in its replica, and their count, as torch.distributed or torchrun has them."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise UserError(f"RANK and WORLD_SIZE in the environment must be whole numbers: {error}") from None


def _launcher() -> str:
    """A hint at the variables by which this process may be taken for one of several."""
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
    return (
        f"; RANK={rank} and WORLD_SIZE={size} in the environment say that this is one of several processes of its "
        "replica: if it is the only one, unset what Slurm or torchrun left there"
    )


def _job() -> str | None:
    """A name of the job that started the replica's processes, which no other job has; None without a launcher.

    It is the address at which they meet: two jobs of a machine can't share a port. Two machines may have one host
    name, but on Linux no two starts have one boot_id.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # Lightning's launcher sets no RANK.
    has_launcher = "RANK" in os.environ or (dist.is_initialized() and dist.get_world_size() > 1)
    if not address or not port or not has_launcher:
        return None
    if address in ("localhost", "::1") or address.startswith("127."):
        boot = _BOOT.read_text(encoding="utf-8").strip() if _BOOT.exists() else ""
        address = f"{socket.gethostname()}/{boot}/{address}"
    return f"{address}:{port}"


_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Way(Protocol):
    """The connections of this process with the processes of all replicas: in the clear, or encrypted."""

    @property
    def store(self) -> Store:
        """The store of replica 0."""
        ...

    @property
    def refused(self) -> str | None:
        """The sentence for the last process that was refused; None where all were let in."""
        ...

    def backend(self, name: str, rank: int, size: int, *, member: str = "replica") -> Backend:
        """The connections between the processes that give the same name.

        Args:
            name: of the backend, which no other one has.
            rank: this process, from 0.
            size: the number of processes.
            member: the word for one of them in messages, `replica` or `process`.

        Raises:
            ExchangeError: if one of them can't be connected.
        """
        ...

    def close(self) -> None:
        """End all connections."""
        ...


class Arrival(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The facts that a process writes into the store when it comes; the settings must be the same for all."""

    num_replicas: int
    leader: bool
    num_connections: int
    processes_per_replica: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """The number of processes of its replica; the same for all where they have no leader."""
    job: str | None
    """The name of the job that started its replica's processes; None without a launcher."""
    process: str
    """A name of the process that no other one has."""
    number: int
    """The number of this arrival among those of the process."""


_PROCESS = secrets.token_hex(8)
"""A name of this program, which forked processes share."""
_ARRIVALS = count(1)
_HAVE_MET: set[str] = set()
"""The addresses at which this process has met all others."""

S = TypeVar("S", bound=socket.socket)


class Meeting:
    """The start of an exchange, at the store of replica 0.

    Args:
        address: host:port of the store.
        replica: this replica.
        num_replicas: M.
        seconds: how long it may take until all have come.

    Raises:
        UserError: if the environment describes this process by what is no number.
    """

    def __init__(self, address: str, replica: int, num_replicas: int, seconds: float) -> None:
        self.address = address
        """host:port of the store."""
        self._begin, self._seconds = time.monotonic(), seconds
        self.replica, self.num_replicas = replica, num_replicas
        self.rank, self.num_processes = _rank_and_size()
        self.sizes: dict[int, int] = {}
        """The number of processes of each replica that has come."""

    @property
    def deadline(self) -> float:
        """The end of the time in which all must come, by `time.monotonic`."""
        return self._begin + self._seconds

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of the address."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_host(self) -> bool:
        """True in the process that holds the store: the first of replica 0."""
        return self.replica == 0 and self.rank == 0

    def arrive(self, make: Callable[[], Way], *, leader: bool, num_connections: int) -> Way:
        """The connections with the others, at a store into which this process has written that it is here.

        A process that has closed an exchange at the address may be faster than replica 0, which still has that
        one's store: it comes again until there is a new one.

        Raises:
            UserError: if this replica has come already.
            ExchangeError: if replica 0 is gone, stands still or does not close the exchange before.
        """
        has_met = self.address in _HAVE_MET
        mine = self._mine = Arrival(
            num_replicas=self.num_replicas,
            leader=leader,
            num_connections=num_connections,
            processes_per_replica=self.num_processes,
            job=_job(),
            process=f"{_PROCESS}/{os.getpid()}",
            number=next(_ARRIVALS),
        )
        ways: list[Way] = []
        errors: list[ExchangeError] = []

        def missing() -> str:
            try:
                way = make()
                if self._write(way.store, mine):
                    ways.append(way)
                    return ""
                way.close()
            except ExchangeError as error:
                if not has_met:
                    raise
                errors.append(error)
            return "replica 0, which has the exchange before this one still open,"

        try:
            self._wait_for_all(missing)
        except ExchangeError as error:
            raise (errors[-1] if errors else error) from None
        return ways[0]

    def _write(self, store: Store, mine: Arrival) -> bool:
        """Write that this process is here; False if it has written so before, for an exchange that it has left."""
        key, text = _key(self.replica, self.rank), msgspec.json.encode(mine)
        deadline = self.deadline + SECONDS_FOR_THE_LAST_ANSWER
        present = ask(deadline, store.compare_set, key, "", text.decode())
        if present == text:
            return True
        if _arrival(present, self.replica).process == mine.process:
            return False
        raise UserError(
            f"process {self.rank} of replica {self.replica} has come to {self.address} already: give "
            "each replica a number of its own, each exchange of a program a port of its own, and start the others "
            "anew with replica 0",
            "replica",
        )

    def compare(self, way: Way) -> None:
        """Wait for every process of every replica, and compare what they believe.

        Raises:
            UserError: if they believe different things.
            ExchangeError: if one does not come in time, or replica 0 is gone or stands still.
        """
        store, deadline, mine = way.store, self.deadline + SECONDS_FOR_THE_LAST_ANSWER, self._mine
        waiting = {(replica, 0) for replica in range(self.num_replicas)}

        def missing() -> str:
            for replica, rank in sorted(waiting):
                if ask(deadline, store.check, [_key(replica, rank)]):
                    waiting.remove((replica, rank))
                    if rank == 0:
                        theirs = _arrival(ask(deadline, store.get, _key(replica, 0)), replica)
                        self._check(replica, mine, theirs)
                        self.sizes[replica] = size = theirs.processes_per_replica
                        waiting.update((replica, other) for other in range(1, size))
            return ", ".join(
                f"process {rank} of replica {replica}" if rank else f"replica {replica}"
                for replica, rank in sorted(waiting)[:_MOST_NAMES]
            )

        try:
            self._wait_for_all(missing)
        except ExchangeError as error:
            if way.refused is None:
                raise
            raise ExchangeError(f"{error} (refused: {way.refused})", error.missing) from None
        _HAVE_MET.add(self.address)

    def _check(self, replica: int, mine: Arrival, theirs: Arrival) -> None:
        """Refuse a replica that was started with other settings, or in the same job."""
        names = ("num_replicas", "leader", "num_connections", "processes_per_replica")
        for name in names[:-1] if mine.leader else names:
            if getattr(theirs, name) != getattr(mine, name):
                raise UserError(
                    f"replica {self.replica} was started with {name}={getattr(mine, name)}, and replica {replica} "
                    f"with {name}={getattr(theirs, name)}: start all with the same",
                    name,
                )
        if replica != self.replica and mine.job is not None and theirs.job == mine.job:
            raise UserError(
                f"replicas {self.replica} and {replica} are processes of one job, {mine.job}, which "
                "averages their gradients: start one torchrun per replica; for replicas inside one job there is "
                "ProcessGroupExchange",
                "replica",
            )

    def reach(self, connect: Callable[[], S]) -> S:
        """A connection to replica 0, once it listens."""
        connections: list[S] = []

        def missing() -> str:
            try:
                connections.append(connect())
            except socket.gaierror as error:
                raise UserError(
                    f"address={self.address}: {self.host_and_port[0]} can't be resolved ({error})", "address"
                ) from None
            except OSError:
                return "replica 0"
            return ""

        self._wait_for_all(missing)
        return connections[0]

    def _wait_for_all(self, missing: Callable[[], str]) -> None:
        wait_for_all(
            missing,
            begin=self._begin,
            seconds=self._seconds,
            where=f" at {self.address}",
            remedy=f"start all {self.num_replicas} replicas within timeout_seconds, and check that this "
            f"machine reaches that address{_launcher()}",
        )


SECONDS_FOR_THE_LAST_ANSWER = 1.0
"""The time by which a store may answer later than the meeting ends."""
_MOST_NAMES = 8


def _key(replica: int, rank: int) -> str:
    return f"arrivals/{replica}/{rank}"


def _arrival(text: bytes, replica: int) -> Arrival:
    """The facts of another process's arrival.

    Raises:
        ExchangeError: if the text is not that.
    """
    try:
        return msgspec.json.decode(text, type=Arrival)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise ExchangeError(
            f"replica {replica} came with facts that this version does not know: install the same version "
            "of diloco everywhere, and keep others from the address with a secret",
            (replica,),
        ) from None


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens on one address of this machine, and that address."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"replica 0 can't listen at address={host}:{port} ({error.strerror or error}): it must run on "
            "that host, and the port must be free; an address serves one exchange at a time: close() the one "
            "before, or give each exchange of a program a port of its own",
            "address",
        ) from None
    address = str(where[0])
    if host not in ("localhost", address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        _LOG.warning(
            "%s is %s here, by this machine's own table of hosts, and no other machine reaches that: if replicas "
            "are elsewhere, give all of them this machine's address on their network",
            *(host, address),
        )
    return listener, address
