"""The processes of one replica, in a group of torch.distributed such as a sharded model's mesh has."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import ExchangeError
from diloco.exchange.private_torch import timeout_seconds_of
from diloco.exchange.process_group import group_like


class TorchGroup:
    """The processes of a replica in a group of torch.distributed.

    Args:
        group: the processes; nothing else may travel in it while a method runs.
        device: where they compute; tensors that are sent lie there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        """The group of torch.distributed."""
        self.index, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._host_group = group if device.type == "cpu" else None

    def broadcast(self, values: Tensor) -> Tensor:
        """The first process's values; those of the others have the same shape and dtype."""
        values = values.clone()
        dist.broadcast(values, dist.get_global_rank(self.group, 0), group=self.group)
        return values

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """The sum of all processes' values, or the largest, element by element; a GPU is not waited for."""
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait until every process has called it."""
        self._num_failed(0)

    @contextmanager
    def fail_together(self, another: str) -> Iterator[None]:
        """A context that fails in all processes if the work in it fails in one.

        Args:
            another: the words for another process in messages.

        Raises:
            ExchangeError: where the work went well, if it failed elsewhere or another process does not answer.
        """
        try:
            yield
        except Exception:
            with suppress(RuntimeError):  # the others may be gone: what went wrong here is what counts
                self._num_failed(1)
            raise
        try:
            elsewhere = self._num_failed(0)
        except RuntimeError as error:
            raise ExchangeError(f"{another} does not answer: {str(error).splitlines()[0]}") from error
        if elsewhere:
            raise ExchangeError(f"{another} failed, and says why")

    def _num_failed(self, here: int) -> int:
        """The number of processes that failed, by way of the host: it need not wait for what GPUs do."""
        if self._host_group is None:
            self._host_group = group_like(self.group, timeout_seconds_of(self.group))
        num_failed = torch.tensor([here], dtype=torch.int32, device="cpu")
        dist.all_reduce(num_failed, group=self._host_group)
        return int(num_failed.item())
