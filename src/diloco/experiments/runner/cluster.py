"""Runs of a grid on a Ray cluster: a run takes one machine, the cluster as many runs as it has room for."""

import socket
from concurrent.futures import Future
from typing import Any

from diloco.errors import UserError
from diloco.experiments.runner.job import Job, run_job
from diloco.files import require


class RayCluster:
    """Where `diloco` is installed on every machine, and the corpus is found under the same names.

    The machines need no common disk: a result comes back by itself, and the run's own files stay where it ran.

    Args:
        address: of the cluster; `auto` is the one that this machine belongs to.

    Raises:
        UserError: if there is no cluster.
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
            raise UserError(f"the Ray cluster at {address} has no CPU to run on")

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job on a machine with a core, and a GPU, for each of its processes, or on the largest."""
        wanted = job.config.num_processes
        room = {"num_cpus": min(wanted, self._cpus), "num_gpus": min(wanted, self._gpus)}
        return self._ray.remote(run_job).options(max_retries=0, **room).remote(job).future()

    def close(self) -> None:
        """End what is running."""
        self._ray.shutdown()
