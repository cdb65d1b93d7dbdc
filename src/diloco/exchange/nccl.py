"""Messages over nccl: those of one exchange go out as one group call, and the receiver matches them by order."""

import time
from functools import partial

import torch.distributed as dist

from diloco.exchange.messages import Messages


def post(messages: Messages, group: dist.ProcessGroup) -> None:
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
    # nccl answers for all messages at once: whoever is late may be any of them.
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
