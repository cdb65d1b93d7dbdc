"""The processes of a run: forked from one that has imported torch."""

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from diloco.errors import DilocoError, ExchangeError, ReplicaFailedError, exit_code_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a run."""


IMPORTS = ("torch.utils.tensorboard", "diloco.training.loop")
"""The modules that every replica needs; the first is the default tracker's."""


@dataclass(frozen=True)
class Work:
    """The work of all replicas of a run."""

    entrypoint: Callable[..., None]
    arguments: tuple[Any, ...]
    environments: tuple[dict[str, str], ...]
    """The variables of each process, by rank."""
    reports: tuple[Path, ...]
    """The file for the error of each process, by rank."""
    imports: tuple[str, ...] = ()
    """Modules that every process needs, beside `IMPORTS`."""


class Ancestor:
    """The ancestor, as the launcher sees it; a context that ends it.

    Args:
        start_method: `fork`, which spares it the imports that this process has made, as long as this process has
            started no threads; or else `spawn`.
    """

    def __init__(self, start_method: Literal["fork", "spawn"]) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._connection, theirs = context.Pipe()
        ours = self._connection if start_method == "fork" else None
        self._process = context.Process(target=_serve, args=(theirs, ours), name="ancestor")
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Ancestor":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join(_SECONDS_TO_LEAVE + 2 * _SECONDS_TO_END)  # the longest that `_end` takes
        self._process.kill()
        self._process.join()

    def run(self, work: Work) -> tuple[int, int] | None:
        """Run the replicas to their end; the rank and exit code of one that failed, if any.

        Raises:
            EOFError: if the ancestor was killed.
        """
        self._connection.send(work)
        return self._connection.recv()

    def forward(self, number: int, _: object = None) -> None:
        """End the replicas by a signal."""
        assert self._process.pid is not None, "it was started"
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


def import_modules(names: Iterable[str]) -> None:
    """Import modules for all children, without collections, which would take a fifth of the time and free nothing.

    What this process holds then is left out of later collections, also of its children's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def end_with_parent() -> None:
    """Have this process ended by SIGTERM when its parent ends, however that ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def on_signal(handler: Any) -> Iterator[None]:
    """Handle the signals that end a run otherwise; only the main thread may.

    An ignored one stays ignored: nohup lets a run survive its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _serve(connection: Connection, launchers: Connection | None) -> None:
    """Be the ancestor: do work after work until the launcher has none left."""
    end_with_parent()
    # The terminal sends it to all: the launcher decides. One that comes before the replicas is kept for later.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    if launchers is not None:
        launchers.close()
    import_modules(IMPORTS)
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(_run_all(connection.recv()))


def _run_all(work: Work) -> tuple[int, int] | None:
    """Run the replicas, and end the others when one fails, or when a signal says so."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes: list[BaseProcess] = []
    last_signal, failed = signal.SIGTERM, None
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # no replica inherits the handlers
    import_modules(work.imports)
    try:
        for environment, report in zip(work.environments, work.reports, strict=True):
            run = (environment, report, work.entrypoint, work.arguments)
            process = context.Process(target=_run, args=run)
            process.start()
            processes.append(process)
        with on_signal(_stop):
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                failed = _first_failure(processes)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    except _StoppedError as stopped:
        last_signal = stopped.signal
    finally:
        _end(processes, last_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(SIGNALS) - {signal.SIGINT})
    return failed


def _run(
    environment: dict[str, str], report: Path, entrypoint: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the entrypoint in the replica; write its error where the launcher looks for it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        end_with_parent()
        os.environ.update(environment)
        if "OMP_NUM_THREADS" in environment:
            import torch

            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has looked for the variable before
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


def _interrupt(number: int, _: object) -> None:
    """End a replica by KeyboardInterrupt, and let nothing be printed any more: the launcher says why it ended."""
    signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise KeyboardInterrupt


def _first_failure(processes: Sequence[BaseProcess]) -> tuple[int, int] | None:
    """Wait until a process fails, and return its rank and exit code; None once all have ended well."""
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode != 0:
                    return rank, process.exitcode
    return None


def _end(processes: Sequence[BaseProcess], last_signal: signal.Signals) -> None:
    """End the processes that still run; those that don't end in time are killed.

    One alone may still upload what it owes to others. Several that wait for each other inside of a library hear no
    SIGINT there.
    """
    seconds = _SECONDS_TO_LEAVE if len(processes) == 1 else _SECONDS_TO_END
    for number in (last_signal, signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.exitcode is None]
        for process in running:
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        deadline = time.monotonic() + seconds
        for process in running:
            process.join(max(deadline - time.monotonic(), 0))


_SECONDS_TO_LEAVE = 30.0


_SECONDS_TO_END = 5.0


class _StoppedError(Exception):
    """The run was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _stop(number: int, _: object) -> None:
    for each in SIGNALS:  # one is enough
        signal.signal(each, signal.SIG_IGN)
    raise _StoppedError(number)


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
