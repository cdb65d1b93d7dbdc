"""One run: replicas train, one is killed with SIGKILL, later a new one joins, and all are killed in the end."""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.servers import Server

from diloco.training.processes import end_with_parent
from peer_study.common import ReplicaSettings
from peer_study.figures import Figures, Times, figures, read
from peer_study.systems import System, meeting_place, python_of

_BENCHMARKS = Path(__file__).parents[1]
SECONDS_TO_START = 120.0
# A replica finds torch imported; the time to join begins after the imports anyway.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "diloco.rendezvous.store_rendezvous"])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings that are the same for all systems."""

    num_replicas: int
    sync_every: int
    num_fragments: int
    overlap_steps: int
    step_seconds: float
    width: int
    warm_seconds: float
    """Time of training that is left out."""
    quiet_seconds: float
    """Time of training before the death."""
    dead_seconds: float
    """Time from the death to the start of the new replica."""
    joined_seconds: float
    """Time from the new replica's first inner step to the end."""


class Run:
    """A run of one system.

    Args:
        system: whose.
        plan: of all runs.
        server: the store; None where none of the system's replicas needs one.
        folder: for diaries and logs.
        gradientmail_python: the interpreter of GradientMail.
    """

    def __init__(
        self, system: System, plan: Plan, server: Server | None, folder: Path, gradientmail_python: str | None
    ) -> None:
        self._system, self._plan, self._folder = system, plan, folder
        self._server, self._python = server, gradientmail_python
        self._processes: dict[str, BaseProcess] = {}
        self._url = ""

    def measure(self) -> Figures:
        """The figures of a run."""
        plan, names = self._plan, [str(number) for number in range(self._plan.num_replicas)]
        with ExitStack() as stack:
            self._url = stack.enter_context(meeting_place(self._system, self._server))
            stack.callback(self._end)
            self._start(names[0])
            time.sleep(2.0)  # replica 0 is first in everything
            for name in names[1:]:
                self._start(name)
            begin = max(self._wait(name, "step") for name in names)
            self._sleep_until(begin + plan.quiet_seconds)
            victim = str(self._system.victim)
            death = self._kill(victim)
            self._sleep_until(death + plan.dead_seconds)
            self._start("joiner")
            join = self._wait("joiner", "start")
            self._sleep_until(self._wait("joiner", "step") + plan.joined_seconds)
            times = Times(begin=begin + plan.warm_seconds, death=death, join=join, end=time.monotonic())
        survivors = [read(self._diary(name)) for name in names if name != victim]
        dead, joiner = read(self._diary(victim)), read(self._diary("joiner"))
        return figures(survivors, dead, joiner, times, num_fragments=plan.num_fragments)

    def _start(self, name: str) -> None:
        plan, system = self._plan, self._system
        common: dict[str, Any] = {
            key: value for key, value in asdict(plan).items() if not key.endswith("_seconds")
        }
        settings = ReplicaSettings(
            name=name,
            diary=str(self._diary(name)),
            url=self._url,
            step_seconds=plan.step_seconds,
            options=dict(system.options),
            **common,
        )
        environment = _environment({} if self._server is None else self._server.environment)
        where = python_of(system, self._python), f"peer_study.{system.module}"
        arguments = (*where, json.dumps(asdict(settings)), environment, self._folder / f"{name}.log")
        process = _CONTEXT.Process(target=_live, args=arguments, daemon=True)
        process.start()
        self._processes[name] = process

    def _kill(self, name: str) -> float:
        """Let a replica die when it next sends; the time of its death."""
        self._diary(name).with_name(f"{name}.jsonl.die").touch()
        process = self._processes.pop(name)
        process.join(SECONDS_TO_START)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{name} sent nothing in {SECONDS_TO_START:g} s: see {self._folder}/{name}.log")
        return read(self._diary(name))[-1]["at"]

    def _wait(self, name: str, event: str) -> float:
        """The time of the first event of a kind in a replica's diary."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            self._check()
            for line in read(self._diary(name)) if self._diary(name).exists() else ():
                if line["event"] == event:
                    return line["at"]
            time.sleep(0.05)
        raise TimeoutError(f"{name} wrote no {event} in {SECONDS_TO_START:g} s: see {self._folder}/{name}.log")

    def _sleep_until(self, end: float) -> None:
        while time.monotonic() < end:
            self._check()
            time.sleep(0.1)

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.exitcode is not None:
                raise ChildProcessError(f"{name} ended by itself: see {self._folder}/{name}.log")

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def _diary(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"


def _live(python: str, module: str, settings: str, environment: Mapping[str, str], log: Path) -> None:
    """Be a replica, in this process or, if it needs another interpreter, in that."""
    end_with_parent()
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if python != sys.executable:
        os.chdir(_BENCHMARKS)
        os.execve(python, [python, "-m", module, settings], environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, settings]
    import_module(module).main()


def _environment(store: Mapping[str, str]) -> dict[str, Any]:
    """This process's environment, with the store's credentials and one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**own, **store, "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
