import asyncio
from pathlib import Path

import pytest
from tests.cli.commands import refusal
from tests.rendezvous.cases import AMOUNTS

from diloco.cli.main import main
from diloco.files import sha256
from diloco.rendezvous.log.entries import (
    FORMAT,
    Close,
    Create,
    Join,
    Keys,
    Leave,
    Rules,
)
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.log.log import ENTRY, Log, first_entry, sealed_entry
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import Store


class Run:
    """A run in a directory, created by the key `creator`, with replica 0 of the key `first`."""

    def __init__(self, folder: Path) -> None:
        self.url = folder / "run"
        (self.url / "log").mkdir(parents=True)
        for name in ("creator", "first", "second"):
            write_key(folder / name)
        self.signers = {name: Signer.of_file(folder / name) for name in ("creator", "first", "second")}
        self.previous, self.number, self.keys = "", 0, 0

    def write(self, body, author: int, signer: Signer) -> bytes:
        data = sealed_entry(body, signer, author=author, previous=self.previous, keys=self.keys)
        (self.url / ENTRY.name(self.number)).write_bytes(data)
        self.keys = self.number if isinstance(body, Keys) else self.keys
        self.previous, self.number = sha256(data), self.number + 1
        return data

    def create(self, signer: Signer, *allowed: str) -> None:
        rules = {"rules": Rules(num_fragments=2), "allowed": allowed}
        self.write(Create(format=FORMAT, facts={}, creator=signer.public, **rules), -1, signer)

    def key(self, name: str) -> str:
        return self.signers[name].public

    def entry(self, number: int) -> Keys:
        return ENTRY.open((self.url / ENTRY.name(number)).read_bytes(), "").header.body


async def state_of(url: str) -> RunState:
    store = Store.open(url)
    return await Log(store, (await first_entry(store))[1]).read_all()


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.create(run.signers["creator"], run.key("first"))
    run.write(Join(name="one", key=run.key("first"), **AMOUNTS), 0, run.signers["first"])
    monkeypatch.setenv("DILOCO_KEY", str(tmp_path / "creator"))
    return run


def test_a_new_key_is_printed_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["keys", "new"])
    printed = capsys.readouterr()
    public = printed.out.strip()
    assert public == Signer.of_file("diloco.key").public
    assert f"set DILOCO_KEY={tmp_path / 'diloco.key'} for the replica" in printed.err
    main(["keys", "show", "diloco.key"])
    assert capsys.readouterr().out.strip() == public
    assert "diloco.key exists already" in refusal(capsys, "keys", "new")
    assert "can't write nowhere/a: no such file" in _failure(capsys, "keys", "new", "nowhere/a")


def _failure(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    return capsys.readouterr().err


def test_keys_are_allowed_and_revoked_by_signed_entries(run, capsys):
    first, second = run.key("first"), run.key("second")
    main(["keys", "allow", str(run.url), second, second, first])
    assert (
        capsys.readouterr().out == f"written as entry 2 of the log; 2 keys may join the run:\n{first}\n{second}\n"
    )
    main(["keys", "allow", str(run.url), second])
    assert capsys.readouterr().out.startswith("nothing to change; 2 keys may join")
    main(["keys", "revoke", str(run.url), first])
    assert capsys.readouterr().out == f"written as entry 3 of the log; 1 key may join the run:\n{second}\n"
    main(["keys", "revoke", str(run.url), first])
    assert capsys.readouterr().out.startswith("nothing to change")
    assert f"{'a' * 64} is not among those that may join" in refusal(
        capsys, "keys", "revoke", str(run.url), "a" * 64
    )
    assert run.entry(2) == Keys(allowed=(second, first)) and run.entry(3) == Keys(revoked=(first,))
    state = asyncio.run(state_of(str(run.url)))
    assert state.allowed == (second,) and state.members[0].fenced and state.kept == (2, 3)


def test_an_entry_that_a_replica_writes_first_is_read_and_the_next_is_taken(run, monkeypatch, capsys):
    from diloco.rendezvous.store import Store

    create = Store.create

    async def raced(self, name, data, **options):
        if run.number == 2:
            run.write(Leave(finished=False), 0, run.signers["first"])
        return await create(self, name, data, **options)

    monkeypatch.setattr(Store, "create", raced)
    main(["keys", "allow", str(run.url), run.key("second")])
    assert capsys.readouterr().out.startswith("written as entry 3 of the log; 2 keys")


def test_only_the_creator_changes_who_may_join(run, tmp_path, monkeypatch, capsys):
    command = ["keys", "allow", str(run.url), run.key("second")]
    monkeypatch.setenv("DILOCO_KEY", str(tmp_path / "first"))
    assert f"the run's creator has the key {run.key('creator')}" in refusal(capsys, *command)
    monkeypatch.delenv("DILOCO_KEY")
    assert "set DILOCO_KEY to the key file of the run's creator" in refusal(capsys, *command)
    monkeypatch.setenv("DILOCO_KEY", str(tmp_path / "creator"))
    (tmp_path / "creator").chmod(0o644)
    assert "run chmod 600" in refusal(capsys, *command)
    assert not (run.url / ENTRY.name(2)).exists()


def test_a_closed_run_keeps_its_list(run, capsys):
    run.write(Leave(finished=True), 0, run.signers["first"])
    run.write(Close(outer=("0" * 16,) * 2), 0, run.signers["first"])
    for change in ("allow", "revoke"):
        assert "the run is closed: nobody can join it any more" in refusal(
            capsys, "keys", change, str(run.url), run.key("first")
        )
    assert not (run.url / ENTRY.name(4)).exists()


def test_a_run_without_keys_has_no_list(tmp_path, run, capsys):
    (tmp_path / "open").mkdir()
    plain = Run(tmp_path / "open")
    plain.create(Signer())
    assert "the run was created without keys" in refusal(capsys, "keys", "allow", str(plain.url), "a" * 64)
    assert "there is no directory" in refusal(capsys, "keys", "allow", str(tmp_path / "opne"), "a" * 64)
    assert not (tmp_path / "opne").exists()


def test_a_log_that_was_tampered_with_is_not_written_to(run, capsys):
    command = ["keys", "allow", str(run.url), run.key("second")]
    body, previous = Leave(finished=False), run.previous
    data = run.write(body, 0, run.signers["first"])
    path, at = run.url / ENTRY.name(2), data.index(b'"nonce":"') + 9
    other = b"1" if data[at : at + 1] == b"0" else b"0"
    for content, reason in [
        (data[:at] + other + data[at + 1 :], "entry 2 of the log is forged: its signature is not that of the key"),
        (sealed_entry(body, Signer(), author=0, previous=previous), "entry 2 of the log is not signed"),
        (data[:50], "entry 2 of the log can't be used"),
    ]:
        path.write_bytes(content)
        assert reason in refusal(capsys, *command)
    path.rename(run.url / ENTRY.name(3))
    assert "entry 2 of the log is missing" in refusal(capsys, *command)
    assert not path.exists()
