"""A replica of several processes that hold the same parameters: one exchanges, and hands on what it receives."""

import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from diloco.errors import DisagreementError
from diloco.exchange.notices import Notices, WithNotices
from diloco.exchange.process_group import Answers, Group, GroupExchange, Messages, tag_bits, wait_for
from diloco.exchange.transport import Channel, Pending, Tag, Transport


class LeaderExchange(WithNotices, Transport):
    """The exchange of one process of a replica whose first process is the leader.

    Args:
        outside: the leader's exchange with the other replicas; None in the other processes.
        inside: the replica's processes; the leader has rank 0.
        notices: of all processes of all replicas.
        replica: this replica.
        num_replicas: M.
        timeout_seconds: how long `Pending.wait` waits at the most.
    """

    def __init__(
        self,
        outside: GroupExchange | None,
        inside: Group,
        notices: Notices,
        *,
        replica: int,
        num_replicas: int,
        timeout_seconds: float,
    ) -> None:
        self._outside, self._notices = outside, notices
        self._groups = [inside]
        self._replica, self._num_replicas = replica, num_replicas
        # A follower waits for two journeys.
        self._timeout_seconds = timeout_seconds if outside else 2 * timeout_seconds
        self.answers = outside.answers if outside else Answers()
        """The other replicas' answers to the leader; the other processes know nothing of them."""

    @property
    def replica(self) -> int:
        """This replica, from 0."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """M."""
        return self._num_replicas

    @property
    def ordered(self) -> bool:
        """False: gloo has tags."""
        return False

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def start(self, payloads: Mapping[int, Tensor], tag: Tag) -> Pending:
        """Send from the leader alone; the other processes receive what it receives."""
        if self._outside is None:
            return _Following(self, payloads, tag)
        return _Leading(self, self._outside.start(payloads, tag), payloads, tag)

    def close(self) -> None:
        """Free the connections, and the port where this process listens; nothing is sent or received after it."""
        self._notices.close()
        if self._outside is not None:
            self._outside.close()
        self._groups.clear()

    @property
    def inside(self) -> Group:
        """The replica's processes."""
        return self._groups[0]

    def messages(self, tag: Tag) -> Messages:
        """Messages inside the replica, yet none."""
        self._notices.expect()
        return Messages(*({}, self.device, tag, self._timeout_seconds, self._notices, Answers()), in_replica=True)


class _Leading:
    """The leader's wait: for the other replicas, then until its own processes have what came."""

    def __init__(
        self, exchange: LeaderExchange, pending: Messages, payloads: Mapping[int, Tensor], tag: Tag
    ) -> None:
        self._exchange, self._pending, self._tag = exchange, pending, tag
        self._facts = digest_of(payloads) if tag.channel is Channel.CONTROL else None

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads."""
        if self._facts is not None:
            self._compare(self._facts)
        received = self._pending.wait()
        messages, inside = self._exchange.messages(self._tag), self._exchange.inside
        together = torch.cat([received[replica] for replica in sorted(received)])
        for follower in range(1, inside.size()):
            with messages.blaming(follower):
                messages.add(follower, partial(wait_for, inside.send([together], follower, tag_bits(self._tag))))
        messages.wait()
        return received

    def _compare(self, mine: Tensor) -> None:
        """Refuse processes of the replica that believe something else."""
        messages, inside = self._exchange.messages(self._tag), self._exchange.inside
        theirs = {follower: torch.empty_like(mine) for follower in range(1, inside.size())}
        for follower, digest in theirs.items():
            with messages.blaming(follower):
                messages.add(follower, partial(wait_for, inside.recv([digest], follower, tag_bits(self._tag))))
        messages.wait()
        for follower, digest in theirs.items():
            if not torch.equal(digest, mine):
                raise DisagreementError(
                    f"process {follower} of replica {self._exchange.replica} has other settings, another model or "
                    "other initial parameters than process 0: start all alike, or leave leader out if each holds "
                    "a shard of its own"
                )


class _Following:
    """The wait of the other processes: for the leader."""

    def __init__(self, exchange: LeaderExchange, payloads: Mapping[int, Tensor], tag: Tag) -> None:
        self._sizes = {replica: payloads[replica].numel() for replica in sorted(payloads)}
        self._together = torch.empty(sum(self._sizes.values()), dtype=torch.uint8)
        self._messages, inside = exchange.messages(tag), exchange.inside
        self._digest = digest_of(payloads)
        with self._messages.blaming(0):
            work = inside.recv([self._together], 0, tag_bits(tag))
            self._messages.add(0, partial(wait_for, work))
            if tag.channel is Channel.CONTROL:
                self._messages.add(0, partial(wait_for, inside.send([self._digest], 0, tag_bits(tag))))

    def wait(self) -> dict[int, Tensor]:
        """The other replicas' payloads, from the leader."""
        self._messages.wait()
        return dict(zip(self._sizes, self._together.split(list(self._sizes.values())), strict=True))


def digest_of(payloads: Mapping[int, Tensor]) -> Tensor:
    """SHA-256 of a control message, which is the same to all replicas (32)."""
    message = next(iter(payloads.values()))
    return torch.frombuffer(bytearray(hashlib.sha256(message.numpy().data).digest()), dtype=torch.uint8)
