"""Durations of work that one process does alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def shortest_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs: other processes and first-time work only ever make one longer."""
    seconds: list[float] = []
    while len(seconds) < 20 and (len(seconds) < 4 or sum(seconds) < 0.5):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > 2:
            break
    return min(seconds)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
