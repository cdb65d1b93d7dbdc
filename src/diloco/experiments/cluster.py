"""Runs of a grid on a Ray cluster: a run takes one machine, the cluster as many runs as it has room for."""

from concurrent.futures import Future
from typing import Any

from diloco.data.optional import require
from diloco.experiments.job import Job, run_job


class RayCluster:
    """Where `diloco` is installed on every machine, and the corpus is found under the same names.

    The machines need no common disk: a result comes back by itself, and the run's own files stay where it ran.

    Args:
        address: of the cluster; `auto` is the one that this machine belongs to.

    Raises:
        ValueError: if there is no cluster.
    """

    def __init__(self, address: str) -> None:
        self._ray = require("ray", extra="ray")
        try:
            self._ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster at {address}: start one with `ray start --head` ({error})") from None
        nodes = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        self._largest = int(max(nodes, default=0))
        if not self._largest:
            raise ValueError(f"the Ray cluster at {address} has no CPU to run on")

    def submit(self, job: Job) -> "Future[dict[str, Any]]":
        """Run a job on a machine with a core for each of its processes, or on the largest."""
        num_cpus = min(job.config.num_processes, self._largest)
        remote = self._ray.remote(run_job).options(num_cpus=num_cpus, max_retries=0)
        return remote.remote(job).future()
