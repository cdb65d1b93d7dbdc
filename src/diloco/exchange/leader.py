"""A replica of several processes that hold the same parameters: one exchanges, and hands on what it receives."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.errors import DisagreementError
from diloco.exchange.notices import Notices, WithNotices
from diloco.exchange.process_group import Backend, GroupExchange, Messages
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
        # Other processes wait for two transfers: to the leader, and from it.
        self._timeout_seconds = timeout_seconds if outside else 2 * timeout_seconds
        self.answers = outside.answers if outside else None
        """The other replicas' answers to the leader; the other processes know nothing of them."""

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Send from the leader alone; the other processes receive what it receives."""
        # A control message is the same to all replicas, and must be the same in all processes.
        digest = _digest(next(iter(payloads.values()))) if tag.channel is Channel.CONTROL else None
        if self._outside is not None:
            return _ByLeader(self, self._outside.start(payloads, tag), digest)
        inside, messages = self._backends[0], self._messages(payloads, tag)
        for buffer in messages.incoming.values():
            messages.receive(inside, buffer, 0)
        if digest is not None:
            messages.send(inside, digest, 0)
        return messages

    def close(self) -> None:
        """Free the connections, and the port where this process listens; nothing is sent or received after it."""
        self._notices.close()
        if self._outside is not None:
            self._outside.close()
        self._backends.clear()

    def _messages(self, payloads: Mapping[int, Tensor], tag: Tag) -> Messages:
        """Messages between the replica's processes, with memory for as many as there are payloads."""
        self._notices.expect()
        return Messages(payloads, self.device, tag, self._timeout_seconds, self._notices, None)

    def hand_on(self, received: Mapping[int, Tensor], tag: Tag) -> None:
        """Send the other replicas' payloads from the leader to its processes."""
        messages, inside = self._messages({}, tag), self._backends[0]
        for rank in range(1, inside.size()):
            for replica in sorted(received):
                messages.send(inside, received[replica], rank)
        messages.wait()

    def compare(self, digest: Tensor, tag: Tag) -> None:
        """Refuse processes of the replica that say something else than the leader.

        Raises:
            DisagreementError: naming the first of them.
        """
        messages, inside = self._messages({}, tag), self._backends[0]
        theirs = {rank: torch.empty_like(digest) for rank in range(1, inside.size())}
        for rank, buffer in theirs.items():
            messages.receive(inside, buffer, rank)
        messages.wait()
        for rank, other in theirs.items():
            if not torch.equal(other, digest):
                raise DisagreementError(
                    f"process {rank} of replica {self.replica} has other settings, another model or other "
                    "initial parameters than process 0: start all alike, or leave leader out if each holds a "
                    "shard of its own"
                )


class _ByLeader:
    """The leader's wait: for the other replicas, then until its own processes have what came."""

    def __init__(self, exchange: LeaderExchange, pending: Messages, digest: Tensor | None) -> None:
        self._exchange, self._pending, self._digest = exchange, pending, digest

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads."""
        if self._digest is not None:
            self._exchange.compare(self._digest, self._pending.tag)
        received = self._pending.wait()
        self._exchange.hand_on(received, self._pending.tag)
        return received


def _digest(message: Tensor) -> Tensor:
    """SHA-256 of a message (32)."""
    return torch.frombuffer(bytearray(hashlib.sha256(message.numpy().data).digest()), dtype=torch.uint8)
