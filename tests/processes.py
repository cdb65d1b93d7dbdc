"""Replicas for tests of collectives: real processes, joined by a gloo process group on this computer."""

import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.forks import fork_pythons, start_pythons
from tests.ports import free_port

from diloco.training.processes import end_with_parent

# Each replica is a fork of one process that has imported torch: it starts in milliseconds instead of seconds.
_CONTEXT = get_context("forkserver")
_IMPORTED = [
    "pytest",
    "hypothesis",
    "typeguard",
    "rich._emoji_codes",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "diloco.training.loop",
    "diloco.models.language_model",
    "diloco.cli.train",
    "diloco.report.reach",
    "diloco.report.runs",
    "diloco.report.terminal.training",
    "diloco.rendezvous.store_rendezvous",
    "diloco.wire.floats",
    "diloco.wire.sparse",
]
_CONTEXT.set_forkserver_preload(_IMPORTED)
_FRAMEWORKS = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.grpo_trainer",
]
"""Modules that together take seven seconds of a processor: one process imports them for all tests, if one asks."""
_SERVER = "TESTS_FORK_SERVER"
_CAN_SHARE = sys.version_info < (3, 14)  # later servers ask for a key


def share_server() -> None:
    """Let the test processes that this one starts fork from its server.

    It and they are forks of this process, which imports torch once for all, and spares them from collections of
    garbage. What the server's forks print is lost: pytest would show it amid the report.
    """
    fork_pythons()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    if _CAN_SHARE:
        streams, null = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(null, number)
        forkserver.ensure_running()
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        os.close(null)
        os.environ[_SERVER] = os.fsdecode(forkserver._forkserver._forkserver_address)


def _client(address: str) -> forkserver.ForkServer:
    """A client of a server of forks at an address, which another process has started."""
    client = forkserver.ForkServer()
    client._forkserver_address, client._forkserver_alive_fd = address, os.pipe()[1]
    client.ensure_running = resource_tracker.ensure_running
    return client


def use_server(address: str) -> None:
    """Let this process fork from a server that another one has started."""
    forkserver._forkserver = _client(address)
    forkserver.ensure_running = forkserver._forkserver.ensure_running
    forkserver.connect_to_new_process = forkserver._forkserver.connect_to_new_process


def find_server() -> None:
    """Use the server of the process that started this one, if that shares one, and start interpreters anew."""
    start_pythons()
    if address := os.environ.pop(_SERVER, None):
        use_server(address)


@functools.cache
def _frameworks() -> forkserver.ForkServer:
    """The server whose forks have imported frameworks; it is a fork of the other one, and ends with that."""
    forkserver.ensure_running()
    path = f"{forkserver._forkserver._forkserver_address}-frameworks"
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(path).exists():
            process = _CONTEXT.Process(target=_serve_frameworks, args=(path,))
            process.start()
            multiprocessing.process._children.discard(process)  # so that the end of this one does not wait for it
            wait_for_files(path)
    return _client(path)


def _serve_frameworks(path: str) -> None:
    end_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # the parent ends when nobody has it open
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}-new")
        listener.listen()
        Path(f"{path}-new").rename(path)
        end, _never_closed = os.pipe()
        forkserver.main(listener.detach(), end, _FRAMEWORKS)


def _start(process: BaseProcess, imports: Sequence[str]) -> None:
    """Start a process as a fork of one that has imported frameworks, if it needs them, or else torch."""
    if _CAN_SHARE and any(module in _FRAMEWORKS for module in imports):
        connect = _frameworks().connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
    else:
        process.start()


class ReplicaError(AssertionError):
    """A replica raised, died or ran out of time; the message holds its traceback."""


def run_replicas(
    function: Callable[..., Any],
    num_replicas: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    mortal: Collection[int] = (),
    joined: bool = True,
    imports: Sequence[str] = (),
) -> list[Any]:
    """The results of `function(*args)` on each replica of a new process group, in replica order.

    Args:
        function: a function at the top level of its module.
        num_replicas: M, one process each.
        args: its arguments, pickled.
        timeout_seconds: for all of it.
        mortal: replicas that may end without a result; theirs is None.
        joined: False starts processes that know nothing of each other but `diloco.connect`'s environment.
        imports: modules, beside the function's own, that are imported once for all replicas.

    Raises:
        ReplicaError: with the traceback of the first replica that failed.
    """
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        address = None if joined else f"127.0.0.1:{free_port()}"
        pipes = [_CONTEXT.Pipe() for _ in range(num_replicas)]
        ours, theirs = zip(*pipes, strict=True)
        parent = _CONTEXT.Process(target=_fork_replicas, args=(theirs, imports, folder, address, function, args))
        try:
            _start(parent, imports)
            for connection in theirs:
                connection.close()
            return _results(ours, deadline, mortal, folder)
        finally:
            parent.terminate()
            parent.join(10)
            parent.kill()
            parent.join()
            for connection in ours:
                connection.close()


def run_main(
    main: Callable[..., Any],
    *args: Any,
    folder: Path,
    timeout_seconds: float,
    imports: Sequence[str] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `main(*args)` as a program of its own, in a folder, in a process that finds torch imported.

    Args:
        main: a function at the top level of its module.
        args: its arguments, pickled.
        folder: the working directory.
        timeout_seconds: for all of it; what the program has started is then killed, too.
        imports: modules that it needs: if there are frameworks among them, it finds those imported, too.
        environment: variables beside those of this process.
    """
    with program(main, *args, folder=folder, imports=imports, **environment) as running:
        return running.wait(timeout_seconds)


@contextmanager
def program(
    main: Callable[..., Any], *args: Any, folder: Path, imports: Sequence[str] = (), **environment: str
) -> Iterator["Program"]:
    """Start a program as `run_main` does; what it has started is killed at the end."""
    with tempfile.TemporaryDirectory() as streams:
        running = Program(main, args, folder, Path(streams), os.environ | environment, imports)
        try:
            yield running
        finally:
            if running.process.exitcode is None:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.join()


class Program:
    """A program of its own, the first process of its group."""

    def __init__(
        self,
        main: Callable[..., Any],
        args: Any,
        folder: Path,
        streams: Path,
        environment: dict[str, str],
        imports: Sequence[str],
    ) -> None:
        self.args, self._output, self._errors = args, streams / "output", streams / "errors"
        arguments = (main, args, folder, self._output, self._errors, environment)
        self.process = _CONTEXT.Process(target=_be_program, args=arguments)
        _start(self.process, imports)
        self.pid = self.process.pid

    def wait(self, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        self.process.join(timeout_seconds)
        output, errors = (path.read_text() if path.exists() else "" for path in (self._output, self._errors))
        if self.process.exitcode is None:
            raise ReplicaError(f"{self.args} has not finished in time: {output}{errors}")
        return subprocess.CompletedProcess(self.args, self.process.exitcode, output, errors)

    def wait_for_lines(self, num_lines: int, *, timeout_seconds: float = 60.0) -> list[str]:
        """The lines that it has printed, once they are so many."""
        deadline = time.monotonic() + timeout_seconds
        while not self._output.exists() or len(lines := self._output.read_text().splitlines()) < num_lines:
            assert time.monotonic() < deadline and self.process.exitcode is None, self._errors.read_text()
            time.sleep(0.02)
        return lines


def run_mains(
    calls: Sequence[tuple[Any, ...]], *, folder: Path, timeout_seconds: float, imports: Sequence[str]
) -> list[subprocess.CompletedProcess[str]]:
    """Programs one after another, as `run_main` runs them, each a function and its arguments.

    All of them are forked from one process that has imported modules, which take seconds.
    """
    arguments = (list(calls), folder, tuple(imports))
    done = run_main(_be_programs, *arguments, folder=folder, timeout_seconds=timeout_seconds, imports=imports)
    assert done.returncode == 0, done.stderr
    results = [
        subprocess.CompletedProcess(call[1:], *result)
        for call, result in zip(calls, json.loads(done.stdout), strict=False)
    ]
    failed = next((result for result in results if result.returncode), None)
    assert failed is None, f"{failed.args}: {failed.stdout}{failed.stderr}"
    return results


def _be_programs(calls: Sequence[tuple[Any, ...]], folder: Path, imports: Sequence[str]) -> None:
    for module in imports:
        importlib.import_module(module)
    results = []
    with tempfile.TemporaryDirectory() as streams:
        output, errors = Path(streams, "output"), Path(streams, "errors")
        for main, *args in calls:
            arguments = (main, args, folder, output, errors, os.environ.copy())
            process = get_context("fork").Process(target=_be_program, args=arguments)
            process.start()
            process.join()
            results.append((process.exitcode, output.read_text(), errors.read_text()))
            output.unlink()
            errors.unlink()
            if process.exitcode:
                break
    sys.stdout.write(json.dumps(results))


def _be_program(
    main: Callable[..., Any], args: Any, folder: Path, output: Path, errors: Path, variables: dict[str, str]
) -> None:
    start_pythons()  # the server is a fork of a process that forks them
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if num_threads := variables.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(num_threads))  # torch has looked for the variable before
    shorten_samples()
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    main(*args)


def shorten_samples() -> None:
    """Let this process and its forks write few tokens of each sample: whole ones take a quarter of a tiny run."""
    from diloco.training.records import samples  # which every process has imported by now

    samples._NUM_TOKENS = SAMPLE_TOKENS


SAMPLE_TOKENS = 16


def _results(connections: Sequence[Any], deadline: float, mortal: Collection[int], folder: str) -> list[Any]:
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
                fault = Path(folder, f"fault-{replica}")
                fault = fault.read_text() if fault.exists() else ""
                error = None if replica in mortal else f"it ended without a result\n{fault}"
            if error is not None:
                raise ReplicaError(f"replica {replica} of {len(connections)}: {error}")
    return results


def init_group(folder: str, rank: int, size: int) -> None:
    """Join a gloo process group that meets at a file."""
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def wait_for_files(*paths: str | Path, seconds: float = 20.0) -> None:
    """Wait until other processes have made files."""
    deadline = time.monotonic() + seconds
    while not all(Path(path).exists() for path in paths):
        assert time.monotonic() < deadline, f"not all of {paths} came in time"
        time.sleep(0.01)


def wait_for_end(pid: int, *, seconds: float = 20.0) -> None:
    """Wait until a process of this machine has ended, and the kernel has closed its connections."""
    deadline = time.monotonic() + seconds
    with suppress(FileNotFoundError, ProcessLookupError):
        # The state comes after the name in parentheses.
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} has not ended in time"
            time.sleep(0.01)


def _fork_replicas(
    connections: Sequence[Connection],
    imports: Sequence[str],
    folder: str,
    address: str | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    """Run the replicas until SIGTERM, or the end of the test process.

    By now this process has imported, for all of them, the function's module.
    """
    start_pythons()  # as `_be_program` does
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    for module in imports:
        importlib.import_module(module)
    gc.freeze()  # a framework that collects garbage would visit what was imported
    arguments = before, connections, folder, address, function, args
    processes = [
        get_context("fork").Process(target=_replica, args=(i, *arguments)) for i in range(len(connections))
    ]
    try:
        # While it forks, Python ignores what a handler raises: replicas that are quick would let it miss its end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        for connection in connections:
            connection.close()
        multiprocessing.process.parent_process().join()
    finally:
        for process in processes:
            process.terminate()  # a signal that coverage can catch
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _replica(
    replica: int,
    on_sigterm: Any,
    connections: Sequence[Connection],
    folder: str,
    address: str | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    signal.signal(signal.SIGTERM, on_sigterm)  # coverage's, where that measures
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    end_with_parent()
    faulthandler.enable(os.open(Path(folder, f"fault-{replica}"), os.O_CREAT | os.O_WRONLY))
    connection = connections[replica]
    for other in connections:
        if other is not connection:
            other.close()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    shorten_samples()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if address is None:
            init_group(folder, replica, len(connections))
        else:
            names = ("DILOCO_ADDRESS", "DILOCO_REPLICA", "DILOCO_NUM_REPLICAS")
            os.environ |= dict(zip(names, (address, str(replica), str(len(connections))), strict=True))
        connection.send((function(*args), None))
    except BaseException:
        connection.send((None, traceback.format_exc()))
    # A replica that leaves breaks connections which others may still use: stay until the parent ends all.
    connection.poll(None)
