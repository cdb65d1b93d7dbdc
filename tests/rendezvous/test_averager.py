"""Averages of shares in live runs: others stand in for the dead, bad shares are left out, little is moved."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.cases import inner_step
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replay import Replayed, replayed
from tests.rendezvous.replicas import P, Replica, theta0
from torch import nn

import diloco
from diloco.outer.averages import share_size
from diloco.rendezvous.deciding import turns
from diloco.rendezvous.objects import AVERAGE, AverageHeader, open_average
from diloco.rendezvous.payloads import Averager
from diloco.rendezvous.replay import Replay
from diloco.rendezvous.replay import replayed as verified
from diloco.rendezvous.store import Store
from diloco.wire import codec

R = 3
CUT = {"combine": "reduce_scatter", "num_shares": R, "snapshot_rounds": 1000}


def averager_of(replica: Replica) -> Averager:
    return replica.exchange._seated.log_thread.averager


def stop_averaging(*replicas: Replica) -> None:
    """Let replicas make no more averages, like processes that die after an entry was written."""
    for replica in replicas:
        averager_of(replica)._made = lambda *_: asyncio.sleep(1e6)


def check(folder: Path, *replicas: Replica) -> Replayed:
    """Compare the replicas with the replays: NumPy's, and diloco's own."""
    run = replayed(folder, theta0(), second="fp32")
    for replica in replicas:
        for p, outer_p in enumerate(replica.outer()):
            np.testing.assert_array_equal(outer_p, run.outer[p][replica.rounds[p]])
    return run


def verify(folder: Path, replica: Replica) -> Replay:
    parameters = {name: torch.from_numpy(value) for name, value in initial(replica.model).items()}
    return verified(str(folder), initial=lambda facts: parameters)


def initial(model: nn.Module) -> dict[str, np.ndarray]:
    """The initial parameters by name."""
    flat, start, named = np.concatenate(theta0()), 0, {}
    for name, parameter in model.named_parameters():
        named[name] = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    return named


def headers(folder: Path, replica: Replica, since: int = 0) -> Iterator[AverageHeader]:
    """The headers of the averages, in the store, of the entries from one on."""
    form, state = averager_of(replica)._objects.form, replica.exchange.state
    for log in state.fragments:
        for ref in (ref for ref in log.since if ref.number >= since):
            for share in range(R):
                path = folder / AVERAGE.name(ref.number, share)
                if path.exists():
                    yield open_average(path.read_bytes(), state=state, form=form, ref=ref, share=share)[0]


def authors(folder: Path, replica: Replica, since: int) -> set[int]:
    """The replicas that made the averages of the entries from one on."""
    return {header.replica for header in headers(folder, replica, since)}


def test_the_members_share_the_work_and_every_share_has_another_first(tmp_path) -> None:
    a, b = (Replica(str(tmp_path), name=name, **CUT) for name in "ab")
    until(lambda: min(counted(a) + counted(b)) >= 2 * P, a, b)
    state = a.exchange.state
    for log in state.fragments:
        for ref in log.since:
            members = [c.replica for c in ref.body.contributions]
            for share in range(R):
                places = {m: averager_of(r)._turn(ref, share) for m, r in ((0, a), (1, b))}
                assert sorted(places[m] for m in members) == [*range(len(members))]
                order = turns(f"{state.run} {ref.number}", members)
                assert places[order[share % len(members)]] == 0
    outer_steps: list[diloco.OuterStep] = []
    until(lambda: outer_steps.extend(a.step()) or outer_steps, a, b)
    assert outer_steps[0].norm() > 0 and outer_steps[0].deltas == () and outer_steps[0].mean_cosine() is None
    for replica in (a, b):
        replica.finish()
    check(tmp_path, a, b)
    assert authors(tmp_path, a, 0) == {0, 1}
    replay = verify(tmp_path, a)
    assert replay.checked.steps == replay.state.num_outer and not replay.notes
    assert replay.checked.averages == R * replay.state.num_outer


def test_who_dies_after_an_entry_is_stood_in_for(tmp_path) -> None:
    a, b = (Replica(str(tmp_path), name=name, **CUT) for name in "ab")
    until(lambda: min(counted(a) + counted(b)) >= P, a, b)
    stop_averaging(a)
    state = a.exchange.state  # of what it has not read a has averaged nothing
    since, rounds = state.number, state.fragments[0].round + 3
    until(lambda: b.rounds[0] >= rounds, a, b)  # a contributes, and averages nothing
    assert authors(tmp_path, b, since) == {b.exchange.replica}
    a.vanish()
    rounds = b.rounds[0] + 2
    until(lambda: b.rounds[0] >= rounds, b)
    b.finish()
    check(tmp_path, b)


@pytest.mark.slow
def test_if_all_die_after_an_entry_whoever_comes_next_goes_on(tmp_path) -> None:
    old = [Replica(str(tmp_path), name=name, **CUT) for name in "ab"]
    until(lambda: min(min(counted(replica)) for replica in old) >= P, *old)
    stop_averaging(*old)
    number = old[0].exchange.state.num_outer
    until(lambda: old[0].exchange.state.num_outer > number, *old)
    for replica in old:
        replica.vanish()
    new = [Replica(str(tmp_path), name=name, combine="reduce_scatter") for name in "ab"]
    until(lambda: min(min(counted(replica)) for replica in new) >= 0, *new)
    for replica in new:
        replica.finish()
    check(tmp_path, *new)
    replay = verify(tmp_path, new[0])
    assert replay.checked.steps == replay.state.num_outer and not replay.notes


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


BAD = (damaged, lambda data: data[:-3], lambda data: data * 9, lambda data: None)
"""Ways to spoil a share: damaged, cut, too long, absent."""


def test_a_bad_share_is_left_out_of_its_average_and_of_no_other(tmp_path, monkeypatch) -> None:
    create = Store.create

    async def bad_create(self, name: str, data, **limits):
        """Share 1 of each payload of replica 1 is spoilt on its way, each time in another way."""
        if match := re.fullmatch(r"payloads/1/(\d+)-1", name):
            changed = BAD[int(match[1]) % len(BAD)](b"".join(data))
            return None if changed is None else await create(self, name, changed, **limits)
        return await create(self, name, data, **limits)

    monkeypatch.setattr(Store, "create", bad_create)
    # Never alone in an outer step, b leaves all averages to a: in its own memory its share is sound.
    a, b = (Replica(str(tmp_path), name=name, patience=1 << 30, **CUT) for name in "ab")
    averager_of(b)._turn = lambda *_: 1 << 99
    until(lambda: min(counted(a) + counted(b)) >= P, a, b)
    b.vanish()
    a.finish()
    run = check(tmp_path, a)
    num_counted = sum(c["replica"] == 1 for c in run.contributions)
    replay = verify(tmp_path, a)
    assert replay.checked.steps == replay.state.num_outer and len(replay.notes) == num_counted >= len(BAD)
    assert all(re.search(r"averages/\d+/1 leaves out replica 1: payload", note) for note in replay.notes)


@pytest.mark.slow
def test_a_replica_that_comes_back_after_all_was_deleted_takes_the_snapshot(tmp_path) -> None:
    settings = {"combine": "reduce_scatter", "num_shares": R, "snapshot_rounds": 1}
    away, ours = (Replica(str(tmp_path), name=name, patience=0, **settings) for name in ("away", "ours"))
    until(lambda: min(counted(away) + counted(ours)) >= P, away, ours)
    averager, gate = averager_of(away), threading.Event()
    share = averager._share

    async def late_share(*arguments):
        while not gate.is_set():
            await asyncio.sleep(0.002)
        return await share(*arguments)

    averager._share = late_share
    first = away.exchange.state.number  # the content of later entries comes late
    until(lambda: min(ours.rounds) >= max(away.rounds) + 4, ours)
    late = [AVERAGE.name(number, 0) for number in range(first, first + P + 1)]
    until(lambda: not any((tmp_path / name).exists() for name in late), ours)
    gate.set()
    until(lambda: min(map(int.__sub__, away.rounds, ours.rounds)) >= 0, away)
    for p, outer_p in enumerate(away.outer()):
        if away.rounds[p] == ours.rounds[p]:
            np.testing.assert_array_equal(outer_p, ours.outer()[p])
    away.finish()
    ours.finish()


def test_an_entry_that_snapshots_stand_for_is_not_waited_for(tmp_path) -> None:
    """A replica looks for its averages once, and makes none again."""
    replica = Replica(str(tmp_path), **(CUT | {"snapshot_rounds": 1}))
    first = []
    until(lambda: first or first.extend(replica.exchange.state.fragments[0].since), replica)
    until(lambda: first[0] not in replica.exchange.state.fragments[0].since, replica)
    until(lambda: not list(tmp_path.glob(AVERAGE.name(first[0].number, 0))), replica)
    averager = averager_of(replica)
    replica.finish()
    averager._objects.store.requests.clear()
    assert asyncio.run(averager.of_entry(first[0])) is None and averager._objects.store.requests == {"get": 1}


class Member:
    """One of several replicas of a model of one large fragment."""

    def __init__(self, url: str, name: str, **settings) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(40_000, 1)
        self.exchange = diloco.StoreRendezvous(url, name=name, poll_seconds=0.004, **settings)
        self.engine = diloco.StreamingDiLoCo(
            self.model,
            fragments=diloco.whole(self.model),
            schedule=diloco.Schedule(sync_every=6, num_fragments=1, overlap_steps=5),
            wire="fp32",
            combine="reduce_scatter",
            rendezvous=self.exchange,
        )

    def step(self) -> None:
        inner_step(self.model, self.exchange.replica, self.engine.num_steps + 1)
        self.engine.step(tokens=8)


def test_of_four_replicas_each_downloads_half_of_what_gather_takes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("diloco.rendezvous.payloads._POLLS_PER_TURN", 1e6)  # nobody is taken for dead
    M, num_rounds = 4, 2
    several = [Member(str(tmp_path), name, quorum="all", num_shares=M) for name in "abcd"]
    for _ in range(6 * num_rounds + 5):  # nobody sends for the next round
        for member in several:
            member.step()
    share = codec("fp32").payload_bytes(share_size(40_001, M))  # gather would take M − 1 payloads of M of these
    for member in several:
        member.exchange.leave()
        assert member.engine.bytes_received == num_rounds * (M - 1) * (share + share)
        in_log = member.exchange.store.bytes_down - member.engine.bytes_received
        assert 0 < in_log < share, "entries and headers are small"
