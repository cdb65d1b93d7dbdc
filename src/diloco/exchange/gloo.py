"""Messages over gloo: every receive is posted before any send.

A receiver's notice that it is ready would otherwise queue behind the payload that it announces. gloo moves the
bytes on threads of its own, and between two replicas one message after the other, in the order in which they were
started.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from diloco.errors import UserError
from diloco.exchange.messages import Messages
from diloco.exchange.transport import Tag

# A tag has 31 bits: channel, fragment, round, phase. No two rounds in flight share their last 17 bits.
_FRAGMENT_BITS, _ROUND_BITS = 11, 17

# From this size on, a chunk of a payload is worth a connection of its own.
_CHUNK_BYTES = 1 << 16


class Work(Protocol):
    """A message on its way."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until it is over; closes its connection if the time is over first."""
        ...


class Group(Protocol):
    """A group of torch.distributed, a gloo backend of which it knows nothing, or an encrypted group."""

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


def post(messages: Messages, groups: list[Group]) -> None:
    """Post every receive, then every send; a large payload is cut into a chunk for each group."""
    tag = tag_bits(messages.tag)
    for replica, buffer in messages.incoming.items():
        with messages.blaming(replica):
            for group, chunk in _chunks(buffer, groups):
                messages.add(replica, partial(wait_for, group.recv([chunk], replica, tag)))
    for replica, payload in messages.outgoing.items():
        with messages.blaming(replica):
            for group, chunk in _chunks(payload, groups):
                messages.add(replica, partial(wait_for, group.send([chunk], replica, tag)))


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


def _chunks(payload: Tensor, groups: list[Group]) -> Iterator[tuple[Group, Tensor]]:
    """The part of a payload that travels in each group; a small payload travels in the first alone."""
    num_chunks = min(len(groups), max(1, payload.numel() // _CHUNK_BYTES))
    return zip(groups, payload.tensor_split(num_chunks), strict=False)


def wait_for(work: Work, seconds: float) -> None:
    """Wait until a message is over; closes its connection, on gloo all of its group, if the time is over first."""
    work.wait(timedelta(seconds=seconds))
