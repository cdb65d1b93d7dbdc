"""Retiring: a joiner finds all that it needs, and the rest goes."""

from tests.rendezvous.cases import Log

from diloco.rendezvous.log.entries import Snapshot
from diloco.rendezvous.log.index import retirable

A, B, C = "a" * 64, "b" * 64, "c" * 64


def payloads(*names: tuple[int, int]) -> list[str]:
    return [f"payloads/{replica}/{seq:08d}" for replica, seq in names]


def test_payloads_before_the_last_two_snapshots_go_and_what_may_count_stays():
    log = Log(num_fragments=2).join("a", "b").rounds(4, 0, 1).rounds(1, 0, 1, fragment=1)
    names = payloads(*((replica, seq) for replica in (0, 1, 2) for seq in range(7)))
    assert retirable(log.state, names) == [], "without snapshots everything is replayed"
    log.add(Snapshot(fragment=0, round=1, sha256=A), 0)
    assert retirable(log.state, names) == []
    log.add(Snapshot(fragment=0, round=3, sha256=B), 0)
    share = "payloads/0/00000000-3"
    assert retirable(log.state, [*names, share]) == [*payloads((0, 0), (1, 0)), share]
    log.add(Snapshot(fragment=0, round=4, sha256=C), 0)
    log.join("b")
    gone = payloads((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 5), (1, 6))
    assert retirable(log.state, names) == gone, "and what a fenced replica has uploaded"


def test_averages_go_with_their_entries_and_shares_with_their_payloads():
    log = Log(num_fragments=1, num_shares=4).join("a").rounds(4, 0)
    names = [f"averages/{number:010d}/{share}" for number in range(2, 9) for share in (0, 3)]
    shares = [f"payloads/0/{seq:08d}-3" for seq in range(6)]
    assert log.state.number == 6 and retirable(log.state, [*names, *shares]) == []
    log.add(Snapshot(fragment=0, round=2, sha256=A), 0)
    log.add(Snapshot(fragment=0, round=3, sha256=B), 0)
    # The entries 2 and 3 are of the rounds 1 and 2; 8 is still to come.
    assert retirable(log.state, [*names, *shares]) == [*names[:4], *names[8:12], *shares[:2]]


def test_a_payload_that_was_overtaken_by_those_of_other_fragments_stays():
    log = Log(num_fragments=2, max_stale=0).join("a").rounds(1, 0, fragment=1)
    waiting = log.contribution(0, 1)
    for seq in range(2, 40):
        log.outer(log.contribution(0, seq=seq))
    log.add(Snapshot(fragment=0, round=37, sha256=A), 0)
    log.add(Snapshot(fragment=0, round=38, sha256=B), 0)
    assert log.state.refusal(1, waiting) is None
    assert payloads((0, waiting.seq))[0] not in retirable(log.state, payloads((0, waiting.seq)))


def test_snapshots_but_the_last_two_go_and_those_under_way_stay():
    log = Log(num_fragments=1).join("a").rounds(6, 0)
    names = [f"snapshots/0/{round_}-{sha256}" for round_ in (1, 2, 3, 4) for sha256 in (A, B)]
    assert retirable(log.state, names) == []
    for round_ in (1, 2, 3):
        log.add(Snapshot(fragment=0, round=round_, sha256=A), 0)
    others = {f"snapshots/0/1-{A}", *(f"snapshots/0/{round_}-{B}" for round_ in (1, 2, 3))}
    assert set(retirable(log.state, names)) == others


def test_older_indexes_go_and_entries_and_strangers_stay():
    log = Log(num_fragments=1).join("a").rounds(6, 0)
    names = ["index/0000000003", "index/0000000008", "index/0000000009", "log/0000000000", "log/0000000003"]
    assert log.state.number == 8
    assert retirable(log.state, [*names, "README", "payloads/x/1", "snapshots/7/1-" + A]) == ["index/0000000003"]
