"""A replica of several processes that hold the same parameters: one exchanges, and hands on what it receives."""

import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from diloco.errors import DisagreementError
from diloco.exchange.notices import Notices, WithNotices
from diloco.exchange.process_group import Answers, Backend, GroupExchange, Messages, tag_bits, wait_for
from diloco.exchange.transport import Channel, Pending, Tag


class LeaderExchange(WithNotices):
    """The exchange of one process of a replica whose first process is the leader: a `Transport`.

    Args:
        outside: the leader's exchange with the other replicas; None in the other processes.
        inside: between the replica's processes; the leader has rank 0.
        notices: of all processes of all replicas.
        replica: this replica.
        num_replicas: M.
        timeout_seconds: how long `Pending.wait` waits at the most.
    """

    ordered = False
    """gloo has tags."""
    device = torch.device("cpu")
    """Payloads are sent from the host."""

    def __init__(
        self,
        outside: GroupExchange | None,
        inside: Backend,
        notices: Notices,
        *,
        replica: int,
        num_replicas: int,
        timeout_seconds: float,
    ) -> None:
        super().__init__(notices)
        self._outside = outside
        self._backends = [inside]
        self.replica, self.num_replicas = replica, num_replicas
        # Behind the leader there are two journeys to wait for.
        self._timeout_seconds = timeout_seconds if outside else 2 * timeout_seconds
        self.answers = outside.answers if outside else Answers()
        """The other replicas' answers to the leader; the other processes know nothing of them."""

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Send from the leader alone; the other processes receive what it receives."""
        if self._outside is None:
            return _FromLeader(self, payloads, tag)
        return _ByLeader(self, self._outside.start(payloads, tag), payloads, tag)

    def close(self) -> None:
        """Free the connections, and the port where this process listens; nothing is sent or received after it."""
        self._notices.close()
        if self._outside is not None:
            self._outside.close()
        self._backends.clear()

    def messages(self, tag: Tag) -> Messages:
        """Messages inside the replica, yet none."""
        self._notices.expect()
        return Messages(*({}, self.device, tag, self._timeout_seconds, self._notices, Answers()), in_replica=True)

    def send(self, messages: Messages, payload: Tensor, rank: int) -> None:
        """Add a message to a process of this replica."""
        with messages.blaming(rank):
            work = self._backends[0].send([payload], rank, tag_bits(messages.tag))
            messages.add(rank, partial(wait_for, work))

    def receive(self, messages: Messages, buffer: Tensor, rank: int) -> None:
        """Add a message from a process of this replica."""
        with messages.blaming(rank):
            work = self._backends[0].recv([buffer], rank, tag_bits(messages.tag))
            messages.add(rank, partial(wait_for, work))

    @property
    def others(self) -> range:
        """The ranks of the processes but the leader."""
        return range(1, self._backends[0].size())


class _ByLeader:
    """The leader's wait: for the other replicas, then until its own processes have what came."""

    def __init__(
        self, exchange: LeaderExchange, pending: Messages, payloads: Mapping[int, Tensor], tag: Tag
    ) -> None:
        self._exchange, self._pending, self._tag = exchange, pending, tag
        self._digest = _digest(payloads) if tag.channel is Channel.CONTROL else None

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads."""
        if self._digest is not None:
            self._compare(self._digest)
        received = self._pending.wait()
        messages = self._exchange.messages(self._tag)
        together = torch.cat([received[replica] for replica in sorted(received)])
        for rank in self._exchange.others:
            self._exchange.send(messages, together, rank)
        messages.wait()
        return received

    def _compare(self, mine: Tensor) -> None:
        """Refuse processes of the replica that believe something else."""
        messages = self._exchange.messages(self._tag)
        theirs = {rank: torch.empty_like(mine) for rank in self._exchange.others}
        for rank, digest in theirs.items():
            self._exchange.receive(messages, digest, rank)
        messages.wait()
        for rank, digest in theirs.items():
            if not torch.equal(digest, mine):
                raise DisagreementError(
                    f"process {rank} of replica {self._exchange.replica} has other settings, another model or "
                    "other initial parameters than process 0: start all alike, or leave leader out if each holds "
                    "a shard of its own"
                )


class _FromLeader:
    """The wait of the other processes: for the leader."""

    def __init__(self, exchange: LeaderExchange, payloads: Mapping[int, Tensor], tag: Tag) -> None:
        self._sizes = {replica: payloads[replica].numel() for replica in sorted(payloads)}
        self._together = torch.empty(sum(self._sizes.values()), dtype=torch.uint8)
        self._messages = exchange.messages(tag)
        exchange.receive(self._messages, self._together, 0)
        if tag.channel is Channel.CONTROL:
            self._digest = _digest(payloads)  # kept until it is sent
            exchange.send(self._messages, self._digest, 0)

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, from the leader."""
        self._messages.wait()
        return dict(zip(self._sizes, self._together.split(list(self._sizes.values())), strict=True))


def _digest(payloads: Mapping[int, Tensor]) -> Tensor:
    """SHA-256 of a control message, which is the same to all replicas (32)."""
    message = next(iter(payloads.values()))
    return torch.frombuffer(bytearray(hashlib.sha256(message.numpy().data).digest()), dtype=torch.uint8)
