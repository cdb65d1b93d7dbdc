"""Shifts: the outer entries by which a run's bridge moves Θ, in the state machine and in what is decided."""

from dataclasses import replace

import pytest
from tests.rendezvous.cases import AMOUNTS, Log

from diloco.rendezvous.contract import Form
from diloco.rendezvous.deciding import may_decide, of_the_run
from diloco.rendezvous.log.entries import Close, Join, Leave, LogError
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.status import status_of
from diloco.wire.codecs import codec

A, B, BRIDGE = range(3)


def region(**rules) -> Log:
    """Two replicas and a bridge after two rounds of the only fragment."""
    return Log(num_fragments=1, bridge="eu", **rules).join("a", "b", "eu").rounds(2, A, B)


def bookkeeping(state: RunState) -> dict[str, object]:
    """The numbers that an outer step counts, and by which replicas are waited for."""
    names = ("members", "positions", "num_outer", "tokens", "losses")
    return {name: getattr(state, name) for name in names} | {"norms": state.fragments[0].norms}


def test_a_shift_is_a_round_that_counts_nothing():
    log = region()
    before = log.state
    log.outer(log.contribution(BRIDGE, norm=1e9, tokens=7, loss=3.0))
    after = log.state
    assert after.fragments[0].round == 3 and after.fragments[0].averages == (1, 2)
    assert bookkeeping(after) == bookkeeping(before)
    assert after.since[-1].body.contributions[0].norm == 1e9, "a joiner takes it, too"
    assert after.is_shift(after.since[-1].body) and not after.is_shift(after.since[0].body)


def test_nobody_waits_for_a_bridge_and_it_stands_for_no_replica():
    log = Log(num_fragments=1, num_replicas=2, bridge="eu", quorum="all").join("eu", "a")
    assert not log.state.is_complete and log.state.active == (1,)
    assert log.join("b").state.is_complete
    log.rounds(1, 1, 2)
    assert log.state.refusal_of_replicas({1, 2}) is None
    full = Log(num_fragments=1, num_slots=2, bridge="eu").join("eu", "a").rounds(3, 1)
    assert full.state.free_slot("b") is None, "its slot is not given away, though it is never active"


def test_a_bridge_reads_no_text_and_leaves_the_first_slots_to_those_that_do():
    state = Log(num_fragments=1, num_slots=4, bridge="eu").join("eu", "a", "b").state
    assert [member.slot for member in state.members] == [3, 0, 1]
    assert Log(num_fragments=1, num_slots=4).join("eu", "a", "b").state.members[0].slot == 0


def test_the_shifts_up_to_an_entry_are_counted_from_any_entry_on():
    log = region()
    log.rounds(1, BRIDGE).rounds(1, A, B).rounds(1, BRIDGE).rounds(2, A)
    outers, expected = log.state.since, [0, 0, 1, 1, 2, 2, 2]
    for first in range(len(outers)):
        num_shifts = log.state.num_shifts(outers[first:])
        assert [num_shifts[ref.number] for ref in outers[first:]] == expected[first:]


def test_staleness_counts_rounds_but_no_shifts():
    form, log = Form(codec=codec("fp32"), sizes=(4,), seed=0), region()
    late = log.contribution(A)
    log.rounds(1, BRIDGE).rounds(3, B).outer(late)
    assert status_of(log.state, form, num_slots=1).replicas[A].staleness == 3
    log.rounds(2, B)
    assert status_of(log.state, form, num_slots=1).replicas[A].staleness == 3, "also before the last 4 entries"


@pytest.mark.parametrize(
    ("members", "author", "reason"),
    [
        ((A, BRIDGE), A, "counts the bridge, eu, beside others"),
        ((A, BRIDGE), BRIDGE, "counts the bridge, eu, beside others"),
        ((BRIDGE,), A, "its author's among them"),
    ],
)
def test_only_the_bridge_writes_a_shift_and_it_counts_nobody_else(members, author, reason):
    log = region()
    with pytest.raises(LogError, match=reason):
        log.outer(*map(log.contribution, members), author=author)


def test_without_a_bridge_in_its_rules_the_same_entry_is_an_average():
    log = Log(num_fragments=1).join("a", "b", "eu").rounds(2, A, B)
    log.outer(log.contribution(BRIDGE, tokens=7))
    assert log.state.num_outer == 3 and log.state.tokens == 47 and log.state.members[BRIDGE].tokens == 7
    quorum = Log(num_fragments=1, quorum="all").join("a", "b", "eu")
    with pytest.raises(LogError, match=r"leaves out replicas \[0, 1\]"):
        quorum.outer(quorum.contribution(BRIDGE))


def test_shifts_make_no_payload_stale():
    log = region(max_stale=1)
    early, late = log.contribution(A, base_round=1), log.contribution(A, base_round=0)
    for _ in range(9):
        log.outer(log.contribution(BRIDGE))
    assert log.state.refusal(0, early) is None and log.state.fragments[0].bases.keys() >= {*range(1, 11)}
    assert "made against round 0" in log.state.refusal(0, late)
    log.rounds(1, B)
    assert "made against round 1" in log.state.refusal(0, early), "that was an average"
    assert log.state.refusal(0, replace(early, base_round=2)) is None
    for _ in range(1100):
        log.outer(log.contribution(BRIDGE))
    assert len(log.state.fragments[0].before) == 1002 and "round 12," in log.state.refusal(
        0, replace(early, base_round=12)
    ), "a log without averages forgets, too"


def test_a_shift_is_never_stale():
    log = region()
    shift = log.contribution(BRIDGE)
    log.rounds(20, A, B)
    assert log.state.refusal(0, shift) is None and log.state.refusal(0, replace(shift, replica=A, seq=99))
    log.outer(shift)


def test_a_payload_that_only_shifts_have_passed_confirms_a_decision():
    log = region()
    payloads = {replica: log.contribution(replica) for replica in (A, B)}
    log.outer(log.contribution(BRIDGE))
    now = {"overlap_over": False, "patience_over": False}
    assert may_decide(log.state, 0, payloads, A, **now) == (payloads[A], payloads[B])
    older = {replica: replace(payload, base_round=1) for replica, payload in payloads.items()}
    assert may_decide(log.state, 0, older, A, **now) is None
    bases = {A: "0" * 16, B: "1" * 16}
    assert [*of_the_run(log.state, 0, payloads, bases, A, "2" * 16)] == [A], "Θ before the shift is compared"


def test_a_bridge_writes_at_once_and_nobody_counts_its_payload():
    log = region()
    here = {replica: log.contribution(replica) for replica in (A, B, BRIDGE)}
    now = {"overlap_over": False, "patience_over": False}
    assert may_decide(log.state, 0, here, BRIDGE, **now) == (here[BRIDGE],)
    assert may_decide(log.state, 0, here, A, **now) == (here[A], here[B])
    log.add(Leave(finished=False), BRIDGE)
    assert may_decide(log.state, 0, here, BRIDGE, **now) is None
    waiting = Log(num_fragments=1, num_replicas=2, bridge="eu").join("eu", "a")
    assert may_decide(waiting.state, 0, {0: waiting.contribution(0)}, 0, **now) is None


def test_the_last_to_leave_may_close_a_run_whose_budget_is_not_spent():
    log = Log(num_fragments=1).join("a", "b").rounds(1, A, B)
    log.add(Leave(finished=False), A)
    with pytest.raises(LogError, match="its author has left"):
        log.add(Close(outer=("0" * 16,)), A)
    log.add(Leave(finished=False), B)
    log.add(Close(outer=("0" * 16,)), A)
    assert "has ended" in log.state.refusal_of_joiner(Join(name="b", key="", **AMOUNTS))
