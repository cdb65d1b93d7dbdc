"""The store at which the processes of a run meet, and the wait for those that have not come, by name."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from diloco.errors import UserError
from diloco.training.launcher import STORE

_LOG = logging.getLogger("diloco")
_SECONDS_OF_SILENCE = 3.0
_SECONDS_BETWEEN_LOOKS = 0.05


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
        TimeoutError: naming the processes that have not come.
        RuntimeError: if the first process can't be reached.
    """
    timeout = timedelta(seconds=timeout_seconds)
    path = os.environ.get(STORE)
    store = dist.FileStore(path, world_size) if path else _torchruns_store(rank, name_of(0), timeout)
    store.set_timeout(timeout)
    meeting = _Meeting(store, rank, world_size)
    begin, last_names = time.monotonic(), ""
    while (missing := meeting.missing()) is not None:
        seconds, names = time.monotonic() - begin, ", ".join(map(name_of, missing[:8]))
        if seconds > timeout_seconds:
            raise TimeoutError(
                f"{names} did not come within {timeout_seconds:g} s: start the replicas within that time of each "
                "other, or raise timeout_seconds"
            )
        if rank == 0 and seconds > _SECONDS_OF_SILENCE and names != last_names:
            _LOG.warning("waiting for %s …", names)
            last_names = names
        time.sleep(_SECONDS_BETWEEN_LOOKS)
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


def _torchruns_store(rank: int, first: str, timeout: timedelta) -> dist.Store:
    """The store that the environment describes; the first process opens it, unless torchrun has."""
    host, port = _address()
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        with _said_after_a_moment(f"waiting for {first} at {host}, port {port} …"):
            store = dist.TCPStore(host, port, is_master=opens, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {port} of {host} is in use: set MASTER_PORT to another one, the same for all"
            ) from error
        raise
    return store


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


@contextmanager
def _said_after_a_moment(sentence: str) -> Iterator[None]:
    timer = threading.Timer(_SECONDS_OF_SILENCE, _LOG.warning, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
