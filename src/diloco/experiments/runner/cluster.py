"""A Ray cluster that runs the jobs of a grid: one machine a job, as many jobs at once as there is room for."""

import socket
from concurrent.futures import Future
from typing import Any

from diloco.errors import UserError
from diloco.experiments.runner.job import Job, run_job
from diloco.files import require


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
