"""The exchange over a torch.distributed process group, on gloo or nccl; and a replica's own group of processes."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import ExchangeError, UserError
from diloco.exchange.notices import Notices, WithNotices, first_sentence, in_thread, within
from diloco.exchange.private_torch import timeout_seconds_of
from diloco.exchange.transport import Channel, Tag, agree


class Answers:
    """The times of the other replicas' answers, as seen by the waits of one exchange."""

    def __init__(self) -> None:
        self.heard_at: dict[int, float] = {}
        """Time at which a message from each replica was last taken, by `time.monotonic()`."""
        self.lateness_seconds: dict[int, float] = {}
        """Duration of the last wait for a payload of each replica, after those of the replicas before it."""


class Messages:
    """The messages of one exchange.

    Args:
        payloads: what is sent, by replica; a message of the same length is received from each.
        device: where the messages lie.
        tag: the exchange that errors name.
        timeout_seconds: how long `wait` waits at the most.
        notices: they end a wait that is in vain.
        answers: the record of when each replica answered; None for messages between the processes of this replica,
            which then take the place of replicas.
    """

    def __init__(
        self,
        payloads: Mapping[int, Tensor],
        device: torch.device,
        tag: Tag,
        timeout_seconds: float,
        notices: Notices,
        answers: Answers | None,
    ) -> None:
        self.tag = tag
        """The exchange."""
        self.interruption: str | None = None
        """The reason why the wait is in vain."""
        self._timeout_seconds = timeout_seconds
        self._notices = notices
        self._answers = answers
        self._waits: dict[int, list[Callable[[float], None]]] = {}
        self._backends: Set[Backend] = frozenset()
        self._current: tuple[int, futures.Future[None]] | None = None
        self._missing: dict[int, str] = {}
        self._sent: list[Tensor] = []  # kept alive: the transport reads from them until all is sent
        self.outgoing = {replica: payload.to(device) for replica, payload in sorted(payloads.items())}
        """The messages sent, by replica."""
        self.incoming = {
            replica: torch.empty_like(payload, pin_memory=payload.is_pinned())
            for replica, payload in self.outgoing.items()
        }
        """Memory for the messages received, by replica; pinned if that of the sent ones is, which a GPU made."""

    def add(self, replica: int, wait: Callable[[float], None]) -> None:
        """Add a message from or to a replica; `wait(seconds)` returns when it is over, or raises."""
        self._waits.setdefault(replica, []).append(wait)

    def send(self, backend: "Backend", payload: Tensor, replica: int) -> None:
        """Start to send a message to a replica."""
        self._sent.append(payload)
        self._backends |= {backend}
        with self.blaming(replica):
            self.add(replica, partial(wait_for, backend.send([payload], replica, tag_bits(self.tag))))

    def receive(self, backend: "Backend", buffer: Tensor, replica: int) -> None:
        """Start to receive a message from a replica."""
        self._backends |= {backend}
        with self.blaming(replica):
            self.add(replica, partial(wait_for, backend.recv([buffer], replica, tag_bits(self.tag))))

    @contextmanager
    def blaming(self, replica: int) -> Iterator[None]:
        """Note an error as this replica's, and go on with the others."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self._missing.setdefault(replica, first_sentence(error))

    def wait(self) -> dict[int, Tensor]:
        """The messages received, once every message has come in and gone out.

        Raises:
            ExchangeError: naming the exchange and the replicas that are missing.
        """
        deadline = time.monotonic() + self._timeout_seconds
        lateness_seconds: dict[int, float] = {}
        with self._notices.watching(self):
            for replica in list(self._waits):
                start = time.monotonic()
                with self.blaming(replica):
                    # After one timeout the others have a moment left, to learn who else is missing.
                    self._wait_for_replica(replica, start + 0.01 if self.interruption else deadline)
                    now = time.monotonic()
                    lateness_seconds[replica] = now - start
                    if self._answers is not None:
                        self._answers.heard_at = {**self._answers.heard_at, replica: now}
                del self._waits[replica]
        self._backends, self._current = frozenset(), None  # the payloads may live longer
        if self._missing:
            raise self._error()
        if self._answers is not None and self.tag.channel is Channel.PAYLOAD:
            self._answers.lateness_seconds = lateness_seconds
        return self.incoming

    def _wait_for_replica(self, replica: int, deadline: float) -> None:
        """Wait for all messages from and to a replica.

        A wait of gloo does not end where its connection closes amid the message, so it takes place in a thread.
        """
        waits = self._waits[replica]

        def wait_one_after_another() -> None:
            for wait in waits:
                wait(max(deadline - time.monotonic(), 0.01))

        if not self._backends:  # on nccl this thread's stream waits
            wait_one_after_another()
            return
        over = in_thread(wait_one_after_another)
        self._current = replica, over
        if self.interruption is not None:  # it may have come before this wait could be seen
            deadline = time.monotonic()
        over.result(max(deadline - time.monotonic(), 0.01) + _SECONDS_FOR_ITS_OWN_ERROR)

    def interrupt(self, reason: str) -> None:
        """End the wait, and close the connections."""
        self.interruption = self.interruption or reason
        for backend in self._backends:
            for replica in list(self._waits):
                with suppress(RuntimeError, TimeoutError):
                    # gloo closes all connections of a backend when one wait is out of time.
                    wait_for(_message_that_never_comes(backend, replica), 0.001)
        if self._current is not None:
            _end(self._current[1], TimeoutError(reason))

    def check_connection(self) -> None:
        """End the wait for a replica whose connection has closed."""
        if self._current is None:
            return
        replica, over = self._current
        try:
            for backend in filter(_is_gloo, self._backends):
                _message_that_never_comes(backend, replica)
        except RuntimeError as error:
            _end(over, error)

    def _error(self) -> ExchangeError:
        """The error of messages that did not come, with its cause where a replica has posted it."""
        missing = () if self._answers is None else tuple(sorted(self._missing))
        deadline, can_look = time.monotonic() + _SECONDS_FOR_THE_CAUSE, True
        # Of a store that is gone torch prints a stack at each look.
        while can_look and time.monotonic() < deadline and (self.interruption or self._notices.failure) is None:
            with suppress(TimeoutError):  # the store's process stands still
                can_look = within(deadline - time.monotonic(), self._notices.look)
            time.sleep(0.05)  # a replica that fails closes its connections a moment before it says why
        if (cause := self.interruption or self._notices.failure) is not None:
            return ExchangeError(f"{self.tag}: {cause}", missing)
        member = "process {} of this replica" if self._answers is None else "replica {}"
        names = ", ".join(f"{member.format(i)} ({_explained(self._missing[i])})" for i in sorted(self._missing))
        return ExchangeError(f"{self.tag}: no payload from or to {names}", missing)


_SECONDS_FOR_THE_CAUSE = 1.0
_SECONDS_FOR_ITS_OWN_ERROR = 0.5


def _end(over: "futures.Future[None]", error: Exception) -> None:
    """End a wait with an error, unless it ends by itself within a moment."""
    futures.wait([over], _SECONDS_FOR_ITS_OWN_ERROR)
    with suppress(futures.InvalidStateError):
        over.set_exception(error)


def _explained(error: str) -> str:
    """A transport's error, with its meaning before it: no replica closes a connection without a notice."""
    is_closed = re.search("closed by peer|reset by peer|closed the connection|broke off|Broken pipe", error)
    return f"its process has ended, or the network has cut its connection: {error}" if is_closed else error


def _is_gloo(backend: "Backend") -> bool:
    return isinstance(backend, dist.ProcessGroup | dist.ProcessGroupGloo)


def _message_that_never_comes(backend: "Backend", replica: int) -> "Work":
    """Start to receive a message that a replica never sends; raises if the connection to it has closed."""
    return backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], replica, _NO_MESSAGE)


# A tag has 31 bits: channel, fragment, round, phase. No two rounds in flight share their last 17 bits.
_FRAGMENT_BITS, _ROUND_BITS = 11, 17
_NO_MESSAGE = (1 << 31) - 1
"""The bits of a tag that no exchange has."""

# From this size on, a chunk of a payload is worth a connection of its own.
_CHUNK_BYTES = 1 << 16


class Work(Protocol):
    """A message on its way."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until it is over; closes its connection if the time is over first."""
        ...


class Backend(Protocol):
    """Connections between processes: of a group of torch.distributed, of a backend of gloo alone, or encrypted."""

    def rank(self) -> int:
        """This process, from 0."""
        ...

    def size(self) -> int:
        """The number of processes."""
        ...

    def send(self, tensors: list[Tensor], dstRank: int, tag: int, /) -> Work:
        """Start to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int, /) -> Work:
        """Start to receive one tensor."""
        ...


def post_gloo(messages: Messages, backends: list[Backend]) -> None:
    """Post every receive, then every send; a large payload is cut into a chunk for each backend."""
    for replica, buffer in messages.incoming.items():
        for backend, chunk in _chunks(buffer, backends):
            messages.receive(backend, chunk, replica)
    for replica, payload in messages.outgoing.items():
        for backend, chunk in _chunks(payload, backends):
            messages.send(backend, chunk, replica)


def group_like(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    """A group of the same replicas with connections of its own; every replica must call it."""
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout_seconds),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup), "this process is a member"
    return made


def tag_bits(tag: Tag) -> int:
    """A tag as the whole number by which gloo matches messages; shards have groups of their own.

    Raises:
        UserError: if there are more fragments than a tag can tell apart.
    """
    if tag.fragment >= 1 << _FRAGMENT_BITS:
        raise UserError(f"fragment {tag.fragment} is one too many: cut at most {1 << _FRAGMENT_BITS} fragments")
    assert tag.phase in (0, 1), "a tag has one bit for the phase"
    place = tag.channel << _FRAGMENT_BITS | tag.fragment
    return (place << _ROUND_BITS | tag.round % (1 << _ROUND_BITS)) << 1 | tag.phase


def _chunks(payload: Tensor, backends: list[Backend]) -> Iterator[tuple[Backend, Tensor]]:
    """The part of a payload that travels in each backend; a small payload travels in the first alone."""
    num_chunks = min(len(backends), max(1, payload.numel() // _CHUNK_BYTES))
    return zip(backends, payload.tensor_split(num_chunks), strict=False)


def wait_for(work: Work, seconds: float) -> None:
    """Wait until a message is over; if the time is over first, closes its connection, on gloo all of a backend."""
    work.wait(timedelta(seconds=seconds))


def post_nccl(messages: Messages, group: dist.ProcessGroup) -> None:
    """Post all receives and sends in one call."""
    assert messages.tag.phase == 0, "a second phase starts by itself, in no order that nccl could match"
    if not messages.outgoing:
        return
    operations = [
        dist.P2POp(dist.irecv, buffer, group=group, group_peer=replica)
        for replica, buffer in messages.incoming.items()
    ] + [
        dist.P2POp(dist.isend, payload, group=group, group_peer=replica)
        for replica, payload in messages.outgoing.items()
    ]
    # nccl answers for all messages at once: any of the replicas may be the late one.
    for work in dist.batch_isend_irecv(operations):
        for replica in messages.outgoing:
            messages.add(replica, partial(_wait, messages, work))


def _wait(messages: Messages, work: dist.Work, seconds: float) -> None:
    """Poll: nccl's own wait only orders streams, and its watchdog ends the process instead of raising."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline or messages.interruption is not None:
            raise TimeoutError("timed out")
        time.sleep(1e-4)
    work.wait()


class GroupExchange(WithNotices):
    """Each process is one replica and sends to every other directly: a `Transport`.

    Args:
        backends: between the same replicas; the first takes every message, the others chunks of large ones.
        notices: of these replicas.
        timeout_seconds: how long `Pending.wait` waits at the most.
        is_gloo: False for nccl.
    """

    def __init__(
        self, backends: Sequence[Backend], notices: Notices, *, timeout_seconds: float, is_gloo: bool = True
    ) -> None:
        super().__init__(notices)
        self._backends = list(backends)
        self._timeout_seconds = timeout_seconds
        self.replica = backends[0].rank()
        """This process's rank among the replicas."""
        self.num_replicas = backends[0].size()
        """M."""
        self.ordered = not is_gloo
        """True on nccl, which has no tags."""
        self.answers = Answers()
        """The other replicas' answers."""

    @property
    def device(self) -> torch.device:
        """The CPU on gloo, the current GPU on nccl."""
        return torch.device("cuda" if self.ordered else "cpu")

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Messages:
        """Post every message and return."""
        messages = Messages(payloads, self.device, tag, self._timeout_seconds, self._notices, self.answers)
        self._notices.expect()
        if self.ordered:
            assert isinstance(self._backends[0], dist.ProcessGroup), "nccl comes with a group of torch.distributed"
            post_nccl(messages, self._backends[0])
        else:
            post_gloo(messages, self._backends)
        return messages

    def close(self) -> None:
        """Free the connections, and the port where this process listens; nothing is sent or received after it.

        Nothing may be in flight, but what has failed. To go on after a failure, close, and connect anew.
        """
        self._notices.close()
        self._backends.clear()


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
            self._backends += [group_like(group, timeout_seconds) for _ in range(1, num_connections)]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that it was given."""
        group = self._backends[0]
        assert isinstance(group, dist.ProcessGroup), "it was given one"
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        """The replicas' processes that it joins, by their ranks in torch.distributed's default group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def close(self) -> None:
        """Free the connections that were made for this exchange; the group that it was given stays as it is.

        Nothing may be in flight, but what has failed.
        """
        for group in self._backends[1:]:
            assert isinstance(group, dist.ProcessGroup), "group_like made it"
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

    def broadcast_numbers(self, numbers: Sequence[int]) -> list[int]:
        """The first process's whole numbers, up to 2^53; those of the others are as many, and are not used."""
        together = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [int(number) for number in self.broadcast(together).tolist()]

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
