"""The newest index as a joiner reads it: it can't hide who was shut out. Snapshots: test_elastic.py."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.rendezvous.handwritten import Handwritten

from diloco.rendezvous.log import index
from diloco.rendezvous.log.entries import Keys, LogError
from diloco.rendezvous.log.index import newest_state, write_index
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.log.log import ENTRY, begun
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.log_thread import SnapshotQueue
from diloco.rendezvous.store import Store, StoreError, StoreUnreachableError


@pytest.fixture
def run(tmp_path: Path) -> Handwritten:
    """Two replicas with keys, a round of both, the revocation of the second, and a round of the first."""
    for name in "ab":
        write_key(tmp_path / name)
    run = Handwritten(tmp_path / "run", signers=[Signer.of_file(tmp_path / name) for name in "ab"])
    run.join("a")
    run.join("b")
    run.step(0, [run.send(0, replica) for replica in (0, 1)])
    run.append(Keys(revoked=(run.signers[1].public,)), author=-1, signer=run.signers[0])
    return run


def joined_from(run: Handwritten) -> RunState:
    _, first = begun((run.directory / ENTRY.name(0)).read_bytes())
    return asyncio.run(newest_state(Store.open(str(run.directory)), first))


def test_an_index_is_read_with_all_changes_of_the_allow_list(run: Handwritten) -> None:
    run.index()
    assert joined_from(run) == run.state, "whose newest entry is the change itself"
    run.step(0, [run.send(0, 0)])
    run.index()
    assert joined_from(run) == run.state and run.state.keys == 4


def test_a_revoked_replica_can_not_hide_its_revocation(run: Handwritten) -> None:
    def forge() -> None:
        members = tuple(replace(member, fenced=False) for member in run.state.members)
        run.index(author=1, members=members, allowed=run.states[0].allowed, kept=())

    forge()
    with pytest.raises(LogError, match="index 5 of the log leaves out a change of the allow-list"):
        joined_from(run)
    run.step(0, [run.send(0, 0)])
    forge()
    with pytest.raises(LogError, match="index 6 of the log leaves out a change of the allow-list"):
        joined_from(run)


def test_a_revocation_can_not_be_hidden_behind_a_later_change(run: Handwritten) -> None:
    run.append(Keys(allowed=("ab" * 32,)), author=-1, signer=run.signers[0])
    run.index()
    assert joined_from(run) == run.state
    allowed = (*run.states[0].allowed, "ab" * 32)
    for kept, number in (((run.state.kept[-1],), run.state.kept[-1]), (run.state.kept[::-1], run.state.kept[-1])):
        run.index(author=1, **unfenced(run), allowed=allowed, kept=kept)
        with pytest.raises(LogError, match=f"leaves out a change of the allow-list before {number}"):
            joined_from(run)


def unfenced(run: Handwritten) -> dict:
    return {"members": tuple(replace(member, fenced=False) for member in run.state.members)}


FORGERIES = {
    "another run": (0, lambda run: {"run": "0" * 64}, "is of another run"),
    "a revoked author": (1, unfenced, "is by a replica whose key the run's creator has not allowed"),
    "another chain": (0, lambda run: {"previous": "0" * 64}, "does not follow entry 4"),
    "a longer list": (0, lambda run: {"allowed": run.states[0].allowed}, "has another allow-list than"),
    "a lost change": (0, lambda run: {"kept": (40,)}, "entry 40 of the log, which changes the allow-list, is"),
    "the end": (0, lambda run: {"closed": ("0" * 16,)}, "says that the run is closed"),
    "a wrong change": (0, lambda run: {"kept": (0,)}, "entry 0 of the log does not change the allow-list"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_contradicts_the_creators_entries_is_refused(forgery: str, run: Handwritten) -> None:
    author, changes, reason = FORGERIES[forgery]
    run.index(author=author, **changes(run))
    with pytest.raises(LogError, match=reason):
        joined_from(run)


def test_a_stray_file_and_an_index_that_was_deleted_keep_nobody_out(run: Handwritten, monkeypatch) -> None:
    run.index()
    for name in ("notes.txt", "0000000099.bak"):
        (run.directory / "index" / name).write_text("by hand")
    assert joined_from(run) == run.state
    list_all = Store.list

    async def list_late(store: Store, prefix: str, **limits: float) -> list[tuple[str, int]]:
        return [*await list_all(store, prefix, **limits), ("index/0000000099", 1)]

    monkeypatch.setattr(Store, "list", list_late)
    monkeypatch.setattr(index, "_LISTING_SECONDS", 0.001)
    assert joined_from(run) == run.states[0], "the log is read from its beginning"


@pytest.mark.parametrize("kind", [StoreUnreachableError, StoreError])
def test_what_can_not_be_deleted_now_is_left_to_the_next(kind, run: Handwritten, monkeypatch, caplog) -> None:
    async def list_in_vain(store: Store, prefix: str, **limits: float) -> list[tuple[str, int]]:
        raise kind("can't list payloads within 60 s")

    monkeypatch.setattr(Store, "list", list_in_vain)
    asyncio.run(write_index(Store.open(str(run.directory)), run.signers[0], run.state, author=0))
    assert "can't list payloads within 60 s: what nobody needs is deleted later" in caplog.text
    assert (run.directory / "index" / f"{run.state.number:010d}").exists()


def test_an_index_that_nobody_may_read_is_not_written(run: Handwritten, monkeypatch, caplog) -> None:
    monkeypatch.setattr("diloco.rendezvous.log.index.MOST_INDEX_BYTES", 100)
    asyncio.run(write_index(Store.open(str(run.directory)), run.signers[0], run.state, author=0))
    assert "and may have 100: joiners read the whole log" in caplog.text
    assert not (run.directory / "index").exists() and joined_from(run) == run.states[0]


def test_of_the_snapshots_that_wait_the_newest_of_each_fragment_is_uploaded(tmp_path: Path) -> None:
    """While the first is on its way, ten more of fragment 0 and one of fragment 1 are made."""
    store, log = Store.open(str(tmp_path)), SimpleNamespace(check_mounted=lambda: asyncio.sleep(0))
    create, may_upload, entries = store.create, asyncio.Event(), []

    async def held_create(name: str, *arguments, **limits) -> object:
        await may_upload.wait()
        return await create(name, *arguments, **limits)

    async def use() -> None:
        queue, vectors = SnapshotQueue(store, log), {"outer": torch.zeros(4), "velocity": torch.zeros(4)}
        work = asyncio.create_task(queue.run(entries.append))
        queue.put(0, 1, vectors)
        await asyncio.sleep(0.05)
        queue.put(1, 1, vectors)
        for last_round in range(2, 12):
            queue.put(0, last_round, vectors)
        may_upload.set()
        async with asyncio.timeout(10):
            while len(entries) < 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        work.cancel()

    store.create = held_create
    asyncio.run(use())
    assert [(entry.fragment, entry.round) for entry in entries] == [(0, 1), (1, 1), (0, 11)]
