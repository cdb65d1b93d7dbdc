"""A replica writes all that it has to write, also what came while another entry was on its way."""

import asyncio
import dataclasses
import json
import re
import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replicas import P, Replica

import diloco
from diloco.rendezvous import store_rendezvous
from diloco.rendezvous.log_thread import Background, Delivery
from diloco.rendezvous.store import Store


def test_a_thread_does_not_wait_for_a_loop_that_was_stopped():
    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    background, errors = Background("test"), list[BaseException]()

    def wait() -> None:
        try:
            background.wait(work(), 1e6, "store")
        except CancelledError as error:
            errors.append(error)

    background.start()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)
    background.stop()
    thread.join(5)
    assert len(errors) == 1


def test_no_snapshot_and_no_farewell_is_lost_while_an_outer_entry_is_written(tmp_path, monkeypatch):
    create = Store.create

    async def slow_create(self, name: str, data, **limits):
        await asyncio.sleep(0.02 if name.startswith("log/") else 0)
        return await create(self, name, data, **limits)

    monkeypatch.setattr(Store, "create", slow_create)
    replica = Replica(str(tmp_path / "run"), snapshot_rounds=1)
    while replica.exchange.state.num_outer < 8 * P:
        replica.step()
        time.sleep(0.002)
    replica.finish()
    bodies = [
        json.loads(file.read_bytes().splitlines()[0]) for file in sorted((tmp_path / "run" / "log").iterdir())
    ]
    rounds = {kind: set() for kind in ("outer", "snapshot", "leave")}
    for entry in bodies[2:]:
        rounds[entry["kind"]].add((entry["body"].get("fragment"), entry["body"].get("round")))
    assert len(rounds["leave"]) == 1
    early = {(p, number) for p, number in rounds["outer"] if number <= 6}
    assert early <= rounds["snapshot"]


def test_a_replica_whose_outer_gradient_is_left_out_for_ever_ends(tmp_path):
    replica = Replica(str(tmp_path / "store"), sync_every=4)
    until(lambda: min(len(log.norms) for log in replica.exchange.state.fragments) >= 8, replica)
    with torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.add_(100.0)
    with pytest.raises(diloco.ExchangeError, match=r"leaves out .* its norm is .* under another name"):
        until(lambda: False, replica)


def test_the_reason_why_an_offer_is_not_counted_is_its_norm_where_that_is_out_of_bounds(tmp_path):
    replica = Replica(str(tmp_path / "store"), sync_every=4, patience=100_000)
    until(lambda: min(len(log.norms) for log in replica.exchange.state.fragments) >= 8, replica)
    membership = replica.engine._membership
    until(lambda: 0 not in membership.in_flight, replica)
    with torch.no_grad():
        replica.model.blocks[0].weight.add_(100.0)
    until(lambda: 0 in membership.in_flight, replica)
    offer = membership.in_flight[0]
    until(lambda: replica.exchange._seated.log_thread.outbox.offers.get(0) is offer, replica)
    assert re.match(r"its norm is \S+, more than ", replica.exchange._seated.refusal(offer))
    replica.vanish()


def test_a_replica_far_behind_counts_no_outer_step_that_it_has_not_taken(tmp_path):
    """Snapshots stand for some of these steps, and the state leaves them out."""
    fast, slow = (Replica(str(tmp_path), name=name, patience=0, snapshot_rounds=1) for name in ("fast", "slow"))
    until(lambda: min(min(counted(fast)), min(counted(slow))) >= 0, fast, slow)
    rounds = [taken for taken, _ in slow.exchange._seated.log_thread.taken_rounds]

    def are_left_out() -> bool:
        logs = zip(slow.exchange.state.fragments, rounds, strict=True)
        return all(log.since[0].body.round > taken + 1 for log, taken in logs)

    until(are_left_out, fast)
    tokens = num_outer = 0
    missing = list[int]()
    for number, path in enumerate(
        sorted((tmp_path / "log").glob("[0-9]" * 10))
    ):  # not files that are being written
        entry = json.loads(path.read_bytes().splitlines()[0])
        if entry["kind"] == "outer" and entry["body"]["round"] > rounds[entry["body"]["fragment"]]:
            missing.append(number)
        elif entry["kind"] == "outer":
            tokens += sum(contribution["tokens"] for contribution in entry["body"]["contributions"])
            num_outer += 1
    assert slow.exchange.counted == (tokens, num_outer) and slow.exchange.entry == missing[0] - 1
    for replica in (fast, slow):
        replica.vanish()


def test_a_replica_does_not_go_on_alone_in_a_directory_that_was_unmounted(tmp_path):
    url = tmp_path / "store"
    replica = Replica(str(url), sync_every=4)
    for _ in range(24):
        replica.step(pause_seconds=0.004)
    url.rename(tmp_path / "mounted")
    url.mkdir(exist_ok=True)
    with pytest.raises(diloco.ExchangeError, match=r"entry \d+ of the log is not in .* emptied, or unmounted"):
        until(lambda: False, replica)
    assert len(list(url.glob("log/*"))) < 2, "a write that the unmount has overtaken, at the most"


def test_the_end_of_a_run_is_seen_after_its_last_decision(tmp_path, monkeypatch):
    replica = Replica(str(tmp_path / "store"))
    replica.vanish()  # the test is the only one that changes the log
    log_thread = replica.exchange._seated.log_thread

    def is_done(delivery: Delivery) -> bool:
        """Nothing waits, and right after that the loop reads an outer entry, and the one that closes the run."""
        log_thread._log.state = dataclasses.replace(log_thread.state, closed=("0" * 16,) * P)
        return True

    monkeypatch.setattr(Delivery, "is_done", property(is_done))
    assert log_thread.closed == ()


def test_waits_that_follow_each_other_are_logged_once_per_minute(tmp_path, monkeypatch, caplog):
    """With the quorum "all" each round of each fragment may wait for a slower replica."""
    monkeypatch.setattr(store_rendezvous, "SECONDS_OF_SILENCE", 0.01)
    replica = Replica(str(tmp_path / "store"))
    seat = replica.exchange._seated
    seat._timeout_seconds = 0.02
    monkeypatch.setattr(seat.log_thread, "awaited", lambda fragment: (f"fragment {fragment}", float("inf")))
    with seat.log_thread.news, caplog.at_level("WARNING", "diloco"):
        for fragment in (0, 1, 0, -1, 1, -1):
            assert not seat._is_over_in_time(lambda: False, fragment)
    lines = [line.partition(",")[0] for line in caplog.messages if line.startswith("waiting for ")]
    assert lines == ["waiting for fragment 0", "waiting for fragment -1"], "-1 stands for the end"
    replica.vanish()
