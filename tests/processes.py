"""Replicas for tests of collectives: real processes, joined by a gloo process group on this computer."""

import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Each replica is a fork of one process that has imported torch: it starts in milliseconds instead of seconds.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "torch.distributed.fsdp", "diloco.engine.streaming", "hypothesis"])


class ReplicaError(AssertionError):
    """A replica raised, died or ran out of time; the message holds its traceback."""


def run_replicas(
    function: Callable[..., Any],
    num_replicas: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    mortal: Collection[int] = (),
    joined: bool = True,
) -> list[Any]:
    """The results of `function(*args)` on each replica of a new process group, in replica order.

    Args:
        function: a function at the top level of its module.
        num_replicas: M, one process each.
        args: its arguments, pickled.
        timeout_seconds: for all of it.
        mortal: replicas that may end without a result; theirs is None.
        joined: False starts processes that know nothing of each other but `diloco.connect`'s environment.

    Raises:
        ReplicaError: with the traceback of the first replica that failed.
    """
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        address = None if joined else f"127.0.0.1:{free_port()}"
        pipes = [_CONTEXT.Pipe() for _ in range(num_replicas)]
        processes = [
            _CONTEXT.Process(
                target=_replica, args=(theirs, replica, num_replicas, folder, address, function, args)
            )
            for replica, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()
            return _results([ours for ours, _ in pipes], deadline, mortal)
        finally:
            for process in processes:
                process.terminate()  # a signal that coverage can catch
            for process, (ours, _) in zip(processes, pipes, strict=True):
                process.join(5)
                process.kill()
                process.join()
                ours.close()


def _results(connections: Sequence[Any], deadline: float, mortal: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(connections)
    waiting = set(range(len(connections)))
    while waiting:
        ready = wait([connections[replica] for replica in waiting], max(deadline - time.monotonic(), 0))
        if not ready:
            raise ReplicaError(f"replicas {sorted(waiting)} have not finished in time")
        for replica in [replica for replica in waiting if connections[replica] in ready]:
            waiting.remove(replica)
            try:
                results[replica], error = connections[replica].recv()
            except EOFError:
                error = None if replica in mortal else "it ended without a result"
            if error is not None:
                raise ReplicaError(f"replica {replica} of {len(connections)}: {error}")
    return results


def init_group(folder: str, rank: int, size: int) -> None:
    """Join a gloo process group that meets at a file."""
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def free_port() -> int:
    """A port of this computer that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _replica(
    connection: Connection,
    replica: int,
    num_replicas: int,
    folder: str,
    address: str | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if address is None:
            init_group(folder, replica, num_replicas)
        else:
            names = ("DILOCO_ADDRESS", "DILOCO_REPLICA", "DILOCO_NUM_REPLICAS")
            os.environ |= dict(zip(names, (address, str(replica), str(num_replicas)), strict=True))
        connection.send((function(*args), None))
    except BaseException:
        connection.send((None, traceback.format_exc()))
    # A replica that leaves breaks connections which others may still use: stay until the parent ends all.
    connection.poll(None)
