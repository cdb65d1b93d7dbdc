"""Data-Parallel, the baseline: the replicas average their gradients at every step, and so stay equal."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from diloco.engine.parameters import gathered, local
from diloco.outer.step import OuterStep, parameters_hash


def ring_all_reduce_bytes(num_params: int, num_replicas: int) -> int:
    """Bytes that a replica sends a step: 2 (M−1)/M · parameters · 4 (FP32, as DDP sends), rounded."""
    return round(2 * (num_replicas - 1) / num_replicas * num_params * 4)


def data_parallel(forward: nn.Module, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """The model, wrapped so that the processes of a group average their gradients."""
    return DistributedDataParallel(forward, process_group=group, gradient_as_bucket_view=True)


def settle_buckets(forward: DistributedDataParallel, batch: tuple[int, int], *, autocast: bool) -> None:
    """Run the first pass now, after which DDP sorts gradients into buckets anew.

    With three processes or more the order of a sum depends on the bucket: a resumed run would differ.

    Args:
        forward: the wrapped model.
        batch: shape (B, T) of the tokens that training calls it with: windows of T + 1 without their last.
        autocast: whether training calls it in bfloat16.
    """
    num_sequences, length = batch
    device = next(forward.parameters()).device
    # The strides are training's too: a compiled model would otherwise be compiled again, for any shape.
    windows_BxT1 = torch.zeros(num_sequences, length + 1, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        logits_BxTxV = forward(windows_BxT1[:, :-1])
    logits_BxTxV.float().sum().backward()
    forward.zero_grad()


class DataParallel:
    """The synchronizer of replicas whose parameters are equal at every step; its subclasses average the gradients.

    By itself, it is that of a replica alone, which has nothing to average.

    Args:
        model: the replica's copy, or this process's shards of it.
        forward: the model as training calls it.
        num_replicas: M.
    """

    def __init__(self, model: nn.Module, forward: nn.Module, num_replicas: int) -> None:
        self._model, self.forward, self._num_replicas = model, forward, num_replicas
        self._step_bytes = ring_all_reduce_bytes(
            sum(p.numel() for p in model.parameters() if p.requires_grad), num_replicas
        )
        self.num_steps = self.bytes_sent = self.bytes_received = 0
        self.blocked_seconds = 0.0

    def passes(self, is_last: bool) -> AbstractContextManager[None]:
        """The context of a forward and backward pass; gradients are averaged in the last one of a step."""
        return nullcontext()

    def _now(self) -> float:
        if next(self._model.parameters()).is_cuda:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def step(self, *, tokens: int | None = None, loss: float | Tensor | None = None) -> tuple[OuterStep, ...]:
        """Count a step; there is no outer step."""
        self.num_steps += 1
        self.bytes_sent += self._step_bytes
        self.bytes_received += self._step_bytes
        return ()

    def finish(self, *, close: bool = False) -> tuple[OuterStep, ...]:
        """Do nothing: nothing is in flight, and all replicas end together."""
        del close
        return ()

    def logs(self, *, computed: bool = True) -> dict[str, float]:
        """Steps, bytes, and seconds in which training waited."""
        return {name: float(getattr(self, name)) for name in _COUNTERS}

    def outer_parameters(self) -> dict[str, Tensor]:
        """The parameters, which all replicas share."""
        return {name: p.detach() for name, p in self._model.named_parameters() if p.requires_grad}

    def outer_parameters_applied(self) -> nullcontext[None]:
        """Do nothing: the model has them already."""
        return nullcontext()

    def outer_hash(self) -> str:
        """SHA-256 over the parameters, computed as the engine's."""
        return parameters_hash({name: gathered(value) for name, value in self.outer_parameters().items()})

    def state_dict(self) -> dict[str, Any]:
        """The counters; the parameters are saved with the model."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counters up again."""
        for name in _COUNTERS:
            setattr(self, name, state[name])


_COUNTERS = ("num_steps", "bytes_sent", "bytes_received", "blocked_seconds")


class ReplicatedDataParallel(DataParallel):
    """Replicas of one process each, whose gradients DistributedDataParallel averages.

    Args:
        model: the replica's copy.
        forward: the same model, compiled or not.
        batch: shape (B, T) of the tokens that training calls it with: windows of T + 1 without their last.
        autocast: whether training calls it in bfloat16.
    """

    def __init__(self, model: nn.Module, forward: nn.Module, batch: tuple[int, int], *, autocast: bool) -> None:
        group = dist.group.WORLD
        assert group is not None, "this process has joined the others"
        self._wrapped = data_parallel(forward, group)
        super().__init__(model, self._wrapped, dist.get_world_size())
        self._wrapped.register_comm_hook(group, self._reduce)
        self._last_bucket_at = 0.0
        settle_buckets(self._wrapped, batch, autocast=autocast)

    def _reduce(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            # The backward pass has nothing left to compute after it.
            self._last_bucket_at = self._now()
        return allreduce_hook(group, bucket)

    @contextmanager
    def passes(self, is_last: bool) -> Iterator[None]:
        """The context of a pass, as in the base class."""
        with nullcontext() if is_last else self._wrapped.no_sync():
            yield
        if is_last:
            self.blocked_seconds += self._now() - self._last_bucket_at


class ShardedDataParallel(DataParallel):
    """Replicas of several processes each: FSDP2 averages the gradients inside a replica, this class between them.

    A shard of a gradient is all-reduced with the same shard of the other replicas while the backward pass
    goes on; there are at least two replicas.

    Args:
        model: sharded over the replica's processes.
        forward: the same model, compiled or not.
        others: the processes that hold the same shard, one per replica.
    """

    def __init__(self, model: nn.Module, forward: nn.Module, others: dist.ProcessGroup) -> None:
        super().__init__(model, forward, dist.get_world_size(others))
        self._others, self._is_last = others, False
        self._in_flight: list[tuple[Tensor, dist.Work]] = []
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self._start)

    def _start(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook is called after a gradient was added"
        gradient_N = local(parameter.grad)
        if self._is_last and gradient_N.numel():
            work = dist.all_reduce(gradient_N, group=self._others, async_op=True)
            assert work is not None, "it is asynchronous"
            self._in_flight.append((gradient_N, work))

    @contextmanager
    def passes(self, is_last: bool) -> Iterator[None]:
        """The context of a pass, as in the base class."""
        self._is_last = is_last
        yield
        if self._in_flight:
            begin = self._now()
            for gradient_N, work in self._in_flight:
                work.wait()
                gradient_N.div_(self._num_replicas)
            self.blocked_seconds += self._now() - begin
            self._in_flight.clear()
