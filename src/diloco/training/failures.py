"""Errors of torch without a class or a cause of their own, turned into ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from diloco.errors import ExchangeError, TrainingError
from diloco.training.config import TrainConfig
from diloco.training.state import TrainState
from diloco.training.world import World


@contextmanager
def lack_of_memory_explained(config: TrainConfig, world: World) -> Iterator[None]:
    """Name the settings that take memory, where torch names a number of bytes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class for this on a GPU; on a CPU it has none, but names its allocator.
        lacks_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (lacks_memory or "DefaultCPUAllocator" in str(error)):
            raise
        raise TrainingError(
            f"replica {world.replica} has not enough memory on its {world.device.type}: take a smaller "
            f"micro_batch (now {config.micro_batch}) or evaluation.batch (now {config.evaluation.batch}), or more "
            f"shards_per_replica (now {config.num_shards}), and start again, or resume {config.directory} "
            f"({(str(error) or 'MemoryError').splitlines()[0]})",
            *("micro_batch", "evaluation.batch", "shards_per_replica"),
        ) from error


@contextmanager
def lost_processes_named(state: TrainState) -> Iterator[None]:
    """Say that another process is gone where a collective of Data-Parallel, or inside a replica, fails."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own, but name its source.
        is_lost = "gloo" in str(error) or isinstance(error, dist.DistError)
        if isinstance(error, ExchangeError) or not is_lost:
            raise
        reason = str(error).splitlines()[0]
        raise ExchangeError(f"step {state.step + 1}: another process of the run is gone: {reason}") from error
