"""The log's state machine: entries that are not valid are refused, and no schedule breaks an invariant."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendezvous.cases import AMOUNTS, Log
from tests.rendezvous.simulated import simulate

from diloco.files import sha256
from diloco.rendezvous.log.entries import (
    FORMAT,
    Close,
    Create,
    Join,
    Keys,
    Leave,
    LogError,
    Outer,
    Rules,
    Snapshot,
)
from diloco.rendezvous.log.run import RunState

A, B, CREATOR = "a" * 64, "b" * 64, "c" * 64
END = ("0" * 16, "f" * 16)
CREATE = Create(format=FORMAT, rules=Rules(num_fragments=1), facts={}, creator="")


@pytest.mark.slow
@pytest.mark.timeout(7200)  # of ten thousand
@settings(settings.get_profile("hostile"))
@given(st.binary(min_size=300, max_size=900))
def test_no_schedule_breaks_an_invariant(schedule):
    """With --hostile-examples 10000: ten thousand schedules, other ones each time."""
    simulate(schedule)


@pytest.fixture
def log() -> Log:
    return Log(num_fragments=2, max_stale=2).join("a", "b", "c").rounds(3, 0, 1)


def outer(log: Log, *contributions, **changes) -> Outer:
    fields = {"fragment": 0, "round": 4, "before": "0" * 16, "contributions": contributions}
    return Outer(**(fields | changes))


@pytest.mark.parametrize(
    ("body", "author", "reason"),
    [
        (lambda log: outer(log, log.contribution(0), round=5), 0, "is round 5 of fragment 0, and the next is 4"),
        (lambda log: outer(log, log.contribution(0), fragment=2), 0, "fragment 2, and there are 2"),
        (lambda log: outer(log), 0, "does not list"),
        (lambda log: outer(log, log.contribution(1)), 0, "its author's among them"),
        (lambda log: outer(log, log.contribution(1), log.contribution(0)), 0, "by replica"),
        (lambda log: outer(log, log.contribution(0), log.contribution(0, seq=8)), 0, "each once"),
        (lambda log: outer(log, log.contribution(0, seq=2)), 0, "was counted already"),
        (lambda log: outer(log, log.contribution(0), log.contribution(7)), 0, "has not joined"),
        (lambda log: outer(log, log.contribution(0)), 3, "which has not joined"),
        (lambda log: outer(log, log.contribution(0)), -1, "which has not joined"),
        (lambda log: Join(name="d", key="", **AMOUNTS), 4, "the next number is 3"),
        (lambda log: Join(name="d", key=A, **AMOUNTS), 3, "in a run without keys"),
        (lambda log: Keys(allowed=(A,)), -1, "changes the allow-list"),
        (lambda log: Keys(allowed=(A,)), 0, "changes the allow-list"),
        (
            lambda log: CREATE,
            -1,
            "a second time",
        ),
        (lambda log: Snapshot(fragment=0, round=4, sha256=A), 0, "snapshot of round 4"),
        (lambda log: Snapshot(fragment=0, round=0, sha256=A), 0, "snapshot of round 0"),
        (lambda log: Snapshot(fragment=2, round=1, sha256=A), 0, "fragment 2, and there are 2"),
        (
            lambda log: outer(log, log.contribution(0, tokens=1 << 39)),
            0,
            "but it claims 549755813888 tokens",
        ),
        (lambda log: Close(outer=END), 0, "closes the run before its token budget is spent"),
    ],
)
def test_an_entry_that_is_not_valid_is_refused_with_its_number(log, body, author, reason):
    with pytest.raises(LogError, match=rf"^entry 7 of the log .*{reason}"):
        log.add(body(log), author)


def test_an_entry_follows_the_one_before_it(log):
    entry = log.entry(Join(name="d", key="", **AMOUNTS), 3, sha256(b"another"))
    with pytest.raises(LogError, match="does not follow the entry before it"):
        log.state.after(entry, sha256(b""))


@pytest.mark.parametrize("body", [Leave(finished=False), Snapshot(fragment=0, round=2, sha256=A)])
def test_who_has_left_or_was_fenced_writes_nothing(log, body):
    log.add(Leave(finished=False), 0)
    log.join("b")
    for author in (0, 1):
        with pytest.raises(LogError, match="has left, or was replaced"):
            log.add(body, author)


def test_nothing_follows_the_entry_that_closes_a_run(log):
    log.add(Leave(finished=False), 1)
    with pytest.raises(LogError, match="closes the run before its token budget is spent"):
        log.add(Close(outer=END), 1)
    log.add(Leave(finished=True), 0)
    log.outer(log.contribution(2))  # what others have sent is still decided
    for body, author, reason in (
        (Close(outer=END), 2, "its author has left"),
        (Close(outer=END[:1]), 0, "with 1 fragments, and there are 2"),
        (Close(outer=END), 3, "has not joined"),
    ):
        with pytest.raises(LogError, match=reason):
            log.add(body, author)
    assert log.state.is_active(2) and not log.state.closed
    log.add(Close(outer=END), 0)
    assert log.state.closed == END and not log.state.active
    assert log.state.refusal(0, log.contribution(2)) == "the run is closed"
    for body in (
        outer(log, log.contribution(2), round=5),
        Leave(finished=True),
        Snapshot(fragment=0, round=4, sha256=A),
        Close(outer=END),
        Join(name="d", key="", **AMOUNTS),
        Keys(allowed=(A,)),
    ):
        with pytest.raises(LogError, match="follows the entry that closes the run"):
            log.add(body, 2)


def test_a_replica_has_everything_up_to_the_entry_before_the_first_outer_step_that_it_lacks(log):
    log.outer(log.contribution(0, 1), fragment=1)  # entry 7, after three rounds of fragment 0
    state = log.add(Leave(finished=False), 2)
    lacking = [[ref.number for ref in state.outers_after(rounds)] for rounds in ((3, 1), (3, 0), (2, 1), (0, 0))]
    assert lacking == [[], [7], [6], [4, 5, 6, 7]]


def test_nothing_is_stepped_before_all_have_joined():
    log = Log(num_fragments=1, num_replicas=2).join("a", "a")
    with pytest.raises(LogError, match="before 2 replicas were present together"):
        log.outer(log.contribution(1))
    log.join("b")
    assert log.outer(log.contribution(1)).num_outer == 1


def test_with_quorum_all_an_entry_counts_all():
    log = Log(num_fragments=1, quorum="all", num_replicas=2).join("a", "b")
    with pytest.raises(LogError, match=r"leaves out replicas \[1\]"):
        log.outer(log.contribution(0))
    log.add(Leave(finished=False), 1)
    assert log.outer(log.contribution(0)).num_outer == 1


def test_with_a_number_as_quorum_an_entry_counts_so_many_or_as_many_as_are_active():
    log = Log(num_fragments=1, quorum=2).join("a", "b", "c")
    with pytest.raises(LogError, match="entry 4 of the log counts 1 of 3 active replicas, and the quorum is 2"):
        log.outer(log.contribution(0))
    log.rounds(2, 0, 2)
    assert log.state.active == (0, 2)
    log.outer(log.contribution(1), log.contribution(2))
    log.add(Leave(finished=False), 1)
    log.add(Leave(finished=False), 2)
    assert log.outer(log.contribution(0)).num_outer == 4


def test_once_the_budget_is_spent_a_number_binds_no_entry_and_who_has_left_writes_its_last():
    log = Log(num_fragments=1, quorum=2).join("a", "b", "c")
    log.add(Leave(finished=True), 0)
    assert log.outer(log.contribution(1)).num_outer == 1 and log.outer(log.contribution(0)).num_outer == 2
    with pytest.raises(LogError, match="has left, or was replaced"):
        log.add(Snapshot(fragment=0, round=2, sha256=A), 0)


def test_the_creator_alone_changes_the_allow_list_and_a_revoked_key_shuts_out_at_once():
    log = Log(num_fragments=1, creator=CREATOR, allowed=(A,)).join("a", key=A)
    log.rounds(1, 0)
    keys = log.entry(Keys(allowed=(B,), revoked=(A,)), -1, log.state.previous)
    assert log.state.signer(keys) == CREATOR
    state = log.add(keys.body, -1)
    assert state.allowed == (B,) and state.kept == (state.number - 1,)
    with pytest.raises(LogError, match="names entry 0 as the newest change of the allow-list"):
        state.after(log.entry(Join(name="b", key=B, **AMOUNTS), 1, state.previous, keys=0), A)
    assert "was replaced" in state.refusal(0, log.contribution(0, seq=1)), "its payloads count no more"
    log.join("a", key=B)
    assert log.state.signer(log.entry(Leave(finished=False), 1, "")) == B
    assert log.state.members[1].slot == log.state.members[0].slot, "the name lives on with another key"


def test_snapshots_and_what_is_replayed_after_the_first_of_the_last_two(log):
    for round_ in (1, 2, 3):
        log.add(Snapshot(fragment=0, round=round_, sha256=A), 0)
        rounds = [ref.body.round for ref in log.state.fragments[0].since]
        assert rounds == {1: [1, 2, 3], 2: [2, 3], 3: [3]}[round_]
    assert [ref.round for ref in log.state.fragments[0].snapshots] == [2, 3]


def test_the_norms_of_the_last_contributions_and_the_last_checksums_are_kept():
    log = Log(num_fragments=1, max_stale=2).join("a", "b").rounds(40, 0, 1)
    assert len(log.state.fragments[0].norms) == 64 and len(log.state.fragments[0].before) == 3
    assert log.state.tokens == sum(member.tokens for member in log.state.members) == 800


def test_entry_0_creates_a_run_of_this_format():
    body = CREATE
    for changed, author, reason in (
        (body, 0, "does not create a run"),
        (Join(name="a", key="", **AMOUNTS), -1, "does not create a run"),
        (replace(body, format=1), -1, f"is of format 1, and this diloco reads format {FORMAT}"),
        (replace(body, allowed=(A,)), -1, "is not signed"),
    ):
        with pytest.raises(LogError, match=reason):
            RunState.begin(Log.entry(changed, author, ""), sha256(b""))
