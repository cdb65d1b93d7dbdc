"""The processes of a replica: started, killed, stopped and started again."""

import json
import os
import signal
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from diloco.training.config.config import TrainConfig
from storm_study.replica import replica

# A killed replica is back in milliseconds, instead of after the import of torch.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["diloco.training.loop", "torch._dynamo"])
# Now: once this process has used a store, its forks can't.
forkserver.ensure_running()


class Replica:
    """A name, and the processes that have it one after another."""

    def __init__(
        self, config: TrainConfig, folder: Path, environment: dict[str, str], rest_seconds: float, slowness: float
    ) -> None:
        self._out = folder / f"{config.name}.jsonl"
        self._arguments = config, self._out, environment, rest_seconds, slowness
        self._process: BaseProcess
        self.stopped_until = 0.0
        self.start()

    def start(self) -> None:
        """Start a process; it goes on from the last checkpoint."""
        self._process = _CONTEXT.Process(target=replica, args=self._arguments, daemon=True)
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._process.is_alive():
            assert self._process.pid is not None, "it was started"
            with suppress(ProcessLookupError):  # it has ended, and the server of forks has not told yet
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send(signal.SIGKILL)
        self._process.join()

    def wait(self, seconds: float) -> bool:
        """Wait; True once the process has ended."""
        self._process.join(max(0.0, seconds))
        return not self._process.is_alive()

    @property
    def failed(self) -> bool:
        """True if the process has ended with an error."""
        return self._process.exitcode not in (None, 0)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all processes, but for those before their first step."""
        text = self._out.read_text() if self._out.exists() else ""
        lines = (json.loads(line) for line in text.split("\n")[:-1] if line.endswith("}"))
        return [line for line in lines if "steps" in line]

    def log(self) -> str:
        """The end of what the processes have said."""
        path = self._out.with_suffix(".log")
        return path.read_text()[-3000:] if path.exists() else ""
