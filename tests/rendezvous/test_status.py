"""A run's status, look after look."""

from tests.rendezvous.cases import Log
from tests.rendezvous.handwritten import Handwritten

from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.entries import Close, Leave
from diloco.rendezvous.prices import Traffic
from diloco.rendezvous.status import Look, status_of
from diloco.wire import codec

HEADER = 384
"""Bytes before a payload."""


def test_a_look_shows_who_takes_part_and_what_it_moved(tmp_path) -> None:
    run = Handwritten(tmp_path / "run")
    run.train(4)
    look = Look(str(run.directory))
    status = look.again()
    assert status.entries == run.state.number and status.rounds == (4, 4) and status.outer_steps == 8
    assert [(r.number, r.name, r.standing, r.slot) for r in status.replicas] == [
        (0, "a", "active", 0),
        (1, "b", "active", 1),
        (2, "c", "active", 2),
    ]
    # c's payloads of rounds 2 and 3 were counted a round later: stale by one.
    assert [(r.counted, r.staleness, r.lag) for r in status.replicas] == [(8, 0, 0), (8, 0, 0), (4, 1, 0)]
    assert [r.tokens for r in status.replicas] == [400, 600, 140] and status.tokens == 1140
    assert [r.steps for r in status.replicas] == [16, 16, 8]
    assert status.contributors == (2 * 2 + 2 * 2 + 4 * 3) / 8
    # a and b tell their losses, c tells none.
    assert status.losses == tuple((step, 4.75 - (step - 1) // 2) for step in range(1, 9))
    assert status.training_loss == 1.75, "the last 5 % of the outer steps are one"
    # 8 payloads each of a and b, and 4 of c that were counted. Before c joined, 4 were read by one other replica.
    sizes = [run.codec.payload_bytes(len(outer_N)) for outer_N in run.outer]
    payload, entries = HEADER + sum(sizes) / 2, 8 * 240 + 20 * 200
    assert status.traffic.bytes_up == 20 * payload + entries
    # All but its author read an entry, and the author the one before it, twice.
    before = 2 * 240 + 4 * 200
    in_log = 3 * before + 4 * (entries - before)
    assert status.traffic.bytes_down == (4 * 1 + 16 * 2) * payload + in_log
    assert status.traffic.creates == run.state.number + 20


def test_of_shares_headers_and_averages_are_read_by_all_and_each_share_by_one():
    form = Form(codec=codec("e3m0"), sizes=(300, 5000), seed=0, second=codec("bf16"), num_shares=3)
    log = Log(num_fragments=2, num_shares=3).join("a", "b", "c").rounds(2, 0, 1, 2).rounds(1, 0, 2, fragment=1)
    traffic = status_of(log.state, form, num_slots=1).traffic
    payload = 3 * (form.share_bytes(0) + form.share_bytes(1)) / 2
    average = 3 * (form.average_bytes(0) + form.average_bytes(1)) / 2
    num_payloads, num_steps = 3 * 2 + 2, 3
    headers, average = num_payloads * (HEADER + 3 * 90), average + 3 * HEADER
    entries = num_steps * 240 + num_payloads * 200
    assert traffic.bytes_up == num_payloads * payload + num_steps * average + headers + entries
    assert traffic.bytes_down == (
        (num_payloads - num_steps) * payload + 2 * num_steps * average + 2 * headers + (3 + 1) * entries
    )
    assert traffic.creates == log.state.number + num_payloads * (1 + 3) + num_steps * 3
    shares = 3 * (num_payloads - num_steps) + 1.75 * 3 * 2 * num_steps  # of an average also looks in vain
    assert traffic.gets == (0 + 1 + 2) + 4 * num_steps + 2 * num_payloads + shares  # a joiner reads what follows


def test_what_was_moved_before_replicas_left_or_were_replaced_still_counts():
    form = Form(codec=codec("fp32"), sizes=(500,), seed=0)
    payload, log = form.share_bytes(0), Log(num_fragments=1).join("a", "b", "c").rounds(4, 0, 1, 2)
    gets, entries = (0 + 1 + 2) + 4 * (4 + 3 * 2), 4 * 240 + 12 * 200
    up, down = 12 * (payload + HEADER) + entries, 24 * (payload + HEADER) + 4 * entries
    expected = Traffic(creates=4 + 4 + 12, gets=gets, bytes_up=up, bytes_down=down)
    assert status_of(log.state, form, num_slots=1).traffic == expected
    for replica in (1, 2):
        log.add(Leave(finished=False), replica)
    log.join("a").rounds(2, 3)  # in the place of the first a; the others are gone
    entries = 2 * (240 + 200)
    alone = Traffic(
        creates=3 + 2 + 2, gets=3 + 2 + 1 + 4, bytes_up=2 * (payload + HEADER) + entries, bytes_down=2 * entries
    )
    assert status_of(log.state, form, num_slots=1).traffic == expected + alone
    log.add(Leave(finished=True), 3)
    log.add(Close(outer=("0" * 16,)), 3)
    end = Traffic(creates=2, gets=1, bytes_up=0, bytes_down=0)
    assert status_of(log.state, form, num_slots=1).traffic == expected + alone + end


def test_a_later_look_reads_what_is_new_and_nothing_else(tmp_path) -> None:
    run = Handwritten(tmp_path / "run")
    run.train(3, snapshots_after=(2,))
    run.index()
    for number in range(1, run.state.number - 1):
        run.path(f"log/{number:010d}").unlink()  # the index says what they said
    look = Look(str(run.directory))
    assert look.again().outer_steps == 6
    store = look._store
    before = store.requests.total()
    assert look.again().outer_steps == 6
    assert store.requests.total() - before == 2
    run.append(Leave(finished=True), author=1)
    status = look.again()
    assert not status.finished and status.replicas[1].standing == "left" and status.num_active == 2
    run.close()
    status = look.again()
    assert status.finished and status.entries == run.state.number and status.num_active == 0
    assert set(store.requests) <= {"get", "list"}
