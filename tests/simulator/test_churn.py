"""Fleets that come and go: against the log's own state machine event by event, and against closed forms."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.simulator.exact_fleet import ExactFleet

from diloco.cli.main import main
from diloco.errors import UserError
from diloco.simulator.churn import in_store
from diloco.simulator.description import Stragglers
from diloco.simulator.fixed_members import WITH_MEMBERS, with_members
from diloco.simulator.fleet import FleetRun, Machines, read_fleet

HOME = Machines(name="home", count=6, step_seconds=1.0, up_mbit_s=20, down_mbit_s=200, latency_seconds=0.04)
RUN = FleetRun(machines=(HOME,), num_params=4e7, step_tokens=1, sync_every=40, num_fragments=2, overlap_steps=20)
FAST = replace(HOME, up_mbit_s=1e6, down_mbit_s=1e6, latency_seconds=0.0)


def fleet(run: FleetRun = RUN, /, *, num_fragments: int = 2, **changes) -> FleetRun:
    """The run with other machines."""
    kinds = tuple(replace(kind, **changes) for kind in run.machines)
    return replace(run, machines=kinds, num_fragments=num_fragments)


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        fleet(up_mbit_s=5),
        fleet(latency_seconds=0.4, step_seconds=0.4, up_mbit_s=100),
        replace(RUN, machines=(replace(HOME, count=3), replace(HOME, count=3, up_mbit_s=8))),
    ],
    ids=["plain", "slow uplinks", "far", "half of them slow"],
)
def test_outer_steps_are_those_of_the_logs_own_rules(run: FleetRun) -> None:
    exact = ExactFleet(run, num_outer_steps=40)
    outcome = in_store(run, num_outer_steps=40)
    assert outcome.contributors == pytest.approx(exact.contributors, rel=0.06)
    assert outcome.staleness == pytest.approx(np.mean(exact.stale), abs=0.08)
    assert outcome.seconds == pytest.approx(exact.now, rel=0.05)
    assert outcome.decided_seconds[0] == pytest.approx(np.median(exact.delays), rel=0.15)


@pytest.mark.slow
def test_late_replicas_and_the_others_do_not_take_turns() -> None:
    # They begin at different times. If those that were late decided as soon as a majority is there, each half
    # would leave out the other for ever: 9 of 16.
    run = replace(RUN, machines=(replace(HOME, count=16),), overlap_steps=12)
    exact = ExactFleet(run, num_outer_steps=50, spread=1.0, seed=1)
    counts = [len(body.contributions) for body in exact.bodies]
    assert counts[0] < 16 and np.mean(counts[20:]) > 13, counts


@pytest.mark.parametrize("shares", [16, 32])
def test_averages_take_their_time_of_the_downlink(shares: int) -> None:
    kind = replace(HOME, count=16, up_mbit_s=1e4, down_mbit_s=40)
    run = replace(RUN, machines=(kind,), num_params=1e9, sync_every=100, num_fragments=5, shares=shares)
    outcome = in_store(run, num_outer_steps=300)
    assert outcome.traffic is not None
    assert 8e-6 * outcome.traffic.bytes_down < 1.05 * 16 * 40 * outcome.seconds


def test_with_no_failures_and_endless_links_nothing_is_lost() -> None:
    run = fleet(RUN, **{name: getattr(FAST, name) for name in ("up_mbit_s", "down_mbit_s", "latency_seconds")})
    outcome = in_store(run, num_outer_steps=400)
    assert outcome.goodput == pytest.approx(1, abs=0.01) and outcome.contributors == 6 and outcome.staleness == 0
    assert all(with_members(run, m, seconds=1e5).goodput == pytest.approx(1, abs=1e-3) for m in WITH_MEMBERS)


@pytest.mark.slow
def test_failures_cost_the_time_of_repair() -> None:
    kind = replace(FAST, count=60, hours_between_failures=2, repair_seconds=600)
    run = replace(RUN, machines=(kind,), checkpoint_seconds=1e-9)
    outcome = in_store(run, num_outer_steps=4000)
    availability = 7200 / (7200 + 600 + run.join_seconds(kind))
    assert outcome.goodput == pytest.approx(availability, abs=0.01)


def test_no_work_counts_twice_though_a_late_payload_counts_after_its_machine_has_failed() -> None:
    often = replace(HOME, count=10, hours_between_failures=400 / 3600, repair_seconds=200, down_mbit_s=1e9)
    kinds = replace(often, up_mbit_s=1e5), replace(often, up_mbit_s=3.0)
    run = replace(RUN, machines=kinds, num_fragments=1, overlap_steps=5, checkpoint_seconds=1e-9)
    outcome = in_store(run, num_outer_steps=1000)
    assert outcome.staleness > 0.2 and 0 < outcome.lost < 0.01


def test_steps_that_vary_make_payloads_late_and_each_outer_step_counts_some() -> None:
    vary = fleet(stragglers=Stragglers(step_variation=3.0))
    assert in_store(vary, num_outer_steps=200).staleness > 0.1
    assert in_store(replace(fleet(up_mbit_s=3), max_stale=0), num_outer_steps=200).contributors > 2


def test_stalls_come_at_once_and_not_in_each_step() -> None:
    # Two of three stall for 60 s in every hundredth step: the third goes on without them after its patience.
    stalls = Stragglers(stall_probability=0.01, stall_seconds=60)
    alone = replace(HOME, count=1, name="alone")
    run = replace(RUN, machines=(alone, replace(HOME, count=2, stragglers=stalls)), num_fragments=1)
    outcome = in_store(run, num_outer_steps=400)
    even = replace(HOME, count=2, step_seconds=1.6)
    assert (
        outcome.decided_seconds[1]
        > 2 * in_store(replace(run, machines=(alone, even)), num_outer_steps=400).decided_seconds[1]
    )
    assert outcome.goodput == pytest.approx(1, abs=0.03), "all that they do counts"


def test_a_failure_loses_the_work_since_the_last_checkpoint() -> None:
    # Checkpoints every 10 s of a life, sends every 400 s: a life loses its remainder.
    kind = replace(FAST, count=40, hours_between_failures=0.5, repair_seconds=600)
    run = replace(RUN, machines=(kind,), sync_every=400, num_fragments=1, overlap_steps=20, checkpoint_seconds=900)
    goodput = in_store(run, num_outer_steps=500).goodput
    rare = in_store(replace(run, checkpoint_seconds=10), num_outer_steps=500).goodput
    # E min(unsent, since the checkpoint) is 200 s − 400²/5400 and 5 s, of 1,800 s up and 600 s down.
    assert rare - goodput == pytest.approx((200 - 400**2 / 5400 - 5) / (2400 + run.join_seconds(kind)), abs=0.02)


def test_machines_cost_while_they_run_and_each_its_own_price() -> None:
    kinds = (
        replace(FAST, count=20, hours_between_failures=1, repair_seconds=36_000, dollars_per_hour=1.0),
        replace(FAST, count=20, dollars_per_hour=9.0),
    )
    run = replace(RUN, machines=kinds)
    outcome = in_store(run, num_outer_steps=360)
    hours = outcome.seconds / 3600
    # Each of the first kind runs for an exponential time, and does not come back in these two hours.
    expected = 20 * 9.0 * hours + 20 * (1 - math.exp(-hours))
    assert outcome.machine_dollars == pytest.approx(expected, rel=0.03)
    for method in WITH_MEMBERS:
        assert with_members(run, method, seconds=outcome.seconds).machine_dollars == pytest.approx(
            expected, rel=0.03
        )


def test_who_is_left_alone_goes_on_though_it_was_slow() -> None:
    fast = replace(
        FAST, count=1, step_seconds=0.1, hours_between_failures=0.2, repair_seconds=1e6, notice_seconds=99
    )
    run = replace(RUN, machines=(fast, replace(FAST, count=1, step_seconds=30)), overlap_steps=5)
    # Then each outer step takes 20 steps of the slow one, and nobody waits for the fast one to come back.
    assert 600 * 500 < in_store(run, num_outer_steps=1000).seconds < 600 * 1000


def test_fixed_members_stop_at_each_failure_as_a_renewal_process_does() -> None:
    # One machine: cycles of an exponential time up, of which whole checkpoint intervals count, and a pause.
    kind = replace(FAST, count=1, hours_between_failures=1, repair_seconds=900)
    run = replace(RUN, machines=(kind,), checkpoint_seconds=600)
    pause = 900 + 30 + run.join_seconds(kind)
    kept = 600 / (math.exp(600 / 3600) - 1)  # E floor(X/c)·c
    # The time in which it loads is counted from the exponential time up.
    expected = math.exp(-(pause - 900) / 3600) * kept / (3600 + 900)
    assert with_members(run, "fixed", seconds=4e7).goodput == pytest.approx(expected, rel=0.03)


def test_a_quorum_that_is_never_there_ends_when_somebody_comes() -> None:
    run = replace(fleet(count=3, hours_between_failures=0.5, repair_seconds=600), quorum=3)
    outcome = in_store(run, num_outer_steps=200)
    assert outcome.num_outer_steps == 200 and outcome.goodput < 0.8
    with pytest.raises(
        UserError, match="after 0 outer steps no more follows: machines fail before they have sent"
    ):
        in_store(fleet(up_mbit_s=0.1, hours_between_failures=0.01), num_outer_steps=1)


def test_stores_traffic_is_that_of_the_bill() -> None:
    outcome = in_store(RUN, num_outer_steps=100)
    # An outer step is six payloads and an entry; every eighth of a fragment has a snapshot and its entry, too, and
    # of the first fragment an index and four listings.
    assert outcome.traffic is not None and outcome.traffic.creates == 100 * 7 + 100 / 8 * (2 + 5 / 2)
    snapshots = 100 / 8 * RUN.state_bytes / 2
    assert outcome.traffic.bytes_up == pytest.approx(600 * RUN.fragment_bytes + snapshots, rel=1e-3)


def test_the_command_prints_a_row_per_method_and_names_what_is_wrong(tmp_path: Path, capsys) -> None:
    path = tmp_path / "fleet.toml"
    text = (
        "num_params = 1e7\nstep_tokens = 8\nsync_every = 40\n[[machines]]\nname = 'a'\ncount = 2\n"
        "step_seconds = 1\nup_mbit_s = 20\ndown_mbit_s = 100\n"
    )
    path.write_text(text)
    main(["simulate", "fleet", str(path), "--outer-steps", "20", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == ["store", *WITH_MEMBERS]
    main(["simulate", "fleet", str(path), "--outer-steps", "20", "--regions", "2", "--picture", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "elastic-data-parallel" in printed and "regions" in printed and str(tmp_path / "fleet.png") in printed
    assert "store: R2" in printed
    assert (tmp_path / "fleet.png").stat().st_size > 10_000
    for wrong, message in {
        "sync_every = 4\n": "overlap_steps=5 must be at least 0 and below sync_every=4",
        "sync_evry = 40\n": "sync_evry",
        "checkpoint_seconds = 0\n": "checkpoint_seconds must be above 0",
        "patience = -1\n": "patience must be at least 0",
    }.items():
        path.write_text(text.replace("sync_every = 40\n", wrong))
        with pytest.raises(UserError, match=message):
            read_fleet(path)
    with pytest.raises(UserError, match="up_mbit_s of home must be above 0, not 0"):
        replace(HOME, up_mbit_s=0)
    with pytest.raises(UserError, match="step_seconds of home must be above 0 and finite, not inf"):
        replace(HOME, step_seconds=math.inf)
