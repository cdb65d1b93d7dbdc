"""The machines that run the jobs of a grid: this one, or a Ray cluster."""

import socket
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

from diloco.errors import UserError
from diloco.experiments.runner.job import Job, end_running_jobs, run_job
from diloco.files import num_cores as available_cores
from diloco.files import require


class Machines(Protocol):
    """One machine or a cluster that runs jobs."""

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as there is room for it; the future holds its result."""
        ...

    def close(self) -> None:
        """End the running jobs; they can be resumed."""
        ...


class LocalMachine:
    """Runs jobs on this machine, in their order, as many at once as it has a core for each of their processes.

    A job of more processes than there are cores runs alone.

    Args:
        num_cores: cores to use; None is all that this process may use.

    Raises:
        UserError: if that is no number of cores.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        if num_cores is not None and num_cores < 1:
            raise UserError(f"cores={num_cores} must be at least 1; left out, all are used", "cores")
        self._num_cores = num_cores or available_cores()
        self._num_free, self._changed, self._is_closed = self._num_cores, threading.Condition(), False
        self._waiting = deque[Job]()
        self._threads = ThreadPoolExecutor(self._num_cores)

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job as soon as enough cores are free, after those that were submitted before."""
        with self._changed:
            self._waiting.append(job)
        return self._threads.submit(self._run, job)

    def close(self) -> None:
        """End the running jobs, and start no other."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            end_running_jobs()

    def _run(self, job: Job) -> dict[str, Any]:
        num_cores = min(job.config.num_processes, self._num_cores)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._waiting[0] is job and self._num_free >= num_cores)
            )
            if self._is_closed:
                raise CancelledError
            self._waiting.popleft()
            self._num_free -= num_cores
            self._changed.notify_all()
        try:
            return run_job(job)
        finally:
            with self._changed:
                self._num_free += num_cores
                self._changed.notify_all()


class RayCluster:
    """A cluster on which every machine has `diloco`, and the corpus under the same names.

    The machines need no common disk: results are sent back, and the files of a run stay on its machine.

    Args:
        address: the cluster's, HOST:PORT; `auto` for the one that this machine belongs to.

    Raises:
        UserError: if there is no cluster, or ray is not installed.
    """

    def __init__(self, address: str) -> None:
        self._ray = require("ray", extra="ray")
        try:
            if address != "auto":  # ray itself would try for minutes
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=10).close()
            self._ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError) as error:
            raise UserError(f"no Ray cluster at {address}: start one with `ray start --head` ({error})") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._cpus, self._gpus = (int(max((n.get(k, 0) for n in nodes), default=0)) for k in ("CPU", "GPU"))
        if not self._cpus:
            raise UserError(f"the Ray cluster at {address} has no machine with a CPU: add one with `ray start`")

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job on one machine, with a core and a GPU for each process if any machine has so many."""
        num_processes = job.config.num_processes
        room = {"num_cpus": min(num_processes, self._cpus), "num_gpus": min(num_processes, self._gpus)}
        return self._ray.remote(run_job).options(max_retries=0, **room).remote(job).future()

    def close(self) -> None:
        """End the running jobs."""
        self._ray.shutdown()
