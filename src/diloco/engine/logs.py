"""The numbers of an engine for trackers and alerts, by name."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.sharded import sum_over_shards
from diloco.engine.state import OUTER
from diloco.kernels.memory import begin_to_host


def counters(rounds: ReplicaRounds) -> dict[str, float]:
    """The numbers that are at hand: counters, times, the last exchange, and the other replicas' answers."""
    record = rounds.record
    values: dict[str, float] = {
        "num_steps": rounds.num_steps,
        "bytes_sent": rounds.bytes_sent,
        "bytes_received": rounds.bytes_received,
        "blocked_seconds": rounds.blocked_seconds,
        "encode_seconds": record.encode_seconds,
        "merge_seconds": record.merge_seconds,
    }
    if record.exchange_mbit_s is not None:
        name = "exchange_mbit_s" if record.was_waited_for else "exchange_mbit_s_at_least"
        values[name] = record.exchange_mbit_s
    if (answers := rounds.answers) is not None:
        lateness, heard_at, now = answers.lateness_seconds, answers.heard_at, time.monotonic()
        values |= {f"lateness_seconds/replica_{other}": seconds for other, seconds in sorted(lateness.items())}
        values |= {f"last_heard_seconds/replica_{other}": now - then for other, then in sorted(heard_at.items())}
    return {name: float(value) for name, value in values.items()}


def begin_logs(rounds: ReplicaRounds) -> Callable[[], dict[str, float]]:
    """Begin to compute what `logs` returns, and read it when the function that is returned is called."""
    errors = rounds.record.codec_errors(rounds.settings.wire)
    device, group = rounds.parameters.device, rounds.parameters.shard_group
    none = torch.zeros(2, device=device)
    squares = torch.stack([_squared_distance(rounds), *(none if errors is None else errors)])
    squares, counted = begin_to_host(sum_over_shards(squares, group)), counters(rounds)

    def read() -> dict[str, float]:
        distance, error, delta = squares().tolist()
        computed = {"distance_to_outer": math.sqrt(distance)}
        if errors is not None or delta:  # where replicas come and go, the first process of one has the sample
            computed["codec_error"] = math.sqrt(error / delta) if delta else 0.0
        return counted | computed

    return read


def logs(rounds: ReplicaRounds) -> dict[str, float]:
    """The counters, and what is computed on call: ‖θ − Θ‖, and the codec's error after the first sync."""
    return begin_logs(rounds)()


def _squared_distance(rounds: ReplicaRounds) -> Tensor:
    """‖θ − Θ‖² over the elements that this process holds."""
    total = torch.zeros((), device=rounds.parameters.device)
    for p, home_N in enumerate(rounds.state.at_home(OUTER)):
        outer_N = home_N.to(rounds.parameters.device)
        delta_N = rounds.parameters.outer_gradient(p, outer_N, torch.empty_like(outer_N))
        total += torch.linalg.vector_norm(delta_N).square()
    rounds.expect_next()
    return total
