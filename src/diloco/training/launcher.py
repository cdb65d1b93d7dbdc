"""Local replicas as processes of torch's own elastic launcher, each with its share of the cores."""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diloco.errors import DilocoError, ExchangeError, ReplicaFailedError, exit_code_of


def under_a_launcher() -> bool:
    """True if torchrun, or this module, started this process."""
    return "RANK" in os.environ


def launch(entrypoint: Callable[..., None], num_replicas: int, num_ranks: int, *arguments: Any) -> None:
    """Run `entrypoint(*arguments)` in `num_replicas` · `num_ranks` local processes, and wait for all of them.

    Each uses its share of the cores, or OMP_NUM_THREADS threads. When one fails, the others are ended.

    Raises:
        ReplicaFailedError: with the message, fields and exit code of the error that the entrypoint raised, or with
            the signal that killed it.
    """
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we report each failure once
    start_method = "spawn"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may not resolve to the host itself
        start_method = "forkserver"
        multiprocessing.set_forkserver_preload(["diloco.training.ancestor"])
    os.environ["OMP_NUM_THREADS"] = _USERS_THREADS or str(max(1, num_cores() // (num_replicas * num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_replicas * num_ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, _run)(entrypoint, arguments)
    except ChildFailedError as error:
        raise _explain(error, num_ranks) from None
    except SignalException as error:
        raise ReplicaFailedError(f"stopped by {error.sigval.name}", exit_code=128 + error.sigval) from None


_USERS_THREADS = os.environ.get("OMP_NUM_THREADS")


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Have this process ended by SIGTERM when its parent ends, however that ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _run(entrypoint: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run the entrypoint in the replica; write its error where the launcher looks for it."""
    try:
        entrypoint(*arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        exit_code = exit_code_of(error)
        if exit_code is None or os.environ.get("DILOCO_TRACEBACK"):
            traceback.print_exc()
            raise SystemExit(1) from None
        if isinstance(error, ExchangeError):
            # The launcher reports the replica that ends first, which should be the one that caused this.
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        fields = error.fields if isinstance(error, DilocoError) else ()
        report = {"message": str(error), "timestamp": str(int(time.time())), "fields": fields}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))
        raise SystemExit(exit_code) from None


_SECONDS_FOR_THE_CAUSE = 3.0


def _explain(error: ChildFailedError, num_ranks: int) -> ReplicaFailedError:
    rank, failure = error.get_first_failure()
    if Path(failure.error_file).is_file():
        fields = tuple(failure.error_file_data.get("fields", ()))
        return ReplicaFailedError(failure.message, exit_code=failure.exitcode, fields=fields)
    process = f", process {rank % num_ranks}," if num_ranks > 1 else ""
    return ReplicaFailedError(f"replica {rank // num_ranks}{process} {_ending(failure)}", exit_code=1)


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {failure.signal_name()}"
