"""Local replicas as processes of their own, each with its share of the cores; no other machine can reach them."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.errors import ReplicaFailedError
from diloco.training.ancestor import Ancestor, Work, on_signal

STORE = "DILOCO_LOCAL_STORE"
"""The environment variable with the file at which local replicas meet; torchrun's replicas have none."""


def under_a_launcher() -> bool:
    """True if torchrun, or this module, started this process."""
    return "RANK" in os.environ


@contextmanager
def prepared() -> Iterator[None]:
    """Have the replicas of `launch` in this context start sooner; enter it before this process starts threads."""
    if under_a_launcher() or sys.platform != "linux":
        yield
        return
    with Ancestor("fork") as ancestor:
        _PREPARED.append(ancestor)
        try:
            yield
        finally:
            _PREPARED.remove(ancestor)


_PREPARED: list[Ancestor] = []


def launch(
    entrypoint: Callable[..., None],
    num_replicas: int,
    num_ranks: int,
    *arguments: Any,
    imports: tuple[str, ...] = (),
) -> None:
    """Run `entrypoint(*arguments)` in `num_replicas` · `num_ranks` local processes, and wait for all of them.

    Each uses its share of the cores, or OMP_NUM_THREADS threads. They meet at a file that only this user can read,
    and listen on the loopback interface alone. When one fails, the others are ended. `imports` are modules that
    all of them need, which are then imported once.

    Raises:
        ReplicaFailedError: with the message, fields and exit code of the error that the entrypoint raised, or with
            the signal that killed it.
    """
    if not _PREPARED:
        with Ancestor("spawn") as ancestor:
            return _launch(ancestor, entrypoint, num_replicas, num_ranks, arguments, imports)
    return _launch(_PREPARED[-1], entrypoint, num_replicas, num_ranks, arguments, imports)


def _launch(
    ancestor: Ancestor,
    entrypoint: Callable[..., None],
    num_replicas: int,
    num_ranks: int,
    arguments: Any,
    imports: tuple[str, ...],
) -> None:
    num_processes = num_replicas * num_ranks
    signals: list[signal.Signals] = []

    def forward(number: int, _: object) -> None:
        signals.append(signal.Signals(number))
        ancestor.forward(number)

    with tempfile.TemporaryDirectory(prefix="diloco-") as folder, on_signal(forward):
        environments = tuple(_environment(rank, num_processes, folder) for rank in range(num_processes))
        reports = tuple(Path(folder, f"error-{rank}.json") for rank in range(num_processes))
        try:
            failed = ancestor.run(Work(entrypoint, arguments, environments, reports, imports))
        except (EOFError, ConnectionError):
            if not signals:
                sentence = "the process that starts the replicas was killed (out of memory?)"
                raise ReplicaFailedError(sentence, exit_code=1) from None
            failed = None
        if signals:
            raise ReplicaFailedError(f"stopped by {signals[0].name}", exit_code=128 + signals[0])
        if failed is not None:
            rank, exit_code = failed
            raise _explain(rank, exit_code, reports[rank], num_ranks)


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment(rank: int, num_processes: int, folder: str) -> dict[str, str]:
    """The variables that tell a process its place, as torchrun names them, and its share of the machine."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    share = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_processes))}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        STORE: str(Path(folder, "store")),
        # Of every process, whatever interface the user names for runs on several machines.
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    } | ({} if os.environ.get("OMP_NUM_THREADS") else share)


def _explain(rank: int, exit_code: int, report: Path, num_ranks: int) -> ReplicaFailedError:
    """The error of a process that failed, as it reported it itself, or else by its exit code."""
    if report.is_file():
        error = json.loads(report.read_text())
        return ReplicaFailedError(error["message"], exit_code=exit_code, fields=tuple(error["fields"]))
    process = f", process {rank % num_ranks}," if num_ranks > 1 else ""
    return ReplicaFailedError(f"replica {rank // num_ranks}{process} {_ending(exit_code)}", exit_code=1)


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {signal.Signals(-exit_code).name}"
