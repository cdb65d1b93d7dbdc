"""Local replicas as processes of their own, each with its share of the cores; no other machine can reach them."""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from diloco.errors import DilocoError, ExchangeError, ReplicaFailedError, exit_code_of

STORE = "DILOCO_LOCAL_STORE"
"""The environment variable with the file at which local replicas meet; torchrun's replicas have none."""


def under_a_launcher() -> bool:
    """True if torchrun, or this module, started this process."""
    return "RANK" in os.environ


def launch(entrypoint: Callable[..., None], num_replicas: int, num_ranks: int, *arguments: Any) -> None:
    """Run `entrypoint(*arguments)` in `num_replicas` · `num_ranks` local processes, and wait for all of them.

    Each uses its share of the cores, or OMP_NUM_THREADS threads. They meet at a file that only this user can read,
    and listen on the loopback interface alone. When one fails, the others are ended.

    Raises:
        ReplicaFailedError: with the message, fields and exit code of the error that the entrypoint raised, or with
            the signal that killed it.
    """
    num_processes = num_replicas * num_ranks
    os.environ["OMP_NUM_THREADS"] = _USERS_THREADS or str(max(1, num_cores() // num_processes))
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["diloco.training.ancestor"])
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder, _on_signal(_stop):
        processes: list[BaseProcess] = []
        last_signal = signal.SIGTERM
        try:
            for rank in range(num_processes):
                environment = _environment(rank, num_processes, folder)
                run = (environment, _report_path(folder, rank), entrypoint, arguments)
                process = context.Process(target=_run, args=run)
                process.start()
                processes.append(process)
            failed = _first_failure(processes)
        except _StoppedError as stopped:
            last_signal = stopped.signal
            raise ReplicaFailedError(f"stopped by {last_signal.name}", exit_code=128 + last_signal) from None
        finally:
            _end(processes, last_signal)
        if failed is not None:
            report, exit_code = _report_path(folder, failed), processes[failed].exitcode
            raise _explain(failed, exit_code or 0, report, num_ranks)


_USERS_THREADS = os.environ.get("OMP_NUM_THREADS")


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Have this process ended by SIGTERM when its parent ends, however that ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _environment(rank: int, num_processes: int, folder: str) -> dict[str, str]:
    """The variables that tell a process its place, as torchrun names them."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        STORE: str(Path(folder, "store")),
        # Of every process, whatever interface the user names for runs on several machines.
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def _run(
    environment: dict[str, str], report: Path, entrypoint: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the entrypoint in the replica; write its error where the launcher looks for it."""
    end_with_parent()
    os.environ.update(environment)
    try:
        entrypoint(*arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        exit_code = exit_code_of(error)
        if exit_code is None or os.environ.get("DILOCO_TRACEBACK"):
            traceback.print_exc()
            raise SystemExit(1) from None
        if isinstance(error, ExchangeError):
            # The launcher reports the replica that ends first, which should be the one that caused this.
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        fields = error.fields if isinstance(error, DilocoError) else ()
        report.write_text(json.dumps({"message": str(error), "fields": fields}))
        raise SystemExit(exit_code) from None


_SECONDS_FOR_THE_CAUSE = 3.0


def _first_failure(processes: Sequence[BaseProcess]) -> int | None:
    """Wait until a process fails, and return its rank; None once all have ended well."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode != 0:
                    return rank
    return None


def _end(processes: Sequence[BaseProcess], last_signal: signal.Signals) -> None:
    """End the processes that still run; those that don't end in time are killed."""
    with _on_signal(signal.SIG_IGN):
        running = [process for process in processes if process.exitcode is None]
        for process in running:
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError):
                os.kill(process.pid, last_signal)
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in running:
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is None:
                process.kill()
                process.join(_SECONDS_TO_END)


_SECONDS_TO_END = 30.0


class _StoppedError(Exception):
    """The launcher was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _stop(number: int, _: object) -> None:
    raise _StoppedError(number)


@contextmanager
def _on_signal(handler: Any) -> Iterator[None]:
    """Handle the signals that end a program otherwise; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"error-{rank}.json")


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
