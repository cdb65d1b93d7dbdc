"""Real processes that come, go, die and stop: the survivors go on, and the log tells what was trained."""

import numpy as np
import pytest
from tests.processes import run_replicas
from tests.rendezvous.replay import Replayed, replayed
from tests.rendezvous.replicas import Outcome, P, Plan, live, theta0


def lives(tmp_path, *plans: Plan, **settings) -> tuple[list[Outcome | None], Replayed]:
    """The ends of the replicas, and the run."""
    for plan in plans:
        # Nothing is deleted: the replay reads all.
        plan.settings.update({"snapshot_rounds": 1000} | settings | plan.settings)
    mortal = [i for i, plan in enumerate(plans) if plan.kill_at]
    outcomes = run_replicas(live, len(plans), str(tmp_path), list(plans), joined=False, mortal=mortal)
    run = replayed(tmp_path / "run", theta0())
    for outcome in outcomes:
        if outcome is not None:
            for p, (number, outer) in enumerate(zip(outcome.rounds, outcome.outer, strict=True)):
                np.testing.assert_array_equal(outer, run.outer[p][number])
    return outcomes, run


def numbers(run: Replayed, replica: int) -> list[int]:
    """The places in the log's order of the contributions of one replica."""
    return [i for i, c in enumerate(run.contributions) if c["replica"] == replica]


@pytest.mark.slow
def test_with_a_quorum_of_two_no_outer_step_counts_one_replica_while_one_is_stopped_and_one_is_slow(tmp_path):
    outcomes, run = lives(
        tmp_path,
        Plan(name="stopper", stops=("stopped", 20), lively=("stopper", "slow"), num_steps=60),
        Plan(name="stopped", num_steps=60),
        Plan(name="slow", num_steps=120, step_seconds=0.02),  # the last: two that end at once may wait in vain
        num_replicas=3,
        quorum=2,
        patience=1,  # which is no end of the wait for two
        max_stale=1000,
        mixing="taylor",
    )
    assert all(outcome is not None and outcome.failure is None for outcome in outcomes)
    assert all(numbers(run, outcome.replica) for outcome in outcomes), "each was counted"
    num_active, counts = 0, []
    for entry in run.entries:
        num_active += {"join": 1, "leave": -1}.get(entry["kind"], 0)
        if entry["kind"] == "outer":
            counts.append((len(entry["body"]["contributions"]), num_active))
    assert all(count >= min(2, num_active) for count, num_active in counts)
    assert {2, 3} <= {count for count, num_active in counts if num_active == 3}


@pytest.mark.slow
def test_survivors_go_on_when_one_is_killed_one_stops_one_is_slow_and_one_joins(tmp_path) -> None:
    lively = ("stopper", "slow", "joiner")
    outcomes, run = lives(
        tmp_path,
        Plan(name="stopper", stops=("stopped", 30), lively=lively, clock_hours=-1000.0),
        Plan(name="stopped"),
        Plan(name="killed", kill_at=40, settings={"overlap_steps": 1}),
        Plan(name="slow", num_steps=50, step_seconds=0.01),
        Plan(name="joiner", num_steps=60, from_entry=12, tokens=24, clock_hours=5.0),
        num_replicas=4,  # all but the joiner
        max_stale=1000,  # whoever pauses is counted later
    )
    names = [e["body"]["name"] for e in run.entries if e["kind"] == "join"]
    assert outcomes[2] is None
    for outcome in (outcomes[i] for i in (0, 1, 3, 4)):
        assert outcome is not None and outcome.failure is None
        assert numbers(run, outcome.replica), f"{names[outcome.replica]} was never counted"
        assert outcome is outcomes[1] or outcome.counted_steps == outcome.sent_steps, "what was sent was counted"
    killed = names.index("killed")
    for c in run.contributions:
        per_step = 24 if names[c["replica"]] == "joiner" else 8
        assert c["tokens"] == per_step * c["steps"]
    assert numbers(run, killed)[-1] < len(run.contributions) - 6, "the others went on"
    slow, steady = (names.index(name) for name in ("slow", "stopper"))
    assert sum(run.contributions[i]["steps"] for i in numbers(run, slow)) <= 3 * 50
    num_counted = sum(run.contributions[i]["steps"] for i in numbers(run, steady))
    assert outcomes[0] is not None and outcomes[0].num_steps >= 90
    assert num_counted == pytest.approx(3 * (outcomes[0].num_steps - outcomes[0].uncounted_tokens / 8))
    parts = [run.contributions[i] for i in numbers(run, steady)]
    assert all(sum(c["steps"] for c in parts if c["fragment"] == p) >= 60 for p in range(P))
