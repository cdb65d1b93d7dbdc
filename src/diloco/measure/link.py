"""Bandwidth and latency between this replica and the others."""

import statistics
import time
from itertools import count

import torch

from diloco.exchange.transport import Channel, Tag, Transport, share


def measure_link(
    exchange: Transport, *, seconds: float = 2.0, beside: Transport | None = None
) -> tuple[float, float]:
    """Bandwidth in Gbit/s and latency in seconds of this replica's link; each replica must call it.

    Args:
        exchange: to the other replicas.
        seconds: payloads grow until an exchange takes so long, or until they have 64 MiB.
        beside: an exchange among all processes that share links and measure at the same time; None is `exchange`.

    Returns:
        payload bits that this replica sends to all others together, while it receives as many; and the median
        duration of an exchange of a few bytes.
    """
    rounds, together = count(1), beside or exchange

    def exchange_seconds(num_bytes: int, times: int) -> float:
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        others = {replica: payload for replica in range(exchange.num_replicas) if replica != exchange.replica}
        share(together, None)  # all begin at once
        times_seconds = [time.perf_counter()]
        for _ in range(times):
            exchange.start(others, Tag(Channel.PROBE, round=next(rounds))).wait()
            times_seconds.append(time.perf_counter())
        # Two at a time: where one end begins later than the other, every second exchange seems to take longer.
        step = min(times, 2)
        return statistics.median(
            (end - start) / step for start, end in zip(times_seconds, times_seconds[step:], strict=False)
        )

    latency_seconds, num_bytes = exchange_seconds(8, 20), 1 << 16
    while True:
        taken_seconds = statistics.median(exchange_seconds(num_bytes, 1) for _ in range(3))
        # All must decide alike, or some would wait for others that have finished.
        if num_bytes >= 1 << 26 or max(share(together, taken_seconds, float)) >= seconds:
            gbits_sent = 8e-9 * num_bytes * (exchange.num_replicas - 1)
            return gbits_sent / max(taken_seconds - latency_seconds, 1e-9), latency_seconds
        num_bytes *= 4
