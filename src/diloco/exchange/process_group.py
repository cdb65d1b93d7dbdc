"""The exchange over a torch.distributed process group, on gloo or nccl."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import UserError
from diloco.exchange import gloo, nccl
from diloco.exchange.control import agree
from diloco.exchange.messages import Messages
from diloco.exchange.transport import Tag


class ProcessGroupExchange:
    """Each process of `group` is one replica and sends to every other directly.

    Args:
        group: the replicas in the order of their ranks, and used for nothing else; None is the default group.
        timeout_seconds: how long `Pending.wait` waits at the most, for a replica that is slower or gone.
        num_connections: TCP connections between two replicas, the same on all. A large payload goes out in as
            many chunks, for links that one connection does not fill: long ones that lose packets.

    Raises:
        UserError: if torch.distributed is not initialised, or several connections are asked of nccl.
        DisagreementError: if another replica asks for another number of connections.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_seconds: float = 600.0,
        num_connections: int = 1,
    ) -> None:
        if not dist.is_initialized():
            raise UserError(
                "ProcessGroupExchange needs torch.distributed.init_process_group first; "
                "for one replica alone take LoopbackExchange"
            )
        if not 0 < timeout_seconds < math.inf:
            raise UserError(
                f"timeout_seconds must be above 0 and finite, not {timeout_seconds}", "timeout_seconds"
            )
        group = group if group is not None else dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        self.replica: int = dist.get_rank(group)
        """This process's rank in the group."""
        self.num_replicas: int = dist.get_world_size(group)
        """The size of the group."""
        is_gloo = "gloo" in dist.get_backend_config(group)
        self.ordered = not is_gloo
        """True on nccl, which has no tags."""
        self.device = torch.device("cpu" if is_gloo else "cuda")
        """The CPU on gloo, the current GPU on nccl."""
        self._timeout_seconds = timeout_seconds
        if num_connections < 1 or (num_connections > 1 and not is_gloo):
            raise UserError(
                f"num_connections={num_connections} must be at least 1, and 1 with nccl, which has channels of "
                "its own: give ProcessGroupExchange a group that has gloo",
                "num_connections",
            )
        self._groups = [group]
        if num_connections > 1:
            agree(self, {"num_connections": num_connections})
            self._groups += [gloo.group_like(group, timeout_seconds) for _ in range(1, num_connections)]

    def close(self) -> None:
        """Free the connections that were made for this exchange; the group that it was given stays as it is.

        Only several `num_connections` make any. Nothing may be in flight, but what has failed.
        """
        for group in self._groups[1:]:
            dist.destroy_process_group(group)
        del self._groups[1:]

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Messages:
        """Post every message and return."""
        messages = Messages(payloads, self.device, tag, self._timeout_seconds)
        if self.ordered:
            nccl.post(messages, self._groups[0])
        else:
            gloo.post(messages, self._groups)
        return messages
