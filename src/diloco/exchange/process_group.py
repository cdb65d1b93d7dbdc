"""The exchange over a torch.distributed process group, on gloo or nccl."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import UserError
from diloco.exchange import gloo, nccl
from diloco.exchange.control import agree
from diloco.exchange.gloo import Group
from diloco.exchange.messages import Answers, Messages
from diloco.exchange.notices import Notices, WithNotices
from diloco.exchange.transport import Tag, Transport


class GroupExchange(WithNotices, Transport):
    """Each process of a group is one replica and sends to every other directly.

    Args:
        groups: of the same replicas; the first takes every message, the others chunks of large ones.
        notices: of these replicas.
        timeout_seconds: how long `Pending.wait` waits at the most.
        is_gloo: False for nccl.
    """

    def __init__(
        self, groups: Sequence[Group], notices: Notices, *, timeout_seconds: float, is_gloo: bool = True
    ) -> None:
        self._groups = list(groups)
        self._replica, self._num_replicas = groups[0].rank(), groups[0].size()
        self._notices = notices
        self._timeout_seconds = timeout_seconds
        self._ordered = not is_gloo
        self.answers = Answers()
        """The other replicas' answers."""

    @property
    def replica(self) -> int:
        """This process's rank in the group."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """The size of the group."""
        return self._num_replicas

    @property
    def ordered(self) -> bool:
        """True on nccl, which has no tags."""
        return self._ordered

    @property
    def device(self) -> torch.device:
        """The CPU on gloo, the current GPU on nccl."""
        return torch.device("cuda" if self._ordered else "cpu")

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Messages:
        """Post every message and return."""
        messages = Messages(payloads, self.device, tag, self._timeout_seconds, self._notices, self.answers)
        self._notices.expect()
        if self._ordered:
            assert isinstance(self._groups[0], dist.ProcessGroup), "nccl comes with a group of torch.distributed"
            nccl.post(messages, self._groups[0])
        else:
            gloo.post(messages, self._groups)
        return messages

    def close(self) -> None:
        """Free the connections, and the port where this process listens; nothing is sent or received after it.

        Nothing may be in flight, but what has failed. To go on after a failure, close, and connect anew.
        """
        self._notices.close()
        self._groups.clear()


class ProcessGroupExchange(GroupExchange):
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
                "ProcessGroupExchange needs torch.distributed.init_process_group first; replicas that are jobs of "
                "their own meet with diloco.connect, and for one replica alone take LoopbackExchange"
            )
        check_timeout(timeout_seconds)
        check_num_connections(num_connections)
        group = group if group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise UserError(
                f"group={group!r} is no process group that has this process: give each process the group of the "
                "replicas that it is one of",
                "group",
            )
        is_gloo = "gloo" in dist.get_backend_config(group)
        if num_connections > 1 and not is_gloo:
            raise UserError(
                f"num_connections={num_connections} must be 1 with nccl, which has channels of its own: give "
                "ProcessGroupExchange a group that has gloo",
                "num_connections",
            )
        _NUM_EXCHANGES[group] = _NUM_EXCHANGES.get(group, 0) + 1
        store = dist.PrefixStore(f"diloco exchange {_NUM_EXCHANGES[group]}", group.get_group_store())
        notices = Notices(store, group.rank(), group.size(), group.size())
        super().__init__([group], notices, timeout_seconds=timeout_seconds, is_gloo=is_gloo)
        if num_connections > 1:
            agree(self, {"num_connections": num_connections})
            self._groups += [gloo.group_like(group, timeout_seconds) for _ in range(1, num_connections)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The replicas' processes that it joins, by their ranks in torch.distributed's default group."""
        group = self._groups[0]
        assert isinstance(group, dist.ProcessGroup), "it was given one"
        return tuple(dist.get_process_group_ranks(group))

    def close(self) -> None:
        """Free the connections that were made for this exchange; the group that it was given stays as it is.

        Nothing may be in flight, but what has failed.
        """
        for group in self._groups[1:]:
            assert isinstance(group, dist.ProcessGroup), "gloo.group_like made it"
            dist.destroy_process_group(group)
        super().close()


# How many exchanges each group has had: every replica makes them in the same order.
_NUM_EXCHANGES: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def check_timeout(timeout_seconds: float) -> None:
    """Refuse a timeout that is no number of seconds, or longer than any run waits."""
    if not (isinstance(timeout_seconds, int | float) and 0 < timeout_seconds <= _MOST_SECONDS):
        raise UserError(
            f"timeout_seconds={timeout_seconds!r} must be a number of seconds above 0 and at most {_MOST_SECONDS}",
            "timeout_seconds",
        )


def check_num_connections(num_connections: int) -> None:
    """Refuse a number of connections that is none."""
    if not (isinstance(num_connections, int) and num_connections >= 1):
        raise UserError(
            f"num_connections={num_connections!r} must be a whole number of at least 1", "num_connections"
        )


_MOST_SECONDS = 365 * 24 * 3600
