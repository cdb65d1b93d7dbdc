"""The model of a store's bill, beside the requests and bytes that real replicas count."""

from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from tests.fleets.cost_replica import (
    ELEMENTS,
    NUM_FRAGMENTS,
    OVERLAP_STEPS,
    POLL_SECONDS,
    SNAPSHOT_ROUNDS,
    STEP_SECONDS,
    SYNC_EVERY,
    live,
)
from tests.servers import Server

from diloco.rendezvous.prices import Traffic, longest_poll, run_traffic
from diloco.wire.formats import parse

FIRST = 2 * SYNC_EVERY + SYNC_EVERY // NUM_FRAGMENTS - 1
"""The step before a send: what was sent one send ago has arrived, and counts with its own outer step."""
ROUND_TRIP_SECONDS = 0.003
"""A request's, in SeaweedFS on this machine."""


CASES = {"shares": (3, 0), "gather, and a joiner": (1, 1)}
"""Number of shares, and of replicas that join when three have begun."""


def _counted(server: Server) -> dict[str, list[dict[str, Any]]]:
    """The requests that the replicas of each case count, measured anew where the machine was too busy."""
    with ProcessPoolExecutor(7, mp_context=get_context("forkserver")) as processes:
        for _ in range(3):
            runs = {case: _replicas(processes, server, *numbers) for case, numbers in CASES.items()}
            counted = {case: [answer.result() for answer in answers] for case, answers in runs.items()}
            is_slow = max(one["late"] for answers in counted.values() for one in answers) > POLL_SECONDS / 2
            if not is_slow and all(map(_has_all_steps, CASES.values(), counted.values())):
                return counted
    pytest.skip("this machine is too busy: steps of 50 ms come late, and payloads with them")


def _has_all_steps(numbers: tuple[int, int], answers: list[dict[str, Any]]) -> bool:
    """True if no outer step came later than the steps in which requests are counted."""
    return len(answers[0]["members"]) == NUM_FRAGMENTS * (8 + 8 * numbers[1])


@pytest.mark.slow
def test_requests_and_bytes_are_within_5_percent_of_those_that_replicas_count(seaweedfs: Server) -> None:
    counted = _counted(seaweedfs)
    for case, (num_shares, joins) in CASES.items():
        sums = {name: sum(one[name] for one in counted[case]) for name in Traffic.__dataclass_fields__}
        members = Counter(counted[case][0]["members"])
        assert (joins > 0) == (4 in members)
        alone, together = counted[case][0]["seconds"], sum(one["seconds"] for one in counted[case][3:])
        expected = _expected(members, {3: alone - together, 4: together}, num_shares, joins)
        assert sums == {name: pytest.approx(value, rel=0.05) for name, value in vars(expected).items()}, case


def _replicas(
    processes: ProcessPoolExecutor, server: Server, num_shares: int, joins: int
) -> "list[Future[dict[str, Any]]]":
    """The answers of the replicas of a run."""
    url, settings = server.new_url(), dict[str, Any](num_replicas=3)
    if num_shares > 1:
        settings |= {"combine": "reduce_scatter", "num_shares": num_shares}
    lives = [(f"r{m}", FIRST, FIRST + (8 + 8 * joins) * SYNC_EVERY) for m in range(3)]
    lives += [(f"joiner{m}", 0, 4 * SYNC_EVERY) for m in range(joins)]
    return [processes.submit(live, url, *one, server.environment, **settings) for one in lives]


def _expected(members: "Counter[int]", seconds: dict[int, float], num_shares: int, joins: int) -> Traffic:
    """The traffic of as many outer steps, and seconds, with each number of replicas."""
    expected = Traffic(creates=0, gets=0, bytes_up=0, bytes_down=0)
    for num_replicas, num_steps in members.items():
        expected += run_traffic(
            num_replicas=num_replicas,
            num_fragments=NUM_FRAGMENTS,
            num_payloads=num_replicas * num_steps,
            num_steps=num_steps,
            payload_bytes=num_shares * parse("e3m0").payload_bytes(-(-ELEMENTS // num_shares)),
            num_shares=num_shares,
            num_joins=joins if num_replicas > 3 else 0,
            state_bytes=8 * NUM_FRAGMENTS * ELEMENTS,
            snapshot_rounds=SNAPSHOT_ROUNDS,
            seconds=seconds[num_replicas],
            poll_seconds=POLL_SECONDS,
            longest_seconds=longest_poll(POLL_SECONDS, OVERLAP_STEPS * STEP_SECONDS),
            round_trip_seconds=ROUND_TRIP_SECONDS,
        )
    return expected
