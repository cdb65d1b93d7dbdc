"""Direct messages between replicas over a torch.distributed process group (gloo or nccl)."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.exchange import ExchangeError

# A message's tag is (fragment + 1, round, phase) in 31 bits; rounds this far apart are never in flight together.
_FRAGMENT_BITS, _ROUND_BITS = 11, 19


class ProcessGroupExchange:
    """Each process of `group` is one replica and sends to every other directly.

    On gloo every receive is posted before any send, since a receiver's notice that it is ready would otherwise
    queue behind the payload it announces; gloo then moves the bytes on threads of its own. On nccl the messages
    of an exchange go out as one group call and the receiver matches them by order.

    Args:
        group: the replicas in the order of their ranks, and used for nothing else; None is the default group.
        timeout_seconds: how long `Pending.wait` waits at the most, for a replica that is slower or gone.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 600.0) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "ProcessGroupExchange needs torch.distributed.init_process_group first; "
                "for one replica alone take LoopbackExchange"
            )
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, not {timeout_seconds}")
        self._group = group if group is not None else dist.group.WORLD
        self.replica: int = dist.get_rank(self._group)
        self.num_replicas: int = dist.get_world_size(self._group)
        self._timeout_seconds = timeout_seconds
        self._is_gloo = "gloo" in dist.get_backend_config(self._group)
        self._device = torch.device("cpu" if self._is_gloo else "cuda")

    def start(
        self,
        payloads: Mapping[int, Tensor],
        fragment: int,
        round: int,
        phase: int = 0,
    ) -> "_PendingMessages":
        """Post every receive, then every send, and return."""
        outgoing = {replica: payload.to(self._device) for replica, payload in sorted(payloads.items())}
        incoming = {replica: torch.empty_like(payload) for replica, payload in outgoing.items()}
        tag = _tag(fragment, round, phase)
        messages = [(dist.irecv, replica, buffer) for replica, buffer in incoming.items()]
        messages += [(dist.isend, replica, payload) for replica, payload in outgoing.items()]
        where = f"fragment {fragment}, round {round}"
        try:
            if self._is_gloo:
                works = [(replica, self._post(post, tensor, replica, tag)) for post, replica, tensor in messages]
            else:
                operations = [
                    dist.P2POp(post, tensor, group=self._group, group_peer=replica)
                    for post, replica, tensor in messages
                ]
                # nccl answers for all messages at once, so whoever is late is any of them.
                batch = dist.batch_isend_irecv(operations) if operations else []
                works = [(replica, work) for work in batch for replica in outgoing]
        except RuntimeError as error:
            raise ExchangeError(f"{where}: could not be sent: {_reason(error)}", missing=()) from error
        wait = _wait_for_gloo if self._is_gloo else _wait_for_nccl
        return _PendingMessages(where, works, incoming, outgoing, self._timeout_seconds, wait)

    def _post(self, post: Callable[..., dist.Work | None], tensor: Tensor, replica: int, tag: int) -> dist.Work:
        peer = {"group_dst": replica} if post is dist.isend else {"group_src": replica}
        work = post(tensor, group=self._group, tag=tag, **peer)
        assert work is not None, "this process is a member of the group"
        return work


class _PendingMessages:
    def __init__(
        self,
        where: str,
        works: list[tuple[int, dist.Work]],
        incoming: dict[int, Tensor],
        outgoing: dict[int, Tensor],
        timeout_seconds: float,
        wait: Callable[[dist.Work, float], None],
    ) -> None:
        self._where, self._works, self._incoming = where, works, incoming
        self._outgoing = outgoing  # kept alive: the transport reads from it until the messages are out
        self._timeout_seconds, self._wait = timeout_seconds, wait

    def wait(self) -> dict[int, Tensor]:
        """Until every payload has come in and gone out."""
        deadline = time.monotonic() + self._timeout_seconds
        missing: dict[int, str] = {}
        for replica, work in self._works:
            try:
                # A replica that was waited for in vain leaves the others a moment, to learn who else is missing.
                self._wait(work, max(deadline - time.monotonic(), 0.01))
            except (RuntimeError, TimeoutError) as error:
                missing.setdefault(replica, _reason(error))
        self._works = []
        if missing:
            names = ", ".join(f"replica {replica} ({reason})" for replica, reason in sorted(missing.items()))
            raise ExchangeError(
                f"{self._where}: no payload within {self._timeout_seconds:g} s from or to {names}",
                missing=tuple(sorted(missing)),
            )
        return self._incoming


def _tag(fragment: int, round: int, phase: int) -> int:
    assert fragment + 1 < 1 << _FRAGMENT_BITS and phase in (0, 1), "more fragments or phases than a tag can tell"
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
    """The first line of a transport's message, without the place in its source."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first.split("] ", 1)[-1] if first.startswith("[") else first
