"""Direct messages between replicas over a torch.distributed process group (gloo or nccl)."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import ExchangeError, UserError
from diloco.exchange.control import agree
from diloco.exchange.transport import ABOUT_THE_RUN

# A message's tag is (fragment + 1, round, phase) in 31 bits; rounds this far apart are never in flight together.
_FRAGMENT_BITS, _ROUND_BITS = 11, 19


class ProcessGroupExchange:
    """Each process of `group` is one replica and sends to every other directly.

    On gloo every receive is posted before any send, since a receiver's notice that it is ready would otherwise
    queue behind the payload it announces; gloo then moves the bytes on threads of its own, and between two
    replicas one message after the other, in the order in which they were started. On nccl the messages of an
    exchange go out as one group call and the receiver matches them by order.

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
            raise UserError(f"timeout_seconds must be above 0 and finite, not {timeout_seconds}")
        self._group = group if group is not None else dist.group.WORLD
        assert self._group is not None, "torch.distributed is initialised"
        self.replica: int = dist.get_rank(self._group)
        self.num_replicas: int = dist.get_world_size(self._group)
        self._timeout_seconds = timeout_seconds
        self._is_gloo = "gloo" in dist.get_backend_config(self._group)
        self._device = torch.device("cpu" if self._is_gloo else "cuda")
        if num_connections < 1 or (num_connections > 1 and not self._is_gloo):
            raise UserError(
                f"num_connections={num_connections} must be at least 1, and 1 with nccl, which has channels of "
                "its own: give ProcessGroupExchange a group that has gloo"
            )
        self._groups = [self._group]
        if num_connections > 1:
            agree(self, {"num_connections": num_connections})
            self._groups += [_another(self._group, timeout_seconds) for _ in range(1, num_connections)]

    def close(self) -> None:
        """Free the connections that were made for this exchange; the group that it was given stays as it is.

        Only several `num_connections` make any. Nothing may be in flight, but what has failed.
        """
        for group in self._groups[1:]:
            dist.destroy_process_group(group)
        del self._groups[1:]

    def start(
        self,
        payloads: Mapping[int, Tensor],
        fragment: int,
        round: int,
        phase: int = 0,
    ) -> "_PendingMessages":
        """Post every receive, then every send, and return."""
        where = "comparing settings" if fragment == ABOUT_THE_RUN else f"fragment {fragment}, round {round}"
        pending = _PendingMessages(where, self._timeout_seconds)
        pending.outgoing = {replica: payload.to(self._device) for replica, payload in sorted(payloads.items())}
        pending.incoming = {replica: torch.empty_like(payload) for replica, payload in pending.outgoing.items()}
        if self._is_gloo:
            self._post_to_gloo(pending, _tag(fragment, round, phase))
        elif phase:
            raise UserError(
                "nccl matches messages by their order, which a second phase, starting by itself, does not keep: "
                "give ProcessGroupExchange a group that has gloo, or combine='gather'"
            )
        elif payloads:
            self._post_to_nccl(pending)
        return pending

    def _post_to_gloo(self, pending: "_PendingMessages", tag: int) -> None:
        for replica, buffer in pending.incoming.items():
            with pending.blaming(replica):
                for group, chunk in self._chunks(buffer):
                    pending.add(replica, dist.irecv(chunk, group=group, group_src=replica, tag=tag))
        for replica, payload in pending.outgoing.items():
            with pending.blaming(replica):
                for group, chunk in self._chunks(payload):
                    pending.add(replica, dist.isend(chunk, group=group, group_dst=replica, tag=tag))

    def _chunks(self, payload: Tensor) -> Iterator[tuple[dist.ProcessGroup, Tensor]]:
        """What travels on each connection; a payload that is not large, on the first alone."""
        num_chunks = min(len(self._groups), max(1, payload.numel() // _CHUNK_BYTES))
        return zip(self._groups, payload.tensor_split(num_chunks), strict=False)

    def _post_to_nccl(self, pending: "_PendingMessages") -> None:
        messages = [(dist.irecv, replica, buffer) for replica, buffer in pending.incoming.items()]
        messages += [(dist.isend, replica, payload) for replica, payload in pending.outgoing.items()]
        operations = [
            dist.P2POp(post, tensor, group=self._group, group_peer=replica) for post, replica, tensor in messages
        ]
        # nccl answers for all messages at once: whoever is late may be any of them.
        for work in dist.batch_isend_irecv(operations):
            for replica in pending.outgoing:
                pending.add(replica, work, poll=True)


# A chunk is worth a connection of its own from this size on.
_CHUNK_BYTES = 1 << 16


def _another(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """A group of the same replicas, with connections of its own."""
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout_seconds),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup), "this process is a member"
    return made


class _PendingMessages:
    """The messages of one exchange, and what has gone wrong with them so far."""

    def __init__(self, where: str, timeout_seconds: float) -> None:
        self._where, self._timeout_seconds = where, timeout_seconds
        self._waits: list[tuple[int, Callable[[float], None]]] = []
        self._missing: dict[int, str] = {}
        self.incoming: dict[int, Tensor] = {}
        self.outgoing: dict[int, Tensor] = {}  # kept alive: the transport reads from it until all is sent

    def add(self, replica: int, work: dist.Work | None, *, poll: bool = False) -> None:
        """A message from or to a replica, to be waited for."""
        assert work is not None, "this process is a member of the group"
        wait = partial(_wait_for_nccl if poll else _wait_for_gloo, work)
        self._waits.append((replica, wait))

    @contextmanager
    def blaming(self, replica: int) -> Iterator[None]:
        """Note an error as this replica's, and go on with the others."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self._missing.setdefault(replica, _reason(error))

    def wait(self) -> dict[int, Tensor]:
        """Until every payload has come in and gone out."""
        deadline = time.monotonic() + self._timeout_seconds
        while self._waits:
            replica, wait = self._waits.pop(0)
            with self.blaming(replica):
                # After one was waited for in vain the others have a moment left, to learn who else is missing.
                wait(max(deadline - time.monotonic(), 0.01))
        if self._missing:
            names = ", ".join(f"replica {replica} ({why})" for replica, why in sorted(self._missing.items()))
            raise ExchangeError(
                f"{self._where}: no payload from or to {names}",
                tuple(sorted(self._missing)),
            )
        return self.incoming


def _tag(fragment: int, round: int, phase: int) -> int:
    if fragment + 1 >= 1 << _FRAGMENT_BITS:
        raise UserError(f"fragment {fragment} is one too many: take at most {(1 << _FRAGMENT_BITS) - 1}")
    assert phase in (0, 1), "more phases than a tag can tell"
    return ((fragment + 1) << _ROUND_BITS | round % (1 << _ROUND_BITS)) << 1 | phase


def _wait_for_gloo(work: dist.Work, seconds: float) -> None:
    work.wait(timedelta(seconds=seconds))


def _wait_for_nccl(work: dist.Work, seconds: float) -> None:
    """Poll: nccl's own wait only orders streams, and its watchdog ends the process instead of raising."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        time.sleep(1e-4)
    work.wait()


def _reason(error: Exception) -> str:
    """The first sentence of a transport's message, without the place in its source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (first.split("] ", 1)[-1] if first.startswith("[") else first).split(". ")[0]
