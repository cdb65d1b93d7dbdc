"""The replicas that may write an outer entry, the time of that, and the contributions that it counts."""

from dataclasses import replace

import pytest
from tests.rendezvous.cases import Log

from diloco.errors import DisagreementError
from diloco.rendezvous.contract import Offer
from diloco.rendezvous.deciding import Decider, Pace, may_decide, of_the_run, turns
from diloco.rendezvous.log.entries import Claim, Leave


def decided(log: Log, *replicas: int, own: int = 0, overlap_over: bool = False, patience_over: bool = False):
    """The replicas that are counted, if `own` may decide with the payloads of some."""
    here = {replica: log.contribution(replica) for replica in replicas}
    chosen = may_decide(log.state, 0, here, own, overlap_over=overlap_over, patience_over=patience_over)
    return chosen and [contribution.replica for contribution in chosen]


def test_all_decide_at_once_a_majority_after_the_overlap_and_whoever_is_there_after_the_patience():
    log = Log(num_fragments=1).join("a", "b", "c")
    assert decided(log, 2, 0, 1) == [0, 1, 2]
    assert decided(log, 0, 1) is None
    assert decided(log, 0, 1, overlap_over=True) == [0, 1]
    assert decided(log, 0, overlap_over=True) is None, "one of three is no majority"
    assert decided(log, 0, overlap_over=True, patience_over=True) == [0]
    half = Log(num_fragments=1).join("a", "b")
    assert decided(half, 0, overlap_over=True) is None, "half is no majority"


def test_nobody_decides_without_an_own_payload_or_after_leaving():
    log = Log(num_fragments=1).join("a", "b")
    assert decided(log, 1, own=0, patience_over=True) is None
    log.add(Leave(finished=False), 0)
    assert decided(log, 0, 1, own=0, patience_over=True) is None
    assert decided(log, 0, 1, own=1) == [0, 1], "what a replica uploaded before it left counts"


def test_nobody_waits_for_who_has_not_contributed_for_long():
    log = Log(num_fragments=2).join("a", "b", "c").rounds(3, 0)
    assert decided(log, 0) is None
    log.rounds(1, 0)
    assert decided(log, 0) == [0], "2P outer entries without the others"
    assert decided(log, 0, 2) == [0, 2], "but they count when they come"


def test_with_quorum_all_nobody_is_left_out_and_all_have_joined():
    log = Log(num_fragments=1, quorum="all", num_replicas=3).join("a", "b")
    assert decided(log, 0, 1, patience_over=True) is None
    log.join("a")
    assert decided(log, 1, 2, own=1) is None, "a name that joined twice is one replica"
    log.join("c")
    assert decided(log, 1, 2, own=1, patience_over=True) is None
    assert decided(log, 1, 2, 3, own=1) == [1, 2, 3]
    log.rounds(20, 1, 2, 3)
    huge = {replica: log.contribution(replica, norm=1e30) for replica in (1, 2, 3)}
    assert may_decide(log.state, 0, huge, 1, overlap_over=True, patience_over=False), "like a fixed group"


def test_a_quorum_that_is_not_reached_is_said_once(caplog):
    log = Log(num_fragments=1, quorum=2).join("a", "b", "c")
    pace = Pace(poll_seconds=0, memory_bytes=1, patience=4, drain_seconds=1, close_seconds=1)
    decider, here = Decider(0, pace), {0: log.contribution(0)}
    claim = {name: getattr(here[0], name) for name in Claim.__dataclass_fields__}
    offer = Offer(**claim, fragment=0, base=0, norms=(1.0,), step=10, overlap=5)
    for step in (15, 18, 19, 20):
        assert decider.parts(log.state, offer, here, step, None) is None
        assert ("counts 1 of 3 active replicas, and the quorum is 2" in caplog.text) == (step >= 19)
    assert len(caplog.records) == 1


def test_a_payload_that_came_too_late_waits_from_the_next_rounds_first_payload_on():
    log = Log(num_fragments=1).join("a", "b", "c", "d", "e")
    late = {0: log.contribution(0), 1: log.contribution(1)}
    log.rounds(1, 2, 3, 4)
    claim = {name: getattr(late[0], name) for name in Claim.__dataclass_fields__}
    offer = Offer(**claim, fragment=0, base=0, norms=(1.0,), step=10, overlap=5)
    pace = Pace(poll_seconds=0, memory_bytes=1, patience=40, drain_seconds=1, close_seconds=1)
    decider = Decider(0, pace)
    assert decider.in_time(log.state, offer, late, 30) is None
    here = late | {2: log.contribution(2)}
    for step in (40, 41, 44):  # a majority is here, and τ has passed since its send
        assert decider.in_time(log.state, offer, here, step) is None, "those of the new round have τ, too"
    assert decider.in_time(log.state, offer, here, 45) == tuple(here.values())
    assert decider.in_time(log.state, offer, here | {3: log.contribution(3), 4: log.contribution(4)}, 41), "all"


def test_a_quorum_of_two_is_two_payloads_however_late_but_where_fewer_replicas_are_active():
    log = Log(num_fragments=1, quorum=2).join("a", "b", "c", "d", "e")
    assert decided(log, 0, 1) is None, "the others have time until t + τ"
    assert decided(log, 0, 1, overlap_over=True) == [0, 1]
    assert decided(log, 0, 1, 4, overlap_over=True) == [0, 1, 4], "and who comes meanwhile is counted"
    assert decided(log, 0, overlap_over=True, patience_over=True) is None
    assert decided(log, *range(5)) == [*range(5)]
    for replica in (1, 2, 3, 4):
        log.add(Leave(finished=False), replica)
    assert decided(log, 0) == [0], "one is active"
    late = Log(num_fragments=1, quorum=2).join("a", "b", "c").rounds(2, 0, 1)
    here = {0: late.contribution(0), 1: late.contribution(1, base_round=1)}
    assert may_decide(late.state, 0, here, 0, overlap_over=True, patience_over=False) is None, "not confirmed"
    assert may_decide(late.state, 0, here, 0, overlap_over=True, patience_over=True) == (here[0], here[1])


def test_payloads_that_are_refused_are_left_out():
    log = Log(num_fragments=1, max_stale=1).join("a", "b").rounds(2, 0, 1)
    here = {0: log.contribution(0), 1: log.contribution(1, base_round=0)}
    assert may_decide(log.state, 0, here, 0, overlap_over=True, patience_over=False) is None
    assert may_decide(log.state, 0, here, 0, overlap_over=True, patience_over=True) == (here[0],)


def test_until_its_patience_is_over_a_replica_writes_only_what_another_confirms():
    log = Log(num_fragments=1).join("a", "b", "c").rounds(2, 0, 1, 2)
    newest = {replica: log.contribution(replica) for replica in range(3)}
    late = {replica: log.contribution(replica, base_round=1) for replica in range(3)}

    def counted_replicas(own: int, here, *, patience_over: bool = False):
        chosen = may_decide(log.state, 0, here, own, overlap_over=True, patience_over=patience_over)
        return chosen and [contribution.replica for contribution in chosen]

    for here in ({0: newest[0], 1: late[1]}, {0: newest[0], 1: late[1], 2: late[2]}):
        assert counted_replicas(0, here) is None, "its own payload alone is new"
        assert counted_replicas(1, here) == sorted(here), "what another writes is confirmed"
        assert counted_replicas(0, here, patience_over=True) == sorted(here)
    assert counted_replicas(0, late) is None, "nobody has told the newest parameters"
    assert counted_replicas(0, {0: newest[0], 1: newest[1], 2: late[2]}) == [0, 1, 2]
    log.add(Leave(finished=False), 1)
    log.add(Leave(finished=False), 2)
    assert counted_replicas(0, {0: newest[0], 1: late[1]}) == [0, 1], "nobody else can write"


OURS, THEIRS = "0" * 16, "f" * 16


def test_a_payload_counts_if_it_was_taken_against_the_runs_parameters_of_its_round():
    log = Log(num_fragments=1, max_stale=2).join("a", "b", "c").rounds(3, 0, 1, 2)
    newest, past = log.contribution(1), log.contribution(2, base_round=1)
    here = {0: log.contribution(0), 1: newest, 2: past}
    bases = dict.fromkeys(here, OURS)
    assert of_the_run(log.state, 0, here, bases, 0, OURS) == here
    assert of_the_run(log.state, 0, here, bases | {1: THEIRS}, 0, OURS) == {0: here[0], 2: past}
    assert of_the_run(log.state, 0, here, bases | {2: THEIRS}, 0, OURS) == {0: here[0], 1: newest}
    # The log tells Θ_p after round 1, this replica that after round 3, and nobody yet that after round 4.
    assert of_the_run(log.state, 0, here, bases | {0: THEIRS, 1: THEIRS}, 0, THEIRS) == here
    later = {0: here[0], 1: replace(newest, base_round=4)}
    assert of_the_run(log.state, 0, later, bases | {1: THEIRS}, 0, OURS) == later


def test_a_replica_whose_parameters_most_others_contradict_writes_nothing():
    log = Log(num_fragments=1).join("a", "b", "c", "d").rounds(2, 0, 1, 2, 3)
    here = {replica: log.contribution(replica) for replica in (0, 1, 2)}
    bases = {0: OURS, 1: THEIRS, 2: THEIRS}
    with pytest.raises(DisagreementError, match="fragment 0 after round 2 are not those of 2 other replicas"):
        of_the_run(log.state, 0, here, bases, 0, OURS)
    assert of_the_run(log.state, 0, here, bases, 1, THEIRS) == {1: here[1], 2: here[2]}, "the others go on"
    one = {replica: here[replica] for replica in (0, 1)}
    assert of_the_run(log.state, 0, one, bases, 0, OURS) == {0: here[0]}, "one against one is no majority"
    half = here | {3: log.contribution(3)}
    assert of_the_run(log.state, 0, half, bases | {3: OURS}, 0, OURS) == {0: here[0], 3: half[3]}
    counted = here | {2: log.contribution(2, seq=1)}
    assert of_the_run(log.state, 0, counted, bases, 0, OURS) == {0: here[0]}, "what can't be counted has no say"


def test_the_turn_goes_round():
    orders = [turns(f"{previous:064x}", [5, 0, 3]) for previous in range(30)]
    assert all(sorted(order) == [0, 3, 5] for order in orders)
    assert turns("0" * 64, [3, 5, 0]) == orders[0]
    assert {order[0] for order in orders} == {0, 3, 5}
