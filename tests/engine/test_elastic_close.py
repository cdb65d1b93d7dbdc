"""The end of a run whose replicas come and go: one entry closes it, and all replicas have the Θ that it names."""

import asyncio
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.engine.test_elastic import counted, until
from tests.engine.test_elastic_ends import cut_off
from tests.rendezvous.replicas import H, P, Replica, new_model

from diloco.errors import DisagreementError, ExchangeError, UserError
from diloco.outer.digest import parameters_hash
from diloco.outer.step import OuterStep
from diloco.rendezvous import store_rendezvous
from diloco.rendezvous.contract import News, Offer
from diloco.rendezvous.log.entries import LogError
from diloco.rendezvous.replay import Replay, replayed

BUDGET = 60 * P * 8
"""Tokens that the replicas train on together, counted over all fragments."""


def replay_of(folder: Path) -> Replay:
    return replayed(str(folder), initial=lambda facts: dict(new_model().named_parameters()))


def hurried(replica: Replica, *, close_seconds: float = 0.4, timeout_seconds: float = 20.0) -> Replica:
    """A replica that waits for others no longer than a moment before it closes the run."""
    replica.exchange._timeout_seconds = replica.exchange._seated._timeout_seconds = timeout_seconds
    log_thread = replica.exchange._seated.log_thread
    log_thread._pace = replace(log_thread._pace, close_seconds=close_seconds, patience=0)
    return replica


def patient(replica: Replica) -> Replica:
    """A replica that waits at its end for the others' payloads, as replicas outside of tests do."""
    log_thread = replica.exchange._seated.log_thread
    log_thread._pace = replace(log_thread._pace, drain_seconds=20.0)
    return replica


def train_to_the_end(replica: Replica, pause_seconds: float) -> None:
    """The loop of the documentation."""
    run = replica.exchange
    while not run.state.finished and run.state.tokens < BUDGET:
        replica.step(pause_seconds=pause_seconds)
    replica.seen(replica.engine.finish(close=True))
    run.leave()


@pytest.mark.parametrize("quorum", ["majority", pytest.param("all", marks=pytest.mark.slow)])
def test_replicas_of_other_paces_end_with_the_last_entry(quorum: str, tmp_path, caplog) -> None:
    replicas = [Replica(str(tmp_path), name=name, quorum=quorum) for name in "abc"]
    threads: list[threading.Thread] = []
    with caplog.at_level(logging.WARNING, "diloco"):
        for replica, pause_seconds in zip(replicas, (0.002, 0.005, 0.011), strict=True):
            threads.append(threading.Thread(target=train_to_the_end, args=(replica, pause_seconds)))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
    replay = replay_of(tmp_path)
    last = replay.state.number - 1
    assert replay.checked.closed_by == last and replay.checked.steps == replay.state.num_outer
    assert {replica.engine.outer_hash() for replica in replicas} == {parameters_hash(replay.parameters())}
    for replica in replicas:
        assert replica.exchange.is_closed and replica.exchange.entry == last
        assert replica.rounds == [log.round for log in replay.state.fragments]
    assert "closes the run" not in caplog.text, "nobody has another entry"


def test_a_replica_that_ends_alone_says_which_entry_it_has(tmp_path, caplog) -> None:
    early, other = Replica(str(tmp_path), name="early"), Replica(str(tmp_path), name="other")
    until(lambda: min(min(counted(early)), min(counted(other))) >= 0, early, other)
    with caplog.at_level(logging.WARNING, "diloco"):
        early.finish()
    entry = early.exchange.entry
    assert f"early ends with the outer parameters after entry {entry} of the log of" in caplog.text
    assert not early.exchange.is_closed
    theta = early.engine.outer_hash()
    rounds = max(early.rounds) + 1
    until(lambda: min(other.rounds) >= rounds, other)
    hurried(other)
    other.engine.finish(close=True)
    other.exchange.leave()
    assert other.exchange.is_closed and other.engine.outer_hash() != theta
    shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))
    for path in sorted(Path(copy, "log").iterdir())[entry + 1 :]:
        path.unlink()
    assert parameters_hash(replay_of(copy).parameters()) == theta, "the entry that it has named"


def until_it_waits(replica: Replica) -> threading.Thread:
    """End a replica in a thread, which waits there for the others."""

    def end() -> None:
        with suppress(ExchangeError):  # it may be killed there
            replica.seen(replica.engine.finish(close=True))

    thread = threading.Thread(target=end)
    thread.start()
    deadline = time.monotonic() + 20
    while not replica.exchange.state.finished:
        assert time.monotonic() < deadline, "it does not end the run"
        time.sleep(0.005)
    return thread


def finish_at_once(replicas: Sequence[Replica], *, seconds: float, **ends: bool) -> None:
    """End the engines at the same time."""
    threads = [threading.Thread(target=replica.engine.finish, kwargs=ends) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "an engine does not end"


def test_with_a_number_as_quorum_two_that_end_at_once_count_what_each_has_in_flight(tmp_path) -> None:
    # Nothing is due: each has offered another fragment than the other when it ends.
    replicas = [patient(Replica(str(tmp_path), name=name, quorum=2, sync_every=1000)) for name in "ab"]
    until(lambda: all(replica.engine.num_steps >= 3 for replica in replicas), *replicas)
    for fragment, replica in enumerate(replicas):
        replica.engine._membership.send(fragment)
    finish_at_once(replicas, seconds=30, close=True)
    assert all(replica.exchange.is_closed for replica in replicas)
    replay = replay_of(tmp_path)
    assert [log.round for log in replay.state.fragments] == [1, 1, 1] and replay.state.tokens == 2 * 3 * 8 * P
    assert (
        parameters_hash(replay.parameters()) == replicas[0].engine.outer_hash() == replicas[1].engine.outer_hash()
    )


def test_with_a_number_as_quorum_two_count_at_the_end_what_neither_can_match(tmp_path) -> None:
    replicas = a, b = [
        hurried(Replica(str(tmp_path), name=name, quorum=2, sync_every=1000), close_seconds=2.0) for name in "ab"
    ]
    sends = ((a, 0), (b, 1)), ((a, 1), (a, 2), (b, 0), (b, 2))
    until(lambda: all(replica.engine.num_steps >= 2 for replica in replicas), *replicas)
    for pairs in sends:
        for replica, fragment in pairs:
            replica.engine._membership.send(fragment)
        if pairs is sends[0]:
            for replica in replicas:
                replica.step()
    # All are matched; of fragment 0 the first one has another step then, of fragment 1 the second one.
    finish_at_once(replicas, seconds=60, flush=True, close=True)
    assert all(replica.exchange.is_closed for replica in replicas)
    replay = replay_of(tmp_path)
    assert [log.round for log in replay.state.fragments] == [2, 2, 1] and replay.state.tokens == 2 * 3 * 8 * P
    assert {replica.engine.outer_hash() for replica in replicas} == {parameters_hash(replay.parameters())}


def test_with_a_number_as_quorum_the_last_one_alive_counts_its_work_and_ends_the_run(tmp_path) -> None:
    ours, dead = (Replica(str(tmp_path), name=name, quorum=2) for name in ("ours", "dead"))
    until(lambda: min(min(counted(ours)), min(counted(dead))) >= 0, ours, dead)
    dead.vanish()
    for _ in range(2 * H):
        ours.step()
    hurried(ours).engine.finish(flush=True, close=True)
    assert ours.exchange.is_closed and not ours.engine._membership.uncounted_tokens
    assert ours.engine.outer_hash() == parameters_hash(replay_of(tmp_path).parameters())


def test_with_a_number_as_quorum_work_that_a_replica_offers_after_it_left_is_waited_for(tmp_path) -> None:
    replicas = a, b = [Replica(str(tmp_path), name=name, quorum=2, sync_every=1000) for name in "ab"]
    until(lambda: all(replica.engine.num_steps >= 2 for replica in replicas), *replicas)
    hurried(a)
    ours = a.engine._membership
    ours.send(0)
    a.step()  # which follows what is in flight
    put = a.exchange._seated.log_thread.outbox.put

    def put_late(offer: Offer, *rest: Any) -> None:
        seconds = 0.3 if offer.step == a.engine.num_steps and offer.fragment == 0 else 0.0
        asyncio.get_running_loop().call_later(seconds, put, offer, *rest)

    a.exchange._seated.log_thread.outbox.put = put_late
    end = threading.Thread(target=a.engine.finish, kwargs={"flush": True, "close": True})
    end.start()
    until(lambda: a.exchange.state.members[0].left)  # while b trains
    b.engine.finish(flush=True, close=True)
    end.join(10)
    assert all(replica.exchange.is_closed for replica in replicas) and not ours.uncounted_tokens
    assert a.engine.outer_hash() == parameters_hash(replay_of(tmp_path).parameters())


@pytest.mark.parametrize("flush", [True, False])
def test_work_whose_upload_ends_after_the_run_was_closed_is_told(flush: bool, tmp_path, caplog) -> None:
    replicas = a, b = [hurried(Replica(str(tmp_path), name=name, quorum=2, sync_every=1000)) for name in "ab"]
    until(lambda: all(replica.engine.num_steps >= 2 for replica in replicas), *replicas)
    a.engine._membership.send(0)
    a.step()
    late, last, log_thread = list[Offer](), (0 if flush else 1, a.engine.num_steps), a.exchange._seated.log_thread
    put = log_thread.outbox.put

    def put_in_time(offer: Offer, *rest: Any) -> None:
        late.append(offer) if (offer.fragment, offer.step) == last else put(offer, *rest)

    log_thread.outbox.put = put_in_time
    end = threading.Thread(target=b.engine.finish, kwargs={"flush": True, "close": True})
    end.start()
    sentence = rf"last work on fragment {last[0]} \(the run was closed before its payload was in the store\)"
    with caplog.at_level(logging.WARNING, "diloco"), pytest.warns() if flush else nullcontext([]) as warned:
        a.engine.finish(flush=flush, close=True)
    end.join(10)
    assert late and all(replica.exchange.is_closed for replica in replicas)
    assert re.search(sentence, str(warned[0].message) if flush else caplog.text)


def test_a_replica_whose_wait_for_the_last_decisions_fails_leaves_at_once(tmp_path, monkeypatch) -> None:
    ours, other = (hurried(Replica(str(tmp_path), name=name, quorum=2)) for name in ("ours", "other"))
    until(lambda: min(min(counted(ours)), min(counted(other))) >= 0, ours, other)
    end = threading.Thread(target=other.engine.finish, kwargs={"close": True})
    end.start()
    until(lambda: ours.exchange.state.finished)

    def fail() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours.engine._membership, "_drained", fail)
    with pytest.raises(KeyboardInterrupt):
        ours.engine.finish(close=True)
    ours.exchange.leave()
    assert ours.exchange.state.members[0].left
    end.join(10)
    assert other.exchange.is_closed


def test_an_outer_step_that_comes_after_the_last_merge_is_taken_before_the_end(tmp_path, monkeypatch) -> None:
    ours, other = (hurried(Replica(str(tmp_path), name=name)) for name in ("ours", "other"))
    until(lambda: min(min(counted(ours)), min(counted(other))) >= 0, ours, other)
    membership, log_thread = ours.engine._membership, ours.exchange._seated.log_thread
    drained, is_first = membership._drained, iter([True])

    def drained_and_looked() -> Iterator[OuterStep]:
        yield from drained()
        if next(is_first, False):
            until(lambda: log_thread.decisions, other)
            other.exchange.leave()
            membership._listen()

    monkeypatch.setattr(membership, "_drained", drained_and_looked)
    ours.engine.finish(close=True)
    assert ours.exchange.is_closed
    ours.exchange.leave()


def test_a_replica_that_died_does_not_hold_up_the_end_for_long_and_is_named(tmp_path, monkeypatch, caplog) -> None:
    ours, dead = hurried(Replica(str(tmp_path), name="ours")), Replica(str(tmp_path), name="dead")
    until(lambda: min(min(counted(ours)), min(counted(dead))) >= 0, ours, dead)
    dead.vanish()
    time.sleep(0.1)  # what the dead one has uploaded is read
    log_thread, number = ours.exchange._seated.log_thread, dead.exchange.replica
    until(lambda: any(number not in log_thread.inbox.here[p] for p in [*log_thread.outbox.offers]), ours)
    assert ours.exchange.state.is_active(dead.exchange.replica)
    monkeypatch.setattr(store_rendezvous, "SECONDS_OF_SILENCE", 0.05)
    log_thread._pace = replace(log_thread._pace, close_seconds=10.0)
    with caplog.at_level(logging.WARNING, "diloco"):
        ending = threading.Thread(target=ours.engine.finish, kwargs={"close": True})
        ending.start()
        while log_thread._closes_at is None:
            assert ending.is_alive()
            time.sleep(0.01)
        awaited, until_when = log_thread.awaited(-1)
        assert awaited == "dead before this replica closes the run" and until_when <= time.monotonic() + 10
        log_thread._closes_at = 0.0  # those seconds are over
        ending.join(9)
    assert ours.exchange.is_closed
    assert re.search(r"waiting for the outer gradient of fragment \d from dead, up to 0 s more", caplog.text)
    ours.exchange.leave()
    assert ours.engine.outer_hash() == parameters_hash(replay_of(tmp_path).parameters())


def test_another_closes_the_run_where_the_first_that_ends_it_dies(tmp_path) -> None:
    first, other = Replica(str(tmp_path), name="first"), Replica(str(tmp_path), name="other")
    until(lambda: min(min(counted(first)), min(counted(other))) >= 0, first, other)
    waiting = until_it_waits(first)
    first.vanish()
    while not other.exchange.state.finished:
        other.step(pause_seconds=0.003)
    other.engine.finish()  # the run is finished: it ends with it
    assert other.exchange.is_closed
    assert other.engine.outer_hash() == parameters_hash(replay_of(tmp_path).parameters())
    other.exchange.leave()
    waiting.join(30)


def test_a_replica_that_joins_after_all_have_died_closes_the_run(tmp_path) -> None:
    ours, other = Replica(str(tmp_path), name="ours"), Replica(str(tmp_path), name="other")
    until(lambda: min(min(counted(ours)), min(counted(other))) >= 0, ours, other)
    waiting = until_it_waits(ours)  # for the other one
    for replica in (ours, other):
        replica.vanish()
    again = hurried(Replica(str(tmp_path), name="ours"))
    assert again.exchange.state.finished
    again.step()
    again.finish()
    assert again.exchange.is_closed
    assert again.engine.outer_hash() == parameters_hash(replay_of(tmp_path).parameters())
    waiting.join(30)


def test_a_replica_that_trains_on_after_the_end_is_told_so_and_ends_with_it(tmp_path, caplog) -> None:
    ours, slow = hurried(Replica(str(tmp_path), name="ours")), Replica(str(tmp_path), name="slow")
    until(lambda: min(min(counted(ours)), min(counted(slow))) >= 0, ours, slow)
    until(lambda: bool(slow.engine._membership.in_flight), slow)  # its last payloads come too late, or not
    ours.engine.finish(close=True)
    ours.exchange.leave()
    with caplog.at_level(logging.WARNING, "diloco"):
        for _ in range(3 * H):
            slow.step(pause_seconds=0.01)
    assert caplog.text.count("the run is closed, and counts nothing more: finish") == 1
    number = slow.exchange.state.number
    slow.finish()
    assert slow.exchange.is_closed and slow.exchange.entry == number - 1
    assert not slow.engine._membership.in_flight
    assert slow.engine.outer_hash() == ours.engine.outer_hash()
    with pytest.raises(LogError, match=r"a run that has ended: diloco export .* writes its outer"):
        Replica(str(tmp_path), name="late")


def test_an_outer_step_that_comes_with_the_entry_that_closes_the_run_is_taken(tmp_path) -> None:
    """In the last look of `finish`, after it has merged all that had come."""
    ours, late = hurried(Replica(str(tmp_path), name="ours")), Replica(str(tmp_path), name="late")
    until(lambda: min(min(counted(ours)), min(counted(late))) >= 0, ours, late)
    until(lambda: not late.engine._membership.in_flight, ours, late)
    for _ in range(H):
        ours.step(pause_seconds=0.003)
    ours.engine.finish(close=True)
    ours.exchange.leave()
    seat, rounds = late.engine._membership.joined.seat, list(late.rounds)
    with seat.log_thread.news:
        assert seat.log_thread.news.wait_for(lambda: seat.log_thread.closed, 20)
    step = seat.step

    def nothing_while_it_merges(*arguments, is_last: bool = False, **others) -> News:
        return News(rounds=rounds) if is_last else step(*arguments, **others)

    seat.step = nothing_while_it_merges
    late.seen(late.engine.finish())
    assert late.engine.outer_hash() == ours.engine.outer_hash() and late.rounds != rounds
    late.exchange.leave()


@pytest.mark.slow
def test_a_store_that_is_gone_at_the_end_is_waited_for_and_then_said(tmp_path, monkeypatch, caplog) -> None:
    ours = Replica(str(tmp_path), name="ours", timeout_seconds=2)
    until(lambda: min(counted(ours)) >= 0 and not ours.engine._membership.in_flight, ours)
    cut_off(monkeypatch)
    rounds, started = list(ours.rounds), time.monotonic()
    with caplog.at_level(logging.WARNING, "diloco"):
        ours.seen(ours.engine.finish(close=True))
        ours.exchange.leave()
    assert time.monotonic() - started < 20
    entry = ours.exchange.entry
    assert f"ours ends with the outer parameters after entry {entry} of the log" in caplog.text
    state = ours.exchange.state
    lacking = [ref.number for ref in state.outers_after(ours.rounds)]
    assert entry == min(lacking, default=state.number) - 1
    assert not ours.exchange.is_closed and ours.rounds >= rounds


def test_a_replica_whose_last_outer_step_gave_other_bits_says_so(tmp_path) -> None:
    ours, other = hurried(Replica(str(tmp_path), name="ours")), Replica(str(tmp_path), name="other")
    until(lambda: min(min(counted(ours)), min(counted(other))) >= 0, ours, other)
    waiting = until_it_waits(other)
    ours.engine.finish(close=True)
    waiting.join(30)
    membership = other.engine._membership
    membership.replica.state.use("outer", 1).add_(1.0)
    membership._take_digests(1, ("outer",))
    with pytest.raises(DisagreementError, match="fragment 1 after the run's last outer step are not tho"):
        other.engine.finish(close=True)


def test_tokens_beyond_those_that_were_declared_are_refused_before_they_are_sent(tmp_path) -> None:
    ours = Replica(str(tmp_path), step_tokens=8)
    until(lambda: min(counted(ours)) >= 0, ours)
    with pytest.raises(UserError, match=r"inner steps read \d+ tokens, and this .* declared step_tokens=8"):
        while True:
            ours.step(tokens=9)
    ours.vanish()


def test_a_payload_that_claims_tokens_which_cannot_be_is_counted_by_nobody(tmp_path) -> None:
    """A liar's own checks are off: it uploads what its join does not allow."""
    ours, liar = Replica(str(tmp_path), name="ours"), Replica(str(tmp_path), name="liar", step_tokens=8)
    until(lambda: min(min(counted(ours)), min(counted(liar))) >= 0, ours, liar)
    seat = liar.engine._membership.joined.seat
    offer, lies = seat.offer, list[int]()

    def false_offer(one: Offer, *contents) -> None:
        lies.append(one.seq)
        offer(replace(one, tokens=1 << 39), *contents)

    seat.offer = false_offer
    until(lambda: bool(lies), ours, liar)
    rounds, first = ours.rounds[0], lies[0]
    until(lambda: min(ours.rounds) >= rounds + 3, ours, liar)
    assert max(counted(liar)) < first and ours.exchange.state.tokens < 1 << 30
    for replica in (ours, liar):
        replica.vanish()
    assert replay_of(tmp_path).checked.steps


def test_the_log_tells_the_mean_training_loss_since_the_last_send(tmp_path) -> None:
    """Losses that the log does not take, such as NaN, are left out of the mean."""
    ours, silent = Replica(str(tmp_path), name="ours"), Replica(str(tmp_path), name="silent")
    offers, offer = list[Offer](), ours.engine._membership.joined.seat.offer

    def seen(one: Offer, *contents) -> None:
        offers.append(one)
        offer(one, *contents)

    ours.engine._membership.joined.seat.offer = seen
    losses = iter([3.0, torch.tensor(2.5, requires_grad=True), float("nan"), 1e30, *(2.0 for _ in range(10**4))])
    while not offers:
        ours.step(loss=next(losses))
    assert offers[0].loss == sum((3.0, 2.5, *(2.0 for _ in range(offers[0].steps - 4)))) / (offers[0].steps - 2)
    until(lambda: min(min(counted(ours)), min(counted(silent))) >= 1, ours, silent)
    counted_losses = [c.loss for ref in ours.exchange.state.since for c in ref.body.contributions]
    assert offers[0].loss in counted_losses and set(counted_losses) <= {offers[0].loss, None}
    for replica in (ours, silent):
        replica.vanish()
    assert replay_of(tmp_path).checked.steps


@pytest.mark.parametrize("loss", ["2", torch.ones(2), 1j])
def test_a_loss_is_a_number(loss, tmp_path) -> None:
    ours = Replica(str(tmp_path))
    with pytest.raises(UserError, match="loss must be a number, or a tensor of one"):
        ours.step(loss=loss)
    ours.vanish()


def test_a_store_that_is_gone_while_a_payload_is_in_flight_keeps_nobody_at_the_end(tmp_path, monkeypatch) -> None:
    ours = hurried(Replica(str(tmp_path), name="ours"), timeout_seconds=0.5)
    until(lambda: not ours.engine._membership.initial_fragments(), ours)
    cut_off(monkeypatch)
    while not ours.engine._membership.in_flight:
        ours.step(pause_seconds=0.002)
    ours.engine.finish(close=True)
    ours.exchange.leave(seconds=0.1)
    assert not ours.exchange.is_closed
