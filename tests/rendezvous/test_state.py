"""The active replicas, the slot that a joiner gets, and the payloads and joiners that are refused."""

import pytest
from tests.rendezvous.cases import AMOUNTS, Log

from diloco.rendezvous.log.entries import Close, Join, Leave
from diloco.rendezvous.log.run import Losses


def slots(log: Log) -> list[int]:
    return [member.slot for member in log.state.members]


def test_a_joiner_takes_a_free_slot_before_one_that_somebody_may_come_back_to():
    log = Log(num_fragments=1, num_slots=4).join("a", "b", "c")
    log.add(Leave(finished=False), 0)
    log.rounds(2, 2).join("d")
    assert slots(log) == [0, 1, 2, 3], "a has left and b is not active, but slot 3 was never held"
    log.join("e")
    assert slots(log)[-1] == 0 and log.state.members[0].fenced, "then that of a, which has left"
    log.join("f")
    assert slots(log)[-1] == 1 and log.state.members[1].fenced, "then that of b, which is not active"
    assert log.state.free_slot("g") is None
    assert "all 4 slots" in log.state.refusal_of_joiner(Join(name="g", key="", **AMOUNTS))


def test_a_name_gets_its_slot_again_where_the_log_stands():
    log = Log(num_fragments=1).join("a", "b").rounds(1, 1)
    log.outer(log.contribution(1, position=70))
    log.join("b")
    first, second = log.state.members[1:]
    assert (second.slot, second.start) == (first.slot, 70)
    assert first.fenced and 1 not in log.state.active


def test_a_replica_is_active_for_2p_outer_entries_after_its_join_or_contribution():
    log = Log(num_fragments=2).join("a", "b").rounds(3, 0)
    assert log.state.is_active(1)
    log.rounds(1, 0)
    assert not log.state.is_active(1)
    log.rounds(1, 0, 1)
    assert log.state.is_active(1)
    patient = Log(num_fragments=1, quorum="all").join("a", "b").rounds(9, 0, 1)
    assert patient.state.active == (0, 1)


def test_a_cohort_is_new_where_by_half_others_are_active_than_where_it_was_last():
    log = Log(num_fragments=1).join("a", "b")

    def is_new(*replicas: int) -> bool:
        log.rounds(1, *replicas)
        return log.state.fragments[0].since[-1].is_new

    assert not is_new(0, 1), "the first ones"
    log.join("c")
    assert not is_new(0, 1), "three are active"
    log.join("d")
    assert is_new(0) and not is_new(0, 1, 2, 3), "four are, whoever is counted"
    log.join("a", "b")
    assert not is_new(2, 3, 4, 5), "the same come back under other numbers"
    log.add(Leave(finished=False), 2)
    log.add(Leave(finished=False), 3)
    assert not is_new(4, 5), "half stay"
    log.add(Leave(finished=False), 4)
    assert is_new(5) and not is_new(5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replica": 9}, "has not joined"),
        ({"seq": 20}, "counted already"),
        ({"seq": 0}, "counted already"),
        ({"base_round": 13}, "still to come"),
        ({"base_round": 8}, "made against round 8"),
        ({"norm": 20.1}, "its norm is 20.1"),
        ({"position": 1 << 60}, "position"),
        ({"tokens": 1 << 39}, "it claims 549755813888 tokens in 1 steps, and a has declared 1000 per step at the"),
        ({"tokens": 2001, "steps": 2}, "2001 tokens in 2 steps"),
        ({"steps": 10**6 + 1}, "it claims 1000001 inner steps, and a has declared 1000000 at the most"),
        ({"position": 11 + 10**9}, "is not in the text from 0 to 1000000010"),
    ],
)
def test_a_payload_is_refused_with_the_reason(changes, reason):
    log = Log(num_fragments=2).join("a").rounds(12, 0)
    log.outer(log.contribution(0, 1, seq=20), fragment=1)
    assert log.state.refusal(0, log.contribution(0)) is None
    assert log.state.refusal(0, log.contribution(0, tokens=2000, steps=2, position=10 + 10**9)) is None
    assert reason in log.state.refusal(0, log.contribution(**({"replica": 0} | changes)))


def test_a_payload_may_be_max_stale_rounds_old_and_of_norm_bound_medians():
    log = Log(num_fragments=1, max_stale=3).join("a").rounds(12, 0)
    assert log.state.refusal(0, log.contribution(0, base_round=9, norm=20.0)) is None
    few = Log(num_fragments=1).join("a").rounds(7, 0)
    assert few.state.refusal(0, few.contribution(0, norm=1e9)) is None
    still = Log(num_fragments=1).join("a")
    for _ in range(9):
        still.outer(still.contribution(0, norm=0.0))
    assert still.state.refusal(0, still.contribution(0)) is None, "a median of 0 bounds nothing"


def test_payloads_of_who_left_count_and_of_who_was_fenced_do_not():
    log = Log(num_fragments=1).join("a", "b")
    log.add(Leave(finished=False), 1)
    assert log.state.refusal(0, log.contribution(1)) is None
    log.join("b")
    assert "was replaced" in log.state.refusal(0, log.contribution(1))


def test_joiners_are_refused_with_the_reason():
    run = Log(num_fragments=1, creator="0" * 64, allowed=("1" * 64, "2" * 64)).join("a", key="1" * 64)
    state = run.state
    assert "not on the run's allow-list" in state.refusal_of_joiner(Join(name="b", key="3" * 64, **AMOUNTS))
    assert "not on the run's allow-list" in state.refusal_of_joiner(Join(name="b", key="", **AMOUNTS))
    assert "another key" in state.refusal_of_joiner(Join(name="a", key="2" * 64, **AMOUNTS))
    assert state.refusal_of_joiner(Join(name="a", key="1" * 64, **AMOUNTS)) is None
    plain = Log(num_fragments=1).join("a")
    assert "without keys" in plain.state.refusal_of_joiner(Join(name="b", key="1" * 64, **AMOUNTS))
    greedy = {"step_tokens": 1 << 30, "most_steps": 1 << 11}
    assert "declares more tokens" in plain.state.refusal_of_joiner(Join(name="b", key="", **greedy))
    plain.add(Leave(finished=True), 0)
    assert plain.state.refusal_of_joiner(Join(name="b", key="", **AMOUNTS)) is None, "it may have to close the run"
    plain.add(Close(outer=("0" * 16,)), 0)
    assert "has ended" in plain.state.refusal_of_joiner(Join(name="b", key="", **AMOUNTS))


def test_the_training_losses_are_means_over_equally_many_outer_steps_in_bounded_room():
    log = Log(num_fragments=1).join("a", "b")
    for step in range(700):
        losses = (700.0 - step, None if step % 2 else 702.0 - step)
        log.outer(*(log.contribution(replica, loss=loss) for replica, loss in enumerate(losses)))
    curve = log.state.losses.curve(700)
    assert len(log.state.losses.parts) == 175, "four outer steps each, six told losses"
    assert curve[0] == (4, (4 * 700 - 6 + 2 * 702 - 2) / 6) and curve[-1][0] == 700
    last_35 = [loss for step in range(664, 700) for loss in (700.0 - step, 702.0 - step)[: 2 - step % 2]]
    assert log.state.losses.last(700) == sum(last_35) / len(last_35)


def test_without_losses_there_is_no_curve():
    log = Log(num_fragments=1).join("a").rounds(3, 0)
    assert log.state.losses.curve(3) == () and log.state.losses.last(3) is None
    assert Losses().last(0) is None
    log.outer(log.contribution(0, loss=2.5))
    assert log.rounds(5, 0).state.losses.last(9) == 2.5, "of the newest outer step that tells one"


def test_weights_are_by_tokens_or_by_tokens_squared_per_step():
    log = Log(num_fragments=1).join("a", "b")
    both = [log.contribution(0, tokens=100, steps=5), log.contribution(1, tokens=50, steps=1)]
    assert log.state.cohort(both).weights == (1.0, 0.5)
    squared = Log(num_fragments=1, weights="tokens_squared_per_step")
    assert squared.state.cohort(both).weights == (0.8, 1.0)


def test_a_run_begins_once_all_were_there_together_and_stays_begun():
    log = Log(num_fragments=1, num_replicas=2).join("a")
    log.add(Leave(finished=False), 0)
    assert not log.join("b").state.is_complete, "a has left before b came"
    assert log.join("c").state.is_complete
    assert log.add(Leave(finished=False), 1).is_complete, "a slow reader of the log does not wait for b"
