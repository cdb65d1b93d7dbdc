"""The processes of one replica: what the first says reaches the others, and what goes wrong anywhere ends all."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas

from diloco.engine.elastic_shards import Call, LedGroup
from diloco.errors import ExchangeError
from diloco.exchange.process_group import group_like

S = 3


def led_group() -> LedGroup:
    group = dist.group.WORLD
    assert group is not None
    return LedGroup(group_like(group, 20), 20)


def exchange_vectors() -> list[float]:
    """The vectors of all, of lengths 0, 1 and 2, in the first process; and ten times their own in the others."""
    ours = led_group()
    own_n = torch.arange(ours.index) + 100.0 * ours.index
    ours.meet(Call.GATHER, 7)
    if not ours.is_first:
        ours.send(own_n, 0)
        assert ours.follow(Call.STATE).value == {"is": ["for", "all"]}
        return ours.receive(0, ours.index).tolist()
    received = [ours.receive(index, index) for index in range(1, S)]
    ours.lead(Call.STATE, value={"is": ["for", "all"]})
    for index, vector_n in enumerate(received, 1):
        ours.send(10 * vector_n, index)
    return torch.cat(received).tolist()


def test_vectors_and_values_go_to_the_first_process_and_back():
    assert run_replicas(exchange_vectors, S) == [[100, 200, 201], [1000], [2000, 2010]]


def fail(who: int) -> tuple[str, float]:
    """One process fails while the first gathers; the end of each, and how long it took."""
    ours, start = led_group(), time.monotonic()
    try:
        with ours.fail_together():
            ours.meet(Call.GATHER)
            if ours.index == who:
                raise ValueError("no room")
            if ours.is_first:
                for index in range(1, S):
                    ours.receive(index, 1)
            else:
                ours.send(torch.zeros(1), 0)
                ours.follow(Call.DONE)
    except (ExchangeError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("who", range(S))
def test_a_failure_reaches_every_process_with_its_reason(who: int):
    ends = run_replicas(fail, S, who)
    for index, (message, seconds) in enumerate(ends):
        assert message == ("no room" if index == who else f"process {who} of this replica failed: no room")
        assert seconds < 10, "not the 20 s of a wait"


def be_killed(who: int) -> str:
    ours = led_group()
    ours.meet(Call.GATHER)
    if ours.index == who:
        if ours.is_first:
            ours.receive(1, 1)  # so that the other's connections stand
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ExchangeError) as caught, ours.fail_together():
        if ours.is_first:
            ours.receive(1, 1)
        else:
            ours.send(torch.zeros(1), 0)
            ours.follow(Call.DONE)
    return str(caught.value)


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_is_killed_ends_the_waits_of_the_others(who: int):
    ends = run_replicas(be_killed, 2, who, mortal=(who,))
    assert ends[1 - who].startswith(f"process {who} of this replica does not answer: ")


def wait_in_vain() -> tuple[str, float]:
    ours, start = led_group(), time.monotonic()
    ours._timeout_seconds = 0.5
    if ours.is_first:
        return "", 0.0  # and its process stays
    with pytest.raises(ExchangeError) as caught:
        ours.follow(Call.DONE)
    return str(caught.value), time.monotonic() - start


def test_a_wait_is_bounded():
    _, (message, seconds) = run_replicas(wait_in_vain, 2)
    assert message.startswith("process 0 of this replica does not answer: ") and 0.4 < seconds < 10


def do_different_things() -> str:
    ours = led_group()
    if ours.is_first:
        ours.lead(Call.FINISH)
        return ""
    with pytest.raises(ExchangeError) as caught:
        ours.follow(Call.STEP, Call.IDLE)
    return str(caught.value)


def test_processes_that_do_different_things_are_told_so():
    assert run_replicas(do_different_things, 2)[1] == (
        "the first process of this replica is at FINISH, and process 1 at STEP or IDLE: let all of them call the "
        "engine's methods in the same order, and take the same number of steps"
    )
