"""Two levels of stores: against one level where they are alike, and against counts by hand."""

import math
from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.simulator.churn import expected, in_regions, in_store
from diloco.simulator.fleet import FleetRun, Machines

HOME = Machines(name="home", count=24, step_seconds=1.0, up_mbit_s=20, down_mbit_s=200, latency_seconds=0.04)
RUN = FleetRun(machines=(HOME,), num_params=4e7, step_tokens=64, sync_every=40, num_fragments=2, overlap_steps=20)


def test_without_failures_every_replica_counts_once_per_exchange() -> None:
    outcome = in_regions(RUN, num_regions=4, num_outer_steps=200)
    assert outcome.contributors == 24 and outcome.staleness == 0
    assert outcome.goodput == pytest.approx(1, abs=0.02)
    assert outcome.tokens_per_hour == pytest.approx(24 * 64 * 3600, rel=0.02)


def test_machines_of_several_kinds_are_dealt_to_all_regions() -> None:
    kinds = tuple(replace(HOME, name=str(count), count=count) for count in (1, 1, 3, 1))
    outcome = in_regions(replace(RUN, machines=kinds), num_regions=6, num_outer_steps=40)
    assert outcome.contributors == 6, "one machine per region"


def test_traffic_is_that_of_all_stores() -> None:
    outcome = in_regions(RUN, num_regions=4, num_outer_steps=200)
    assert outcome.traffic is not None
    fragments = outcome.traffic.bytes_down / RUN.fragment_bytes
    per_round = fragments / 200
    # In each of 4 regions of 6 all read each other's, a bridge all; between them 4 do; 6 of each read shifts.
    assert per_round == pytest.approx(4 * 6 * 6 + 4 * 3 + 4 * 6, rel=0.03)


def test_exchanges_further_apart_send_less_between_regions() -> None:
    near, far = (in_regions(RUN, num_regions=4, num_outer_steps=400, rounds_apart=k) for k in (1, 4))
    assert near.traffic is not None and far.traffic is not None
    between = (4 * 3 + 4 * 6) * RUN.fragment_bytes * 3600
    an_hour = [outcome.traffic.bytes_down * 3600 / outcome.seconds for outcome in (near, far)]
    assert an_hour[0] - an_hour[1] == pytest.approx(between * (1 - 1 / 4) / 20, rel=0.1)  # a fragment in 20 s


def test_machines_of_each_kind_are_dealt_evenly_and_fail_in_their_regions() -> None:
    spot = replace(HOME, name="spot", count=10, step_seconds=2.0, hours_between_failures=2, repair_seconds=600)
    run = replace(RUN, machines=(HOME, spot), checkpoint_seconds=1e-9)
    outcome = in_regions(run, num_regions=4, num_outer_steps=400)
    one_level = in_store(run, num_outer_steps=400)
    assert outcome.goodput == pytest.approx(one_level.goodput, abs=0.03)
    with pytest.raises(UserError, match="num_regions=99 must be at least 1, and at most 34"):
        in_regions(run, num_regions=99, num_outer_steps=1)


@pytest.mark.parametrize("hours", [1.0, 6.0])
def test_closed_form_is_near_the_simulation(hours: float) -> None:
    kind = replace(HOME, count=60, hours_between_failures=hours, repair_seconds=600, down_mbit_s=1e4)
    run = replace(RUN, machines=(kind,), sync_every=200, checkpoint_seconds=600)
    outcome = in_store(run, num_outer_steps=1000)
    goodput, contributors = expected(run)
    assert outcome.goodput == pytest.approx(goodput, abs=0.015)
    assert outcome.contributors == pytest.approx(contributors, rel=0.06)


def test_gather_counts_as_many_as_a_downlink_takes() -> None:
    slow = replace(RUN, machines=(replace(HOME, count=200, down_mbit_s=40),))
    goodput, contributors = expected(slow)
    assert math.isnan(goodput) and contributors == 1 + 60 / 4  # τ + patience, of which an outer gradient takes 4 s
    assert in_store(slow, num_outer_steps=200).contributors == pytest.approx(contributors, rel=0.15)
