"""The processes of a run and of experiments: each is forked from one that has imported torch, which takes seconds.

That one is the ancestor. It forks a process for each call that it is sent, and ends with the process that started
it: `launch` calls a supervisor, which forks the replicas of a run; a grid of experiments calls its jobs, and each
of them launches a run in turn.
"""

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diloco.errors import DilocoError, ExchangeError, FileWriteError, ReplicaFailedError, exit_code_of
from diloco.files import num_cores

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig

SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),  # which schedulers send before they preempt a job
)
"""The signals that end a run; `AT_ONCE` does so without a checkpoint."""

_LOG = logging.getLogger("diloco")

AT_ONCE = signal.SIGQUIT
"""Ctrl-\\ in a terminal, and what a second Ctrl-C becomes."""

SECONDS_BETWEEN_SIGNALS = 1.0
"""Time within which a signal is the same one, once more: `timeout` and others send it twice."""

STORE = "DILOCO_LOCAL_STORE"
"""The environment variable with the file at which local replicas meet; torchrun's replicas have none."""

_IMPORTS = ("torch.utils.tensorboard", "diloco.training.loop")
"""The modules that every replica needs; the first is the default tracker's."""


def slow_imports(config: "TrainConfig") -> tuple[str, ...]:
    """Modules that every process of a run needs beside these, and that take a second to import."""
    modules = config.model.slow_imports
    if config.rendezvous is not None:
        modules = (*modules, "diloco.rendezvous.store_rendezvous")
    if config.shards_per_replica > 1:
        cut = ("torch.distributed.tensor.parallel",) if config.tensor_parallel > 1 else ()
        return (*modules, "torch._dynamo", "torch.distributed.fsdp", *cut)
    needs_dynamo = config.method == "data_parallel" or config.ddp_per_replica > 1 or config.compile
    return (*modules, "torch._dynamo") if needs_dynamo else modules


@contextmanager
def without_collections() -> Iterator[None]:
    """Import modules in this context without collections, which would take a fifth of the time and free nothing.

    What this process holds then is left out of later collections, also of its children's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_modules(names: Iterable[str]) -> None:
    """Import modules for all children."""
    with without_collections():
        for name in names:
            import_module(name)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have this process ended by a signal when its parent ends, however that ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


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


class Call:
    """A call of a function in a process that an ancestor forks for it.

    The process begins with SIGNALS blocked, and gets SIGTERM when the ancestor ends.

    Args:
        function: a function at the top level of its module.
        arguments: its arguments, pickled.
        imports: modules that this call and later ones need, which are then imported once.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, imports: Iterable[str] = ()) -> None:
        self.request = function, arguments, tuple(imports)
        self.pid: int | None = None
        """The process's number, once it has started."""
        self.ended_by: int | None = None
        """The first signal that was to end it."""
        self.is_ended_at_once = False
        """True once a second one was."""
        self._ended_at = 0.0
        self.is_over = False
        """True once the process has answered or ended."""

    def end(self, number: int = signal.SIGTERM, _: object = None) -> None:
        """End the process by a signal, at its start if it has not started yet; a second one becomes AT_ONCE."""
        now = time.monotonic()
        if self.ended_by is None:
            self.ended_by, self._ended_at = number, now
        elif now - self._ended_at < SECONDS_BETWEEN_SIGNALS:
            return
        else:
            self.is_ended_at_once, number = True, AT_ONCE
        self._send(number)

    def started(self, pid: int) -> None:
        """Note the process's number; a call that was to end before ends now."""
        self.pid = pid
        if self.ended_by is not None:
            self._send(self.ended_by)

    def _send(self, number: int) -> None:
        if self.pid is not None and not self.is_over:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Ancestor:
    """The ancestor, as the process that started it sees it; a context that ends it.

    Args:
        start_method: `fork`, which spares it the imports that this process has made, as long as this is the main
            thread and there is no other; or else `spawn`.
    """

    def __init__(self, start_method: Literal["fork", "spawn"]) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._connection, theirs = Pipe()
        ours = self._connection if start_method == "fork" else None
        self._process = context.Process(target=_serve, args=(theirs, ours), name="ancestor")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a fork begins with them blocked
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def __enter__(self) -> "Ancestor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and by that the processes that it has forked."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    @property
    def is_alive(self) -> bool:
        """False once it was killed."""
        return self._process.is_alive()

    def run(self, call: Call) -> Any:
        """Run a call to its end, and return its result; several threads may do so at once.

        Raises:
            EOFError: if the process ended without a result, or, with `call.pid` None, was never started.
        """
        ours, theirs = Pipe()
        with ours:
            try:
                with theirs:
                    send_handle(self._connection, theirs.fileno(), self._process.pid)
                ours.send(call.request)
                call.started(ours.recv())
                return ours.recv()
            except ConnectionError as error:
                raise EOFError from error
            finally:
                call.is_over = True


def _serve(control: Connection, launchers: Connection | None) -> None:
    """Be the ancestor: fork a process for each call, until the process that sends them has ended."""
    # A terminal, or who stops a service, sends them to all: the process that launches decides.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if launchers is not None:
        # The connection may stay open: other forks of the launcher hold its end, too.
        end_with_parent(signal.SIGKILL)
        launchers.close()
    import_modules(_IMPORTS)
    with suppress(EOFError):
        while True:
            with Connection(recv_handle(control)) as connection, suppress(EOFError, ConnectionError):
                function, arguments, imports = connection.recv()
                with suppress(ImportError):  # the process itself says so
                    import_modules(imports)
                _children().Process(target=_answer, args=(connection, function, arguments)).start()
    os._exit(0)  # without waiting for its children, which end with it


def _children() -> Any:
    """The context of processes that find torch imported, where one that has imported it can be forked."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be the process of a call."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ancestor = multiprocessing.parent_process()
    end_with_parent()
    if ancestor is None or os.getppid() != ancestor.pid:  # it had ended before
        raise SystemExit(1)
    with suppress(BrokenPipeError):  # the process that waits for it was ended meanwhile
        connection.send(os.getpid())
        connection.send(function(*arguments))


def under_a_launcher() -> bool:
    """True if torchrun, or this module, started this process."""
    return "RANK" in os.environ


def is_first_on_machine() -> bool:
    """True if this process is to say what this machine does; of several that a launcher has started, one is."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def process_name(processes_per_replica: int, rank: int) -> str:
    """The name of a process, by its number among all."""
    replica, process = divmod(rank, processes_per_replica)
    return f"replica {replica}" if processes_per_replica == 1 else f"process {process} of replica {replica}"


@contextmanager
def prepared() -> Iterator[None]:
    """Have the replicas of `launch` in this context start sooner; enter it before this process starts threads.

    In a context of the same kind it does nothing.
    """
    if under_a_launcher() or sys.platform != "linux" or _PREPARED:
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
    processes_per_replica: int,
    *arguments: Any,
    imports: tuple[str, ...] = (),
) -> None:
    """Run `entrypoint(*arguments)` in all local processes of a run, and wait for all of them.

    Each uses its share of the cores, or OMP_NUM_THREADS threads. They meet at a file (on Linux one without a
    name), and listen on the loopback interface alone. When one fails, the others are ended. `imports` are modules
    that all of them need, which are then imported once.

    A signal is passed on to all processes, which may save their work before they end; a second one, some time
    later, ends them at once.

    Raises:
        ReplicaFailedError: with the message, fields and exit code of the error that the entrypoint raised, or with
            the signal that killed it.
    """
    call = Call(_supervise, entrypoint, num_replicas, processes_per_replica, arguments, imports=imports)
    error = ReplicaFailedError("the process that starts the replicas was killed (out of memory?)", exit_code=1)
    ancestors = nullcontext(_PREPARED[-1]) if _PREPARED else Ancestor("spawn")

    def end(number: int, _: object) -> None:
        if call.ended_by is None and sys.stderr.isatty():
            _LOG.warning("the replicas end after this step; a second signal ends them at once")
        call.end(number)

    with ancestors as ancestor, on_signal(end):
        try:
            error = ancestor.run(call)
        except EOFError:
            if call.ended_by is not None:
                error = _stopped(call.ended_by, at_once=call.is_ended_at_once)
    if error is not None:
        raise error


def _stopped(number: int, *, at_once: bool = False) -> ReplicaFailedError:
    """The error of processes that a signal has ended and that say nothing themselves."""
    how = "at once by a second signal" if at_once else f"by {signal.Signals(number).name}"
    return ReplicaFailedError(f"stopped {how}", exit_code=128 + number)


def _supervise(
    entrypoint: Callable[..., None], num_replicas: int, processes_per_replica: int, arguments: tuple[Any, ...]
) -> ReplicaFailedError | None:
    """Run the replicas, pass a signal on to them, and end all when one fails; return the error, if any."""
    num_processes, parent = num_replicas * processes_per_replica, os.getppid()
    processes: list[BaseProcess] = []
    signals: list[int] = []
    last_signal = AT_ONCE

    def stop(number: int, _: object) -> None:
        nonlocal last_signal
        # Of an orphan's run nobody holds the lock: a resume may begin now.
        if number in (AT_ONCE, signal.SIGALRM) or os.getppid() != parent:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_IGN)
            last_signal = signal.SIGKILL
            raise SystemExit(128 + number)
        if not signals:  # the launcher passes on what the terminal has sent already
            signals.append(number)
            signal.alarm(_SECONDS_TO_STOP)
            _send(processes, number)

    reports = list[Any]()
    with _meeting_file() as store:
        try:
            for rank in range(num_processes):  # with the signals blocked: none inherits the handlers
                report, theirs = Pipe(duplex=False)
                run = (_environment(rank, num_processes, store), theirs, entrypoint, arguments)
                process = _children().Process(target=_run, args=run)
                process.start()
                theirs.close()
                reports.append(report)
                processes.append(process)
            with on_signal(stop):
                signal.signal(signal.SIGALRM, stop)
                try:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                    failed = _first_failure(processes)
                finally:
                    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        finally:
            _end(processes, last_signal)
        if failed is None:
            return None
        rank, exit_code = failed
        return _explain(rank, exit_code, reports[rank], processes_per_replica, signals)


@contextmanager
def _meeting_file() -> Iterator[str]:
    """The path, in each child, of a file that ends with the last process that holds it, however that ends."""
    try:
        descriptor = os.memfd_create("diloco")
    except (AttributeError, OSError):  # another system, an old libc, or a kernel that forbids it
        try:
            temporary = tempfile.TemporaryDirectory(prefix="diloco-")
        except OSError as error:
            raise FileWriteError(f"no temporary directory can be made: {error}") from None
        with temporary as folder:
            yield str(Path(folder, "store"))
        return
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _run(
    environment: dict[str, str], report: Connection, entrypoint: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the entrypoint in the replica; send its error to the launcher."""
    try:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        end_with_parent(signal.SIGKILL)
        os.environ.update(environment)
        if "OMP_NUM_THREADS" in environment:
            import torch

            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has looked for the variable before
        entrypoint(*arguments)
    except (Exception, KeyboardInterrupt) as error:
        exit_code = exit_code_of(error)
        if exit_code is not None and not str(error):  # a signal has ended it before it could say more
            raise SystemExit(exit_code) from None
        if exit_code is None or os.environ.get("DILOCO_TRACEBACK"):
            traceback.print_exc()
            raise SystemExit(1) from None
        if isinstance(error, ExchangeError):
            # The launcher reports the replica that ends first, which should be the one that caused this.
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        fields = error.fields if isinstance(error, DilocoError) else ()
        report.send_bytes(json.dumps({"message": str(error)[:_MOST_LETTERS], "fields": fields}).encode())
        raise SystemExit(exit_code) from None


_SECONDS_FOR_THE_CAUSE = 3.0
_MOST_LETTERS = 4000
"""Letters of an error that a pipe holds, with those that JSON adds, before anybody reads it."""


def _interrupt(number: int, _: object) -> None:
    """End a replica by KeyboardInterrupt, and let nothing be printed any more: the launcher says why it ended."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
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


def _send(processes: Sequence[BaseProcess], number: int) -> list[BaseProcess]:
    """Send a signal to the processes that still run, and return these."""
    running = [process for process in processes if process.exitcode is None]
    for process in running:
        assert process.pid is not None, "it was started"
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    return running


def _end(processes: Sequence[BaseProcess], last_signal: int) -> None:
    """End the processes that still run by a signal; those that don't end in time are killed.

    One alone may still upload what it owes to others. Several that wait for each other inside of a library hear no
    signal there.
    """
    seconds = _SECONDS_TO_LEAVE if len(processes) == 1 else _SECONDS_TO_END
    for number in (last_signal, signal.SIGKILL):
        deadline = time.monotonic() + seconds
        for process in _send(processes, number):
            process.join(max(deadline - time.monotonic(), 0))


_SECONDS_TO_STOP = 600
"""Time for processes to save their work; they bound each wait for others themselves."""
_SECONDS_TO_LEAVE = 30.0
_SECONDS_TO_END = 5.0


def _environment(rank: int, num_processes: int, store: str) -> dict[str, str]:
    """The variables that tell a process its place, as torchrun names them, and its share of the machine."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    share = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_processes))}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        STORE: store,
        # Of every process, whatever interface the user names for runs on several machines.
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    } | ({} if os.environ.get("OMP_NUM_THREADS") else share)


def _explain(
    rank: int, exit_code: int, report: Connection, processes_per_replica: int, signals: Sequence[int] = ()
) -> ReplicaFailedError:
    """The error of a process that failed, as it reported it itself, or else by the signals or its exit code."""
    with suppress(EOFError, OSError):  # it has sent nothing, or was killed amid it
        if report.poll():
            error = json.loads(report.recv_bytes())
            return ReplicaFailedError(error["message"], exit_code=exit_code, fields=tuple(error["fields"]))
    if signals:
        return _stopped(signals[0])
    replica, process = divmod(rank, processes_per_replica)
    name = f"replica {replica}" + (f", process {process}," if processes_per_replica > 1 else "")
    return ReplicaFailedError(f"{name} {_ending(exit_code)}", exit_code=1)


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {signal.Signals(-exit_code).name}"
