"""Who may write an outer entry, when, and whom it counts."""

from tests.rendezvous.cases import Log

from diloco.rendezvous.decide import may_decide, turns
from diloco.rendezvous.entries import Leave


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


def test_payloads_that_are_refused_are_left_out():
    log = Log(num_fragments=1, max_stale=1).join("a", "b").rounds(2, 0, 1)
    here = {0: log.contribution(0), 1: log.contribution(1, base_round=0)}
    assert may_decide(log.state, 0, here, 0, overlap_over=True, patience_over=False) is None
    assert may_decide(log.state, 0, here, 0, overlap_over=True, patience_over=True) == (here[0],)


def test_the_turn_goes_round():
    orders = [turns(f"{previous:064x}", [5, 0, 3]) for previous in range(300)]
    assert all(sorted(order) == [0, 3, 5] for order in orders)
    assert turns("0" * 64, [3, 5, 0]) == orders[0]
    for replica in (0, 3, 5):
        assert 60 < sum(order[0] == replica for order in orders) < 140
