"""One replica of `elastic_rounds.py`, in a process of its own: it sleeps in the place of inner steps."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from elastic_study.replica import Replica


def live(
    settings: dict[str, Any], step_seconds: float, num_periods: int, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Take H inner steps more often than `num_periods`, and leave.

    Returns:
        its sends and decisions with their times, which all processes of a machine share, and what it asked of the
        store between its first and its last whole period of H steps.
    """
    torch.set_num_threads(1)
    os.environ.update(variables)
    replica = Replica(**settings)
    sync_every = settings["sync_every"]
    before, next_at = usage(replica), time.monotonic()
    for step in range(1, (num_periods + 1) * sync_every + 1):
        next_at += step_seconds
        time.sleep(max(0.0, next_at - time.monotonic()))
        replica.step()
        if step == sync_every:
            before = usage(replica)
    after, exchange = usage(replica), replica.exchange
    exchange.leave()
    return {
        "replica": exchange.replica,
        "sends": exchange.sends,
        "decisions": exchange.decisions,
        "used": {name: after[name] - before[name] for name in after},
    }


def usage(replica: Replica) -> dict[str, float]:
    """Requests and bytes so far, and outer steps in the log."""
    store = replica.exchange.store
    return {
        "creates": store.requests["create"] + store.requests["list"],
        "gets": store.requests["get"],
        "bytes_up": store.bytes_up,
        "bytes_down": store.bytes_down,
        "outer_steps": replica.exchange.state.num_outer,
        "seconds": time.monotonic(),
    }
