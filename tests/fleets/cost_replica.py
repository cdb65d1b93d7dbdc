"""A replica that sleeps in the place of steps, in a process of its own, and counts what it asks of a store."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import diloco
from diloco.fragments import Fragment
from diloco.rendezvous import payloads
from diloco.rendezvous.status import Look
from diloco.rendezvous.store import Store

NUM_FRAGMENTS, SYNC_EVERY, OVERLAP_STEPS, STEP_SECONDS, POLL_SECONDS = 2, 20, 10, 0.05, 0.2
ELEMENTS = 20_000
"""N of each fragment."""
SNAPSHOT_ROUNDS = 4
SETTLE_SECONDS = 0.5


def live(
    url: str, name: str, first: int, last: int, variables: Mapping[str, str], **settings: Any
) -> dict[str, Any]:
    """Take the inner steps up to `last`, and leave.

    Args:
        url: of the run.
        name: of the replica.
        first: the step after which requests and outer steps count; 0 counts the join, too, which ends at about
            half of the rounds between two snapshots.
        last: the last step.
        variables: the environment that leads to the store.
        settings: combine, and those of `StoreRendezvous`.

    Returns:
        creates, gets, bytes_up, bytes_down, seconds and each outer step's contributors, from `first` to `last`;
        and the most seconds by which a step was late, or a join took longer than two rounds.
    """
    torch.set_num_threads(1)
    os.environ.update(variables)
    payloads._POLLS_PER_TURN = 1000  # on a busy machine, too, each average is made once
    if first == 0:
        _wait_between_two_snapshots(url)
    begin, combine = time.monotonic(), settings.pop("combine", "gather")
    rendezvous = diloco.StoreRendezvous(
        url, name=name, poll_seconds=POLL_SECONDS, snapshot_rounds=SNAPSHOT_ROUNDS, **settings
    )
    model = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(NUM_FRAGMENTS))
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=[Fragment((str(p),)) for p in range(NUM_FRAGMENTS)],
        schedule=diloco.Schedule(sync_every=SYNC_EVERY, num_fragments=NUM_FRAGMENTS, overlap_steps=OVERLAP_STEPS),
        wire="e3m0",
        combine=combine,
        rendezvous=rendezvous,
    )
    generator, members = torch.Generator().manual_seed(sum(map(ord, name))), list[int]()
    before = _usage(rendezvous)
    if first == 0:
        before = dict.fromkeys(before, 0.0) | {"seconds": before["seconds"]}
    next_at = time.monotonic()
    late = next_at - begin - 2 * STEP_SECONDS * SYNC_EVERY if first == 0 else 0.0
    for step in range(1, last + 1):
        next_at += STEP_SECONDS
        time.sleep(max(0.0, next_at - time.monotonic()))
        late = max(late, time.monotonic() - next_at)
        with torch.no_grad():
            for parameter in model:
                parameter[:64] += 0.01 * torch.randn(64, generator=generator)
        taken = engine.step(tokens=64)
        members += [len(outer.cohort.members) for outer in taken if outer.cohort is not None]
        if step == first:
            next_at += SETTLE_SECONDS
            before, members = _usage(rendezvous), []
    after = _usage(rendezvous)
    rendezvous.leave()
    return {key: after[key] - before[key] for key in after} | {"members": members, "late": late}


def _wait_between_two_snapshots(url: str) -> None:
    """Wait until a round before half of those between the snapshots with the first index, or later ones."""
    store, deadline = Store.open(url), time.monotonic() + 60
    while not asyncio.run(store.list("index")):
        assert time.monotonic() < deadline, "no index is written"
        time.sleep(POLL_SECONDS)
    look = Look(url)
    while look.again().rounds[-1] % SNAPSHOT_ROUNDS != SNAPSHOT_ROUNDS // 2 - 1:
        assert time.monotonic() < deadline, "no further round is taken"
        time.sleep(POLL_SECONDS)


def _usage(rendezvous: diloco.StoreRendezvous) -> dict[str, float]:
    time.sleep(SETTLE_SECONDS)  # a snapshot may still be on its way
    store = rendezvous.store
    return {
        "creates": store.requests["create"] + store.requests["list"],
        "gets": store.requests["get"],
        "bytes_up": store.bytes_up,
        "bytes_down": store.bytes_down,
        "seconds": time.monotonic(),
    }
