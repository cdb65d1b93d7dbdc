import os
import random
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.processes import run_replicas, wait_for_end, wait_for_files

import diloco
from diloco.errors import DisagreementError, ExchangeError
from diloco.exchange import process_group as gloo
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.exchange.transport import Channel, LoopbackExchange, Tag, Transport, agree, share

KEYS = list(product((0, 1, 40), (1, 90_000), (0, 1)))
"""(fragment, round, phase) of exchanges that are in flight together."""
LENGTHS = dict(zip(KEYS, (1, 100_003, 7, 300_000, 513, 7) * 2, strict=True))
"""The length of their payloads."""


def payload_tag(fragment: int, round: int, phase: int = 0) -> Tag:
    return Tag(Channel.PAYLOAD, fragment, round, phase)


def content(key: tuple[int, int, int], sender: int, receiver: int, length: int) -> torch.Tensor:
    """The bytes that `sender` sends to `receiver`, which no other message holds."""
    return torch.from_numpy(np.random.default_rng((*key, sender, receiver)).integers(0, 256, length, np.uint8))


def payloads(exchange: Transport, key: tuple[int, int, int], length: int) -> dict[int, torch.Tensor]:
    others = set(range(exchange.num_replicas)) - {exchange.replica}
    return {replica: content(key, exchange.replica, replica, length) for replica in others}


def assert_delivered(exchange: Transport, key: tuple[int, int, int], received: dict, length: int) -> None:
    assert set(received) == set(range(exchange.num_replicas)) - {exchange.replica}
    for replica, payload in received.items():
        assert torch.equal(payload, content(key, replica, exchange.replica, length)), (key, replica)


def exchange_out_of_order(num_connections: int, lengths: dict[tuple[int, int, int], int]) -> set[int]:
    """Start and wait in another order on each replica; the replicas that have answered."""
    exchange = any_exchange(20, num_connections=num_connections)
    shuffle = random.Random(exchange.replica)
    starts, waits = (shuffle.sample(list(lengths), len(lengths)) for _ in range(2))
    pending = {key: exchange.start(payloads(exchange, key, lengths[key]), payload_tag(*key)) for key in starts}
    for key in waits:
        assert_delivered(exchange, key, pending[key].wait(), lengths[key])
    exchange.close()
    return set(exchange.answers.heard_at)


def any_exchange(timeout_seconds: float, **arguments: int) -> Transport:
    """Over the process group, or, without one, by address."""
    make = ProcessGroupExchange if dist.is_initialized() else diloco.connect
    return make(timeout_seconds=timeout_seconds, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("num_connections", [1, 2])
def test_exchanges_in_flight_together_arrive_whole_in_whatever_order(num_connections):
    assert run_replicas(exchange_out_of_order, 3, num_connections, LENGTHS) == [{1, 2}, {0, 2}, {0, 1}]


def connections_of(num_connections: int) -> tuple[int, list[int], list[int]]:
    """The number of connections between two replicas, and the sizes of the chunks of a payload."""
    before = _tcp_connections()
    exchange = ProcessGroupExchange(timeout_seconds=20, num_connections=num_connections)
    share(exchange, "all have connected")
    largest = _tcp_connections() - before
    large, small = (
        [chunk.numel() for _, chunk in gloo._chunks(torch.zeros(n), exchange._backends)] for n in (300_001, 65_537)
    )
    exchange.close()
    exchange.close()
    deadline = time.monotonic() + 5
    while _tcp_connections() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _tcp_connections() <= before + 1, "the first connection is the group's"
    return largest, large, small


def _tcp_connections() -> int:
    """Established ones of this process, listed by the kernel."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            mine.add(str(link.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in mine for row in rows)


def test_a_large_payload_goes_out_over_several_connections():
    (_, whole, _), (several, chunks, small) = (run_replicas(connections_of, 2, n)[0] for n in (1, 3))
    assert (whole, chunks, small) == ([300_001], [100_001, 100_000, 100_000], [65_537])
    assert several >= 2, "besides the first, which was there before"


def connect_differently() -> str:
    """The first replica asks for one connection, and then compares settings, as an engine does."""
    with pytest.raises(DisagreementError) as caught:
        if dist.get_rank() == 0:
            agree(ProcessGroupExchange(timeout_seconds=20), {"sync_every": 30})
        else:
            ProcessGroupExchange(timeout_seconds=20, num_connections=2)
    return str(caught.value)


def test_replicas_that_ask_for_other_numbers_of_connections_are_told_so():
    for message in run_replicas(connect_differently, 2):
        assert "sync_every" in message or "num_connections" in message


def test_more_fragments_than_a_group_can_tell_apart_are_refused():
    tags = [
        Tag(channel, fragment, number, phase)
        for channel in Channel
        for fragment in (0, 1, 2047)
        for number in (0, 1, 2**17 - 1)
        for phase in (0, 1)
    ]
    assert len({gloo.tag_bits(tag) for tag in tags}) == len(tags)
    assert all(0 <= gloo.tag_bits(tag) < 2**31 for tag in tags)
    with pytest.raises(ValueError, match="fragment 2048 is one too many: cut at most 2048"):
        gloo.tag_bits(payload_tag(2048, 1))


def exchange_within(ranks: list[int]):
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        exchange = ProcessGroupExchange(group, timeout_seconds=20)
        assert (exchange.replica, exchange.num_replicas) == (ranks.index(dist.get_rank()), len(ranks))
        assert_delivered(
            exchange, (1, 1, 0), exchange.start(payloads(exchange, (1, 1, 0), 7), payload_tag(1, 1)).wait(), 7
        )


def test_replicas_are_counted_within_their_group():
    run_replicas(exchange_within, 3, [1, 2])


def start_before_a_late_peer(folder: str) -> None:
    """The second replica is so late that the first one's start has returned."""
    exchange = ProcessGroupExchange(timeout_seconds=20)
    dist.barrier()
    if exchange.replica == 1:
        wait_for_files(Path(folder, "has started"))
    pending = exchange.start(payloads(exchange, (0, 90_000, 1), 9), payload_tag(0, 90_000, 1))
    Path(folder, "has started").touch()
    assert_delivered(exchange, (0, 90_000, 1), pending.wait(), 9)


def test_start_returns_at_once_while_a_peer_is_late(tmp_path):
    run_replicas(start_before_a_late_peer, 2, str(tmp_path))


HELD: list[object] = []
"""Exchanges that stay until their process ends."""


def wait_in_vain(absent: int, ending: str, folder: str) -> tuple[str, tuple[int, ...]] | None:
    """The error of a wait for a replica that is silent, or has died, or dies when the others wait."""
    exchange = any_exchange(20)
    pids = share(exchange, os.getpid(), int)
    if exchange.replica == absent:
        HELD.append(exchange)
        if ending == "silent":
            return None
        if ending == "dies meanwhile":
            wait_for_files(*(Path(folder, str(other)) for other in range(3) if other != absent))
        os._exit(1)
    exchange._timeout_seconds = 0.5 if ending == "silent" else 600
    gloo._SECONDS_FOR_THE_CAUSE = 0.1  # nobody posts one
    if ending == "dies before":
        wait_for_end(pids[absent])
    pending = exchange.start(payloads(exchange, (40, 90_000, 1), 9), payload_tag(40, 90_000, 1))
    Path(folder, str(exchange.replica)).touch()
    with pytest.raises(ExchangeError) as caught:
        pending.wait()
    return str(caught.value), caught.value.missing


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("ending", ["silent", "dies meanwhile", "dies before"])
def test_an_absent_replica_is_named_within_the_time_limit(absent, ending, tmp_path):
    assert_named(absent, run_replicas(wait_in_vain, 3, absent, ending, str(tmp_path), mortal=(absent,)))


def assert_named(absent: int, results: list[tuple[str, tuple[int, ...]]]) -> None:
    for replica in {0, 1, 2} - {absent}:
        message, missing = results[replica]
        assert "fragment 40, round 90000" in message
        assert f"replica {absent}" in message and missing == (absent,)


def wait_again_in_vain() -> None:
    gloo._SECONDS_FOR_THE_CAUSE = 0.1
    exchange = ProcessGroupExchange(timeout_seconds=0.3)
    if exchange.replica == 0:
        pending = exchange.start(payloads(exchange, (0, 1, 0), 9), payload_tag(0, 1))
        for _ in range(2):
            with pytest.raises(ExchangeError, match="replica 1"):
                pending.wait()


def test_waiting_again_for_an_absent_replica_fails_again():
    run_replicas(wait_again_in_vain, 2)


def facts_of(replica: int, odd_one: int, differing: dict[str, object]) -> dict[str, object]:
    return {"sync_every": 30, "wire": "e3m0", "offsets": [0, 1]} | (differing if replica == odd_one else {})


def disagree(cases: list[tuple[int, dict[str, object]]]) -> list[str]:
    exchange = ProcessGroupExchange(timeout_seconds=20)
    agree(exchange, facts_of(exchange.replica, 0, {}))
    messages = []
    for odd_one, differing in cases:
        with pytest.raises(DisagreementError) as caught:
            agree(exchange, facts_of(exchange.replica, odd_one, differing))
        messages.append(str(caught.value))
    agree(exchange, facts_of(exchange.replica, 0, {}))
    return messages


def test_a_disagreement_is_raised_on_every_replica_with_the_name_and_both_values():
    cases = [(2, {"sync_every": 31}), (0, {"wire": "bf16"}), (1, {"offsets": None}), (1, {"seed": "5" * 3000})]
    expected = [
        "sync_every: replica 0 has 30, replica 2 has 31",
        'wire: replica 0 has "bf16", replica 1 has "e3m0"',
        "offsets: replica 0 has [0, 1], replica 1 has null",
        'seed: replica 0 has nothing of the kind, replica 1 has "555',
    ]
    for messages in run_replicas(disagree, 3, cases):
        for message, part in zip(messages, expected, strict=True):
            assert f"disagree on {part}" in message and len(message) < 400


def share_something() -> list[object]:
    exchange = ProcessGroupExchange(timeout_seconds=20)
    return share(exchange, {"replica": exchange.replica, "name": "é" * 50 * exchange.replica})


def test_values_are_shared_in_replica_order():
    expected = [{"replica": replica, "name": "é" * 50 * replica} for replica in range(3)]
    assert run_replicas(share_something, 3) == [expected] * 3


def test_a_replica_alone_exchanges_with_nobody():
    exchange = LoopbackExchange()
    assert (exchange.replica, exchange.num_replicas) == (0, 1)
    assert exchange.start({}, payload_tag(0, 1)).wait() == {}
    agree(exchange, {"sync_every": 30})
    assert share(exchange, 30) == [30]
