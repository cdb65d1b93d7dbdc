"""This machine: each machine of the fleet is a process group of its own, for a try before anybody pays."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.errors import UserError
from diloco.fleets.engine import Launch, State, Submission, ended, refuse_image
from diloco.fleets.fleet_file import Fleet, index_of, kind_of
from diloco.fleets.script import Place, script

_SECONDS_TO_STOP = 30.0
"""As Slurm and Kubernetes give by default: a replica answers within 25 s."""


class Local:
    """Processes of this machine; a job is a process's number and the time of its start."""

    def check(self, fleet: Fleet) -> None:
        """Refuse containers."""
        refuse_image(fleet, "on this machine nothing starts a container: leave it out, or start it in command")

    def submission(self, launch: Launch, names: Sequence[str]) -> Submission:
        """A script per kind, and a call of it per machine."""
        fleet, files = launch.fleet, dict[str, str]()
        for number, kind in enumerate(fleet.machines):
            place = Place(index="$1", first="127.0.0.1", site="127.0.0.1", site_port=29400 + number)
            files[f"{kind.name}.sh"] = script(fleet, kind, place, exits=launch.directory)
        return Submission(files=files, commands=tuple(self._command(launch, name) for name in names))

    def _command(self, launch: Launch, name: str) -> tuple[str, ...]:
        return ("bash", launch.file(f"{kind_of(name)}.sh"), str(index_of(name)))

    def submit(self, launch: Launch, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Start the processes; each writes to NAME.log."""
        bash = shutil.which("bash")
        if bash is None:
            raise UserError("bash is not installed here")
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for name in names:
            output = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, launch.file(f"{name}.log"), append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            pid = os.posix_spawn(
                bash, self._command(launch, name), os.environ, file_actions=output, setsid=True, setsigmask=()
            )
            yield name, f"{pid} {_start_of(pid)}"

    def job(self, launch: Launch, name: str) -> None:
        """None: the processes have numbers."""

    def states(self, launch: Launch) -> Mapping[str, State]:
        """Running, or how the process has ended."""
        return {name: "running" if _is_alive(job) else ended(launch, name) for name, job in launch.jobs.items()}

    def stop(self, launch: Launch, names: Collection[str]) -> None:
        """Send SIGTERM, and after a while SIGKILL."""
        jobs = [job for name in names if _is_alive(job := launch.jobs[name])]
        _send(jobs, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS_TO_STOP
        while (jobs := [job for job in jobs if _is_alive(job)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        _send(jobs, signal.SIGKILL)


def _send(jobs: Collection[str], number: signal.Signals) -> None:
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(int(job.split()[0]), number)


def _is_alive(job: str) -> bool:
    """True if the process is there, and not another one that has its number since."""
    pid, _, start = job.partition(" ")
    return bool(start) and _start_of(int(pid)) == start


def _start_of(pid: int) -> str:
    """The time at which a process was started; empty if it has ended."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # one of this very process, which would stay as a zombie
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            # The state comes after the name in parentheses; the start is field 22 of all.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return "" if fields[0] == "Z" else fields[19]
        return ""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return " ".join(
        subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
    )
