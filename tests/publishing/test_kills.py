"""Many versions, with kill -9 of the publisher and of the follower, and outages of the store, between.

NUM_VERSIONS=200 NUM_KILLS=12 pytest tests/publishing/test_kills.py    # about a minute
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.fault_proxy import FaultProxy
from tests.processes import Program, program
from tests.servers import Server
from torch import Tensor

import diloco
from diloco.publishing.differences import content_digest

NUM_VERSIONS = int(os.environ.get("NUM_VERSIONS", "40"))
NUM_KILLS = int(os.environ.get("NUM_KILLS", "4"))
SECONDS = 120.0


def state(number: int) -> dict[str, Tensor]:
    """The state of a version: a few cells differ from those of the one before."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(3000, generator=generator)
    for step in range(1, number + 1):
        weights[step * 7 % 3000 :: 50] *= 1 + step / 1000
    return {"weights": weights.bfloat16(), "step": torch.tensor(number)}


def publish(url: str, record: Path) -> None:
    """Publish; the follower, unless it was killed, has each version before the next one comes."""
    with diloco.Follower(url, timeout_seconds=SECONDS) as follower:
        newest = follower.update()
    first = 0 if newest is None else newest.number + 1
    with diloco.Publisher(url, dtype=None, whole_every=10, keep=1, timeout_seconds=SECONDS) as publisher:
        for number in range(first, NUM_VERSIONS):
            assert publisher.publish(state(number), step=number).number == number
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline and not _has(record, number):
                time.sleep(0.005)


def _has(record: Path, number: int) -> bool:
    return record.exists() and f"\n{number} " in f"\n{record.read_text()}"


def follow(url: str, record: Path) -> None:
    with diloco.Follower(url, poll_seconds=0.02, timeout_seconds=SECONDS) as follower, record.open("a") as file:
        for version in follower:
            file.write(f"{version.number} {content_digest(dict(follower.state))}\n")
            file.flush()
            if version.number == NUM_VERSIONS - 1:
                return


@pytest.mark.slow
def test_a_follower_never_has_other_bits(
    moto: Server, use_environment: Callable[..., None], tmp_path: Path
) -> None:
    url, record, draw = moto.new_url(), tmp_path / "record", random.Random(5)
    kills = 0
    with FaultProxy(moto.port) as proxy, ExitStack() as stack:
        use_environment(moto.through(proxy.url))

        def start(role: Callable[..., None]) -> Program:
            return stack.enter_context(program(role, url, record, folder=tmp_path))

        running = {role: start(role) for role in (publish, follow)}
        for role in _turns(running):
            time.sleep(draw.uniform(0.3, 1.0))
            if kills >= NUM_KILLS:
                continue
            if draw.random() < 0.3:
                proxy.set(outage=True)
                time.sleep(0.2)
                proxy.set()
            elif running[role].process.exitcode is None:
                os.kill(running[role].pid, signal.SIGKILL)
                running[role].process.join()
                running[role] = start(role)
                kills += 1
    lines = [line.split() for line in record.read_text().splitlines()]
    expected = {number: content_digest(state(number)) for number in range(NUM_VERSIONS)}
    assert all(digest == expected[int(number)] for number, digest in lines)
    numbers = {int(number) for number, _ in lines}
    assert max(numbers) == NUM_VERSIONS - 1 and len(numbers) > NUM_VERSIONS / 2 and kills > 1


def _turns(running: dict[Callable[..., None], Program]) -> Iterator[Callable[..., None]]:
    """The role whose turn it is to be killed, until both have ended by themselves."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for role in running:
            codes = {role: one.process.exitcode for role, one in running.items()}
            assert not any(codes.values()), running[role].wait(1)
            if set(codes.values()) == {0}:
                return
            yield role
    raise AssertionError("the versions did not come in time")
