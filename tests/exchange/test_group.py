"""The processes of one replica: what one has, all have."""

import time

import torch
import torch.distributed as dist
from tests.processes import run_replicas

from diloco.exchange.process_group import TorchGroup
from diloco.exchange.transport import OneProcess


def together() -> tuple[list[float], list[float], float]:
    """The first process's values, the sum of all, and the time at the barrier to which the last one comes late."""
    group = TorchGroup(dist.group.WORLD, torch.device("cpu"))
    own = torch.full((2,), 1.0 + group.index)
    first, total = group.broadcast(own), group.reduce(own)
    assert own.tolist() == [1.0 + group.index] * 2, "nothing is changed in place"
    assert group.broadcast_numbers((2**53 - group.index, group.index)) == [2**53, 0]
    start = time.monotonic()
    if group.index == group.size - 1:
        time.sleep(0.5)
    group.barrier()
    return first.tolist(), total.tolist(), time.monotonic() - start


def test_processes_hold_the_same():
    for first, total, seconds in run_replicas(together, 2):
        assert (first, total) == ([1.0, 1.0], [3.0, 3.0]) and seconds > 0.4


def test_one_process_talks_to_nobody():
    group, own = OneProcess(), torch.ones(2)
    with group.fail_together("another process"):
        group.barrier()
    assert group.broadcast_numbers((3, 4)) == [3, 4]
    assert group.broadcast(own) is own and group.reduce(own) is own and (group.index, group.size) == (0, 1)
