"""Local replicas as processes of torch's own elastic launcher, each with its share of the cores."""

import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class ReplicaFailedError(RuntimeError):
    """A replica ended before the run did."""

    def __init__(self, message: str, *, explained: bool) -> None:
        super().__init__(message)
        self.explained = explained
        """Whether the replica itself has said why."""


def under_a_launcher() -> bool:
    """Whether torchrun, or this module, started this process."""
    return "RANK" in os.environ


def launch(entrypoint: Callable[..., None], num_replicas: int, *arguments: Any) -> None:
    """Run `entrypoint(*arguments)` in `num_replicas` local processes, and wait for all of them.

    When one fails the others are ended.

    Raises:
        ReplicaFailedError: naming the replica that failed first.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // num_replicas))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_replicas,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        rdzv_configs={"timeout": timedelta(seconds=60).total_seconds()},
    )
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        replica, failure = error.get_first_failure()
        raise ReplicaFailedError(_describe(replica, failure.exitcode), explained=failure.exitcode > 0) from None
    except SignalException as error:
        raise ReplicaFailedError(f"stopped by {error.sigval.name}", explained=False) from None


def _describe(replica: int, exit_code: int) -> str:
    if exit_code >= 0:
        return f"replica {replica} ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"replica {replica} was killed by signal {name}"
