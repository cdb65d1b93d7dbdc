"""Many versions, with kill -9 of the publisher and of a follower, and outages of the store, between.

A second follower, which is not killed, takes every version, one after another, and compares its bits.

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

NUM_VERSIONS = int(os.environ.get("NUM_VERSIONS", "20"))
NUM_KILLS = int(os.environ.get("NUM_KILLS", "3"))
SECONDS = 120.0 + NUM_VERSIONS


def state(number: int) -> dict[str, Tensor]:
    """The state of a version: a few cells differ from those of the one before."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(3000, generator=generator)
    for step in range(1, number + 1):
        weights[step * 7 % 3000 :: 50] *= 1 + step / 1000
    return {"weights": weights.bfloat16(), "step": torch.tensor(number)}


def publish(url: str, record: Path) -> None:
    """Publish; the second follower, and unless it was killed the first, has each version before the next comes."""
    with diloco.Follower(url, timeout_seconds=SECONDS) as follower:
        newest = follower.update()
    first = 0 if newest is None else newest.number + 1
    with diloco.Publisher(url, dtype=None, whole_every=10, keep=1, timeout_seconds=SECONDS) as publisher:
        for number in range(first, NUM_VERSIONS):
            assert number == 0 or _has(_checked(record), number - 1, seconds=SECONDS)
            assert publisher.publish(state(number), step=number).number == number
            _has(record, number, seconds=0.5)


def _checked(record: Path) -> Path:
    """The record of the second follower."""
    return record.with_suffix(".checked")


def _has(record: Path, number: int, *, seconds: float) -> bool:
    """Wait until a record has a version."""
    deadline = time.monotonic() + seconds
    while not (record.exists() and f"\n{number} " in f"\n{record.read_text()}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def check(url: str, record: Path) -> None:
    """Take each version from the one before it, by its difference, and compare all bits."""
    with diloco.Follower(url, timeout_seconds=SECONDS) as follower, _checked(record).open("a") as file:
        for number in range(NUM_VERSIONS):
            deadline = time.monotonic() + SECONDS
            while (version := follower._result(follower._chain.version, number)) is None:
                assert time.monotonic() < deadline, "the next version does not come"
                time.sleep(0.01)
            follower._result(follower._chain.take, version)
            held, expected = follower.state, state(number)
            assert follower.version == version and held.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(held[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            file.write(f"{number} {content_digest(dict(held))}\n")
            file.flush()


def follow(url: str, record: Path) -> None:
    with diloco.Follower(url, poll_seconds=0.02, timeout_seconds=SECONDS) as follower, record.open("a") as file:
        for version in follower:
            file.write(f"{version.number} {content_digest(dict(follower.state))}\n")
            file.flush()
            if version.number == NUM_VERSIONS - 1:
                return


@pytest.mark.slow
def test_every_version_has_its_bits_and_a_killed_follower_never_others(
    moto: Server, use_environment: Callable[..., None], tmp_path: Path
) -> None:
    url, record, draw = moto.new_url(), tmp_path / "record", random.Random(5)
    kills = 0
    with FaultProxy(moto.port) as proxy, ExitStack() as stack:
        use_environment(moto.through(proxy.url))

        def start(role: Callable[..., None]) -> Program:
            return stack.enter_context(program(role, url, record, folder=tmp_path))

        checker = start(check)
        running = {role: start(role) for role in (publish, follow)}
        for role in _turns(running):
            assert checker.process.exitcode in (None, 0), checker.wait(1)
            if kills >= NUM_KILLS:
                time.sleep(0.1)
                continue
            # On a fast machine, too, the last kill comes before the last versions.
            some_versions = NUM_VERSIONS * (kills + 1) // (NUM_KILLS + 2)
            _has(_checked(record), some_versions, seconds=draw.uniform(0.3, 1.0))
            if draw.random() < 0.3:
                proxy.set(outage=True)
                time.sleep(0.2)
                proxy.set()
            elif running[role].process.exitcode is None:
                os.kill(running[role].pid, signal.SIGKILL)
                running[role].process.join()
                running[role] = start(role)
                kills += 1
        checker.wait(SECONDS)
    expected = {str(number): content_digest(state(number)) for number in range(NUM_VERSIONS)}
    followed = [line.split() for line in record.read_text().splitlines()]
    assert all(digest == expected[number] for number, digest in followed)
    numbers = {int(number) for number, _ in followed}
    assert max(numbers) == NUM_VERSIONS - 1 and len(numbers) > NUM_VERSIONS / 2 and kills > 1
    assert dict(line.split() for line in _checked(record).read_text().splitlines()) == expected


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
