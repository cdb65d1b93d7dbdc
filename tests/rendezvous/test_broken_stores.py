"""Stores that lose, change or hide what they hold while replicas train: each ends with a sentence, or goes on."""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.exceptions import AlreadyExistsError
from tests.engine.test_elastic import counted, until
from tests.rendezvous.handwritten import Handwritten
from tests.rendezvous.replay import chain
from tests.rendezvous.replicas import P, Replica

import diloco
from diloco.errors import DilocoError, ExchangeError, UserError
from diloco.rendezvous.log.entries import Leave, Snapshot
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.log.log import ENTRY, begun, sealed_entry
from diloco.rendezvous.objects import PAYLOAD, seal_snapshot, snapshot_name
from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store
from diloco.rendezvous.store_rendezvous import Wish, join


def entries(url: Path) -> list[str]:
    """The names in the log."""
    return sorted(path.name for path in (url / "log").iterdir() if path.name.isdigit())


def end_of(replica: Replica, seconds: float = 20.0) -> str:
    """The sentence with which a replica ends."""
    with pytest.raises(DilocoError) as error:
        until(lambda: False, replica, seconds=seconds)
    return str(error.value)


def quiet(url: Path) -> list[str]:
    """The names in the log, once nobody has written to it for half a second."""
    names: list[str] = []
    while names != (names := entries(url)):
        time.sleep(0.5)
    return names


def lose_the_newest(url: Path) -> None:
    for name in entries(url)[-3:]:
        (url / "log" / name).unlink()


def change_the_newest(url: Path) -> None:
    path = url / "log" / entries(url)[-1]
    path.write_bytes(path.read_bytes().replace(b'"nonce":"', b'"nonce":"0', 1))


def put_an_old_copy_back(url: Path) -> None:
    shutil.rmtree(url)
    shutil.copytree(url.with_name("copy"), url)


@pytest.mark.parametrize("break_it", [change_the_newest, put_an_old_copy_back])
def test_replicas_name_an_entry_that_the_store_has_lost_and_write_no_other(break_it, tmp_path: Path) -> None:
    url = tmp_path / "run"
    replicas = [Replica(str(url), name=name) for name in "ab"]
    until(lambda: len(entries(url)) > 10, *replicas)
    quiet(url)
    shutil.copytree(url, tmp_path / "copy", ignore=shutil.ignore_patterns("*#*"))
    until(lambda: len(entries(url)) > 20, *replicas)
    newest = int(quiet(url)[-1])
    break_it(url)
    left = entries(url)
    for replica in replicas:
        assert f"entry {newest} of the log" in end_of(replica)
    assert entries(url) == left, "nobody writes beyond a hole"


def test_a_replica_that_has_nothing_to_write_looks_at_the_newest_entry(tmp_path: Path) -> None:
    ours = Replica(str(tmp_path))
    until(lambda: min(counted(ours)) >= 0, ours)
    newest, get, names = quiet(tmp_path)[-1], Store.get, []

    async def noted(self, name: str, **limits):
        names.append(name)
        return await get(self, name, **limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "get", noted)
        begin = time.monotonic()
        time.sleep(1.0)
    polls = (time.monotonic() - begin) / ours.exchange._seat.log_thread._pace.poll_seconds
    assert 1 <= names.count(f"log/{newest}") <= 1 + polls / 60
    (tmp_path / "log" / newest).unlink()
    deadline = time.monotonic() + 10
    while ours.exchange._seat.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert f"entry {int(newest)} of the log is not in {tmp_path} any more" in ours.exchange._seat.failure
    ours.vanish()


def test_a_store_that_is_put_back_while_an_entry_is_on_its_way(tmp_path: Path, monkeypatch) -> None:
    """As where a file server comes back without its last writes, while a replica waits for it."""
    ours = Replica(str(tmp_path))
    until(lambda: min(counted(ours)) >= 0, ours)
    newest, create = int(quiet(tmp_path)[-1]), Store.create

    async def late(self, name: str, *arguments, **limits):
        if name == ENTRY.name(newest + 1):
            lose_the_newest(tmp_path)
        return await create(self, name, *arguments, **limits)

    monkeypatch.setattr(Store, "create", late)
    assert f"entry {newest} of the log is not in" in end_of(ours)
    assert int(entries(tmp_path)[-1]) == newest + 1


def test_a_state_that_knows_more_than_the_log_is_refused(tmp_path: Path) -> None:
    url = tmp_path / "run"
    ours = Replica(str(url), snapshot_rounds=1000)
    until(lambda: min(ours.rounds) >= 1, ours)
    quiet(url)
    shutil.copytree(url, tmp_path / "copy", ignore=shutil.ignore_patterns("*#*"))
    known = len(entries(url))
    until(lambda: len(entries(url)) > known + 2 * P and min(ours.rounds) >= 3, ours)
    state = ours.engine.state_dict()
    ours.vanish()
    put_an_old_copy_back(url)
    again = Replica(str(url))
    with pytest.raises(UserError, match=r"knows round \d+ of fragment 0, and the run's log ends at round"):
        again.engine.load_state_dict(state)
    again.vanish()


@pytest.mark.parametrize("is_first", [False, True])
def test_nobody_joins_a_log_with_a_hole(is_first: bool, tmp_path: Path) -> None:
    """After the newest index, from which a joiner reads entry by entry; or where it would create a run."""
    run = Handwritten(tmp_path / "run")
    run.train(4, index_after=2)
    gone = 0 if is_first else max(int(path.name) for path in (run.directory / "index").iterdir()) + 1
    create, _ = begun(run.path(ENTRY.name(0)).read_bytes())
    run.path(ENTRY.name(gone)).unlink()
    left = entries(run.directory)
    wish = Wish(
        name="z",
        rules=create.rules,
        asked=frozenset(),
        facts=create.facts,
        step_tokens=8,
        most_steps=100,
        timeout_seconds=5,
    )
    with pytest.raises(DilocoError, match=f"entry {gone} of the log is missing, and log/{gone + 1:010d} is there"):
        asyncio.run(join(Store.open(str(run.directory)), Signer(), wish))
    assert entries(run.directory) == left


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def test_a_pipe_under_the_next_name_ends_replicas_and_a_replay(tmp_path: Path) -> None:
    ours = Replica(str(tmp_path))
    until(lambda: min(counted(ours)) >= 0, ours)
    number = int(quiet(tmp_path)[-1]) + 1
    make_pipe(tmp_path / ENTRY.name(number))
    sentence = f"entry {number} of the log can't be used: {ENTRY.name(number)} in {tmp_path} is a pipe or a device"
    assert sentence in end_of(ours)
    started = time.monotonic()
    with pytest.raises(DilocoError, match=sentence):
        replayed(str(tmp_path))
    assert time.monotonic() - started < 5


def test_a_store_that_says_both_exists_and_absent_is_an_outage(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("diloco.rendezvous.store._SECONDS_TO_WARNING", 0.0)
    ours = Replica(str(tmp_path), max_local_steps=100)
    until(lambda: min(counted(ours)) >= 0, ours)
    put = Store._put

    async def exists(self, name: str, parts):
        if name.startswith("log/"):
            raise AlreadyExistsError(f"Object at location {name} already exists")
        await put(self, name, parts)

    monkeypatch.setattr(Store, "_put", exists)
    with caplog.at_level(logging.WARNING, "diloco"):
        sentence = end_of(ours)
    number = int(entries(tmp_path)[-1]) + 1
    reason = "the store says that it exists, and then that it does not"
    assert f"can't create {ENTRY.name(number)} in {tmp_path}: {reason}" in sentence
    assert "101 inner steps, more than max_local_steps=100" in sentence
    assert sum(reason in record.getMessage() for record in caplog.records) == 1, "it is said once before"


def make_garbage(path: Path) -> None:
    path.write_bytes(b"squatted")


def make_large(path: Path) -> None:
    path.write_bytes(bytes(1 << 24))


CUT = {"combine": "reduce_scatter", "num_shares": 4}


@pytest.mark.parametrize(
    ("makes", "suffix", "settings"),
    [
        ((Path.mkdir, make_pipe), "", {}),
        pytest.param((make_garbage, make_large), "-2", CUT, marks=pytest.mark.slow),
    ],
)
def test_a_payload_whose_name_is_taken_gets_the_next(
    makes: tuple[Callable[[Path], object], ...], suffix: str, settings: dict[str, Any], tmp_path: Path, caplog
) -> None:
    replicas = [Replica(str(tmp_path), name=name, snapshot_rounds=1000, **settings) for name in "ab"]
    until(lambda: min(counted(replicas[0])) >= 0, *replicas)
    first = max(counted(replicas[0])) + 6
    taken = [f"{PAYLOAD.name(0, number)}{suffix}" for number in (first, first + 1)]
    for make, name in zip(makes, taken, strict=True):
        make(tmp_path / name)
    with caplog.at_level(logging.WARNING, "diloco"):
        warnings = {f"{name} was written by somebody else: the next number is taken" for name in taken}
        until(lambda: warnings <= {record.getMessage() for record in caplog.records}, *replicas)
        until(lambda: min(counted(replicas[0])) > first + 6, *replicas)
    for replica in replicas:
        replica.finish()
    parts = [part for entry in chain(tmp_path) for part in entry["body"].get("contributions", ())]
    assert not {first, first + 1} & {part["seq"] for part in parts if part["replica"] == 0}


def test_a_replica_whose_leave_was_forged_says_so(tmp_path: Path) -> None:
    ours = Replica(str(tmp_path), name="ours")
    until(lambda: min(counted(ours)) >= 0, ours)
    while True:
        state = ours.exchange.state
        forged = sealed_entry(Leave(finished=False), Signer(), author=0, previous=state.previous)
        path = tmp_path / ENTRY.name(state.number)
        path.with_suffix(".new").write_bytes(forged)
        with suppress(FileExistsError):  # its thread was first
            os.link(path.with_suffix(".new"), path)
            break
    path.with_suffix(".new").unlink()
    sentence = end_of(ours, seconds=5)
    assert f"entry {state.number} of the log lets ours leave, and ours did not write it" in sentence
    with pytest.raises(diloco.ExchangeError):
        ours.step()


@pytest.mark.slow
def test_a_replica_that_loads_a_false_snapshot_ends_at_the_next_entry(tmp_path: Path) -> None:
    """As a member could upload one; the entry that two others write names the digest of the right parameters."""
    *ours, liar = (Replica(str(tmp_path), name=name, snapshot_rounds=1000) for name in ("a", "b", "liar"))
    until(lambda: min(ours[0].rounds) >= 2, *ours, liar)
    liar.vanish()
    quiet(tmp_path)
    until(lambda: ours[0].exchange.state.number == len(entries(tmp_path)))
    state, number = ours[0].exchange.state, liar.exchange.replica
    last_round = state.fragments[0].round
    vectors = {kind: torch.ones(4) for kind in ("outer", "velocity")}
    buffers, digest = seal_snapshot(vectors)
    body = Snapshot(fragment=0, round=last_round, sha256=digest)
    for name, parts in (
        (snapshot_name(0, last_round, digest), buffers),
        (ENTRY.name(state.number), [sealed_entry(body, Signer(), author=number, previous=state.previous)]),
    ):
        assert asyncio.run(Store.open(str(tmp_path)).create(name, parts)) is None
    late = Replica(str(tmp_path), name="late")
    assert (late.outer()[0] == 1).all()
    sentences: list[str] = []

    def step() -> bool:
        try:
            late.step()
        except DilocoError as error:
            sentences.append(str(error))
        return bool(sentences)

    until(step, *ours)
    assert "outer parameters of fragment 0" in sentences[0]
    until(lambda: min(replica.rounds[0] for replica in ours) > last_round + 1, *ours)
    for replica in ours:
        replica.finish()


def test_an_entry_that_is_lost_while_a_snapshot_is_named_is_noticed(tmp_path: Path, monkeypatch) -> None:
    create, lost = Store.create, []

    async def losing(self: Store, name: str, data: bytes, **options: Any) -> bytes | None:
        there = await create(self, name, data, **options)
        if name.startswith("log/") and b'"snapshot"' in bytes(data)[:400] and not lost and there is None:
            lost.append(int(name[4:]) - 1)
            (tmp_path / ENTRY.name(lost[0])).unlink()
        return there

    monkeypatch.setattr(Store, "create", losing)
    ours = Replica(str(tmp_path), name="ours", snapshot_rounds=2)
    with pytest.raises(ExchangeError) as caught:
        until(lambda: bool(lost) and ours.exchange.state.number > lost[0] + 60, ours)
    assert f"entry {lost[0]} of the log is not in" in str(caught.value)
