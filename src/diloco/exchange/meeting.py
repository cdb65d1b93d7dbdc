"""The start of an exchange between jobs: all meet at the store of replica 0, and compare their settings."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from diloco.errors import ExchangeError, UserError
from diloco.exchange.encrypted.exchange import BOARD, Session
from diloco.exchange.encrypted.link import Door
from diloco.exchange.encrypted.tls import Security, dial
from diloco.exchange.notices import BoundedStore, within
from diloco.exchange.transport import Store, wait_for_all


@dataclass(frozen=True)
class Site:
    """This process among those of its replica."""

    rank: int
    """The number of this process, from 0."""
    size: int
    """The number of processes."""
    job: str | None
    """A name of the job that started them, which no other job has at the same time; None without a launcher."""


def this_site() -> Site:
    """The site that torch.distributed, or else the environment, describes (RANK and WORLD_SIZE, as torchrun sets).

    Raises:
        UserError: if the environment describes no whole numbers.
    """
    if dist.is_initialized():
        return Site(dist.get_rank(), dist.get_world_size(), _job())
    try:
        return Site(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), _job())
    except ValueError as error:
        raise UserError(f"RANK and WORLD_SIZE in the environment must be whole numbers: {error}") from None


def _job() -> str | None:
    """The address at which the processes of the job meet: two jobs of a machine can't share a port."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # Lightning's launcher sets no RANK.
    has_launcher = "RANK" in os.environ or (dist.is_initialized() and dist.get_world_size() > 1)
    if not address or not port or not has_launcher:
        return None
    is_local = address == "localhost" or address.startswith("127.") or address == "::1"
    return f"{socket.gethostname() + '/' if is_local else ''}{address}:{port}"


S = TypeVar("S", bound=socket.socket)


class Meeting:
    """The start of an exchange, at the store of replica 0.

    Args:
        address: host:port of the store.
        replica: this replica.
        num_replicas: M.
        site: this process in its replica.
        seconds: how long it may take until all have come.
    """

    def __init__(self, address: str, replica: int, num_replicas: int, site: Site, seconds: float) -> None:
        self._address, self._begin, self._seconds = address, time.monotonic(), seconds
        self.replica, self.num_replicas, self.site = replica, num_replicas, site
        self._door: Door | None = None
        self.sizes: dict[int, int] = {}
        """The number of processes of each replica that has come."""

    @property
    def deadline(self) -> float:
        """The end of the time in which all must come, by `time.monotonic`."""
        return self._begin + self._seconds

    def open(self, timeout_seconds: float) -> tuple[dist.PrefixStore, str]:
        """The store, and the address of the network interface of this machine that leads to it."""
        host, port = self._place
        timeout = timedelta(seconds=timeout_seconds)
        if self._is_host:
            listener, own_address = _listen(host, port)
            fd = listener.detach()
            store = dist.TCPStore(
                *(own_address, port),
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=fd,
            )
        else:
            with self._reach(lambda: socket.create_connection(self._place, timeout=5)) as connection:
                own_address = connection.getsockname()[0]
            quickly = min(timeout, timedelta(seconds=_SECONDS_TO_ANSWER))
            # torch waits between tries, longer each time, beyond its timeout.
            seconds = 2 * quickly.total_seconds() + _SECONDS_FOR_THE_LAST_ANSWER
            try:
                store = within(seconds, dist.TCPStore, host, port, wait_for_workers=False, timeout=quickly)
            except TimeoutError:
                raise ExchangeError(
                    f"replica 0 listens at {self._address} and does not answer: its process or its machine stands "
                    "still",
                    (0,),
                ) from None
            except RuntimeError:
                raise ExchangeError(
                    f"what listens at {self._address} is no replica 0 without a secret: give this replica the "
                    "same secret (DILOCO_SECRET), or check the address",
                    (0,),
                ) from None
            store.set_timeout(timeout)
        return dist.PrefixStore("diloco", store), own_address

    def open_encrypted(self, security: Security, timeout_seconds: float) -> Session:
        """The session whose board is replica 0's.

        The first process of replica 0 listens at the address alone; process i of a replica at port + i of the
        interface that leads there, or at a free port where that one is taken.

        Raises:
            ExchangeError: if replica 0 has another proof, or none.
        """
        host, port = self._place
        board = None
        if self._is_host:
            listener, address = _listen(host, port)[0], self._address
        else:
            board = self._reach(lambda: dial(self._address, BOARD, security))
            own_address = board.getsockname()[0]
            try:
                listener, _ = _listen(own_address, port + self.site.rank)
            except UserError:
                listener, _ = _listen(own_address, 0)
            bracketed = f"[{own_address}]" if ":" in own_address else own_address
            address = f"{bracketed}:{listener.getsockname()[1]}"
        session = Session(security, listener, address, board, timeout_seconds=timeout_seconds)
        self._door = session.door
        return session

    @property
    def _place(self) -> tuple[str, int]:
        host, _, port = self._address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def _is_host(self) -> bool:
        return self.replica == 0 and self.site.rank == 0

    def compare(self, store: Store, facts: Mapping[str, object]) -> None:
        """Wait for every process of every replica, and compare what they believe.

        Raises:
            UserError: if they believe different things, or this replica has come already.
            ExchangeError: if one does not come in time, or replica 0 is gone or stands still.
        """
        store = BoundedStore(store, self.deadline + _SECONDS_FOR_THE_LAST_ANSWER)
        mine = f"{self.replica}/{self.site.rank}"
        if store.add(f"arrivals/{mine}", 1) > 1:
            raise UserError(
                f"process {self.site.rank} of replica {self.replica} has come to {self._address} already: give "
                "each replica a number of its own, and start the others anew with replica 0",
                "replica",
            )
        store.set(f"facts/{mine}", json.dumps({**facts, "size": self.site.size, "job": self.site.job}))
        waiting = {(replica, 0) for replica in range(self.num_replicas)}

        def missing() -> str:
            for replica, rank in sorted(waiting):
                if store.check([f"facts/{replica}/{rank}"]):
                    waiting.remove((replica, rank))
                    if rank == 0:
                        theirs = _arrival(store.get(f"facts/{replica}/0"), replica, facts)
                        self._check(replica, facts, theirs)
                        self.sizes[replica] = theirs["size"]
                        waiting.update((replica, other) for other in range(1, theirs["size"]))
            return ", ".join(
                f"process {rank} of replica {replica}" if rank else f"replica {replica}"
                for replica, rank in sorted(waiting)[:_MOST_NAMES]
            )

        self._wait_for_all(missing)

    def _check(self, replica: int, mine: Mapping[str, object], theirs: Mapping[str, Any]) -> None:
        for name, value in mine.items():
            if theirs[name] != value:
                raise UserError(
                    f"replica {self.replica} was started with {name}={value}, and replica {replica} with "
                    f"{name}={theirs[name]}: start all with the same",
                    name,
                )
        if replica != self.replica and self.site.job is not None and theirs["job"] == self.site.job:
            raise UserError(
                f"replicas {self.replica} and {replica} are processes of one job, {self.site.job}, which "
                "averages their gradients: start one torchrun a replica; for replicas inside one job there is "
                "ProcessGroupExchange",
                "replica",
            )

    def _reach(self, connect: Callable[[], S]) -> S:
        """A connection to replica 0, once it listens."""
        connections: list[S] = []

        def missing() -> str:
            try:
                connections.append(connect())
            except socket.gaierror as error:
                raise UserError(
                    f"address={self._address}: {self._place[0]} can't be resolved ({error})", "address"
                ) from None
            except OSError:
                return "replica 0"
            return ""

        self._wait_for_all(missing)
        return connections[0]

    def _wait_for_all(self, missing: Callable[[], str]) -> None:
        try:
            wait_for_all(
                missing,
                begin=self._begin,
                seconds=self._seconds,
                where=f" at {self._address}",
                remedy=f"start all {self.num_replicas} replicas within timeout_seconds, and check that this "
                "machine reaches that address",
            )
        except ExchangeError as error:
            if self._door is None or not self._door.refused:
                raise
            raise ExchangeError(f"{error} (refused: {self._door.refused})") from None


_SECONDS_TO_ANSWER = 10.0


_SECONDS_FOR_THE_LAST_ANSWER = 1.0


_MOST_PROCESSES = 1 << 16


_MOST_NAMES = 8


def _arrival(text: bytes, replica: int, facts: Mapping[str, object]) -> dict[str, Any]:
    """The facts of another process's arrival.

    Raises:
        ExchangeError: if the text is not that.
    """
    try:
        arrival = json.loads(text)
    except (ValueError, RecursionError):
        arrival = None
    if (
        not isinstance(arrival, dict)
        or arrival.keys() != {*facts, "size", "job"}
        or any(not isinstance(arrival[name], int | None) for name in facts)
        or not (type(arrival["size"]) is int and 1 <= arrival["size"] <= _MOST_PROCESSES)
        or not isinstance(arrival["job"], str | None)
    ):
        raise ExchangeError(
            f"replica {replica} came with facts that this version does not know: install the same version "
            "of diloco everywhere, and keep others from the address with a secret",
            (replica,),
        )
    return arrival


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
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
            "that host, and the port must be free",
            "address",
        ) from None
    return listener, str(where[0])
