"""Jobs in processes of their own, forked from one that has imported torch, which takes seconds."""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.errors import DilocoError
from diloco.experiments.runner.job import Job, result_of
from diloco.files import make_directory
from diloco.training.config.config import TrainConfig, from_json, to_json
from diloco.training.processes import IMPORTS, end_with_parent, import_modules


def run_job(job: Job) -> dict[str, Any]:
    """Run a job, `result_of`, and return its result; each process of the run has one thread.

    What it prints goes into `log.txt` in the run's directory.
    """
    make_directory(job.directory)
    message = {
        "config": to_json(job.config),
        "tasks": [str(task) for task in job.tasks],
        "parameters": job.parameters,
        "at_step": job.at_step,
    }
    pid, answer, num_endings = None, b"", len(_ENDINGS)
    ours, theirs = socket.socketpair()
    with suppress(ConnectionError), ours, ours.makefile("rb") as lines:
        with theirs:
            _hand_over(theirs)
        ours.sendall(json.dumps(message).encode() + b"\n")
        pid = int(lines.readline() or 0)
        _RUNNING[pid] = job.directory
        try:
            if len(_ENDINGS) > num_endings:  # while it started
                _end(pid)
            answer = lines.readline()
        finally:
            del _RUNNING[pid]
    if answer:
        return json.loads(answer)
    reason = f"the run's process was killed, or met a bug: see {job.directory.name}/log.txt"
    return {"failed": reason if pid else "the run's process could not be started", "is_final": False}


_RUNNING: dict[int, Path] = {}
_ENDINGS: list[None] = []
"""An entry for each call of `end_running_jobs`."""


def running_jobs() -> tuple[Path, ...]:
    """The directories of the runs that this process has started and that are not over."""
    return tuple(_RUNNING.values())


def end_running_jobs() -> None:
    """End the jobs that this process has started, those that have not begun yet, too; they can be resumed."""
    _ENDINGS.append(None)
    for pid in tuple(_RUNNING):
        _end(pid)


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


class _Server:
    """The process from which jobs are forked, as this process sees it; it ends with this process."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=theirs.fileno(), env=environment | {"OMP_NUM_THREADS": "1"}
            )

    def close(self) -> None:
        """End it, and the jobs that still run."""
        self.control.close()
        self.process.wait()


_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SERVERS: list[_Server] = []
"""The one that there is, if any."""
_LOCK = threading.Lock()


def _hand_over(connection: socket.socket) -> None:
    """Give the server an end of a job's socket: it reads the job there, and number and answer come back."""
    with _LOCK:
        while _SERVERS and _SERVERS[0].process.poll() is not None:
            _SERVERS.pop().close()
        if not _SERVERS:
            _SERVERS.append(_Server())
            atexit.register(_SERVERS[0].close)
        socket.send_fds(_SERVERS[0].control, [b"+"], [connection.fileno()])


def _serve(control: socket.socket) -> None:
    """Start a process for each job until the grid has ended, and with it the last copy of the other socket."""
    # The terminal sends it to all, and the grid decides.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    while sockets := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=sockets[0]) as connection, connection.makefile("rb") as lines:
            job = _job_of(json.loads(lines.readline()))
            _import_for(job.config)
            context.Process(target=_run, args=(job, connection, os.getpid())).start()
    os._exit(0)  # without waiting for the jobs, which end with this process


def _job_of(message: dict[str, Any]) -> Job:
    return Job(
        config=from_json(TrainConfig, message["config"]),
        tasks=tuple(map(Path, message["tasks"])),
        parameters=tuple(message["parameters"]),
        at_step=message["at_step"],
    )


def _import_for(config: TrainConfig) -> None:
    from diloco.training.state import slow_imports

    with suppress(DilocoError, ImportError):  # the job itself says so
        import_modules((*IMPORTS, *slow_imports(config)))


def _run(job: Job, connection: socket.socket, server: int) -> None:
    """Be the process of a job."""
    end_with_parent()
    if os.getppid() != server:  # it had ended before
        raise SystemExit(1)
    log = os.open(job.directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    connection.sendall(f"{os.getpid()}\n".encode())
    answer = json.dumps(result_of(job)).encode() + b"\n"
    with suppress(BrokenPipeError):  # the grid was ended meanwhile
        connection.sendall(answer)


if __name__ == "__main__":
    _serve(socket.socket(fileno=sys.stdin.fileno()))
