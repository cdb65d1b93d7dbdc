"""The newest index as a joiner reads it: it can't hide who was shut out. Snapshots: test_elastic.py."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.rendezvous.handwritten import Handwritten

from diloco.rendezvous import archive
from diloco.rendezvous.archive import newest_state, write_index
from diloco.rendezvous.entries import Keys, LogError, name_of
from diloco.rendezvous.keys import KeyFile, write_key
from diloco.rendezvous.log import begun
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.store import Store, StoreUnreachableError


@pytest.fixture
def run(tmp_path: Path) -> Handwritten:
    """Two replicas with keys, a round of both, the revocation of the second, and a round of the first."""
    for name in "ab":
        write_key(tmp_path / name)
    run = Handwritten(tmp_path / "run", signers=[KeyFile(tmp_path / name) for name in "ab"])
    run.join("a")
    run.join("b")
    run.step(0, [run.send(0, replica) for replica in (0, 1)])
    run.append(Keys(revoked=(run.signers[1].public,)), author=-1, signer=run.signers[0])
    return run


def joined_from(run: Handwritten) -> RunState:
    first = begun((run.directory / name_of(0)).read_bytes())
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


def test_a_stray_file_and_an_index_that_was_deleted_keep_nobody_out(run: Handwritten, monkeypatch) -> None:
    run.index()
    for name in ("notes.txt", "0000000099.bak"):
        (run.directory / "index" / name).write_text("by hand")
    assert joined_from(run) == run.state
    list_all = Store.list

    async def list_late(store: Store, prefix: str, **limits: float) -> list[tuple[str, int]]:
        return [*await list_all(store, prefix, **limits), ("index/0000000099", 1)]

    monkeypatch.setattr(Store, "list", list_late)
    monkeypatch.setattr(archive, "_LISTING_SECONDS", 0.001)
    assert joined_from(run) == run.states[0], "the log is read from its beginning"


def test_what_can_not_be_deleted_now_is_left_to_the_next(run: Handwritten, monkeypatch, caplog) -> None:
    async def list_in_vain(store: Store, prefix: str, **limits: float) -> list[tuple[str, int]]:
        raise StoreUnreachableError("can't list payloads within 60 s")

    monkeypatch.setattr(Store, "list", list_in_vain)
    asyncio.run(write_index(Store.open(str(run.directory)), run.signers[0], run.state, author=0))
    assert "can't list payloads within 60 s: what nobody needs is deleted later" in caplog.text
    assert (run.directory / "index" / f"{run.state.number:010d}").exists()
