"""The store at which the processes of a run meet, and the wait for those that have not come, by name."""

import logging
import os
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
_SECONDS_BETWEEN_LOOKS = 0.1


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
    store.set(_key(rank), "")
    missing = _missing(store, [*range(world_size)])
    begin, last_names = time.monotonic(), ""
    while missing:
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
        missing = _missing(store, missing)
    return store


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
    return dist.PrefixStore("diloco", store)


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
