"""The replay of a run from its log, against a Θ made by NumPy, and on logs that were tampered with."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.rendezvous.handwritten import Handwritten
from tests.rendezvous.replicas import Replica, new_model

from diloco.errors import FileError, UserError
from diloco.rendezvous.log.entries import Body, Outer
from diloco.rendezvous.log.index import retirable
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.log.log import ENTRY, sealed_entry
from diloco.rendezvous.objects import PAYLOAD, snapshot_name
from diloco.rendezvous.replay import Replay, replayed
from diloco.rendezvous.store import StoreError


def signers(directory: Path) -> list[Signer]:
    for number in range(3):
        write_key(directory / f"key{number}")
    return [Signer.of_file(directory / f"key{number}") for number in range(3)]


def check(replay: Replay, run: Handwritten) -> None:
    theta = replay.parameters()
    assert theta.keys() == run.theta().keys()
    assert all(torch.equal(theta[name], value) for name, value in run.theta().items())
    assert replay.state == run.state


@pytest.mark.parametrize("wire", ["fp32", "e3m0", "topk:density=0.5", "sparseloco", "pulse:density=0.5"])
def test_a_replay_gives_the_bits_that_numpy_gives(wire, tmp_path) -> None:
    run = Handwritten(tmp_path / "run", wire=wire, signers=signers(tmp_path))
    run.train(5, snapshots_after=(2, 4), index_after=4)
    replay = replayed(str(run.directory), initial=lambda facts: run.initial)
    check(replay, run)
    done = replay.checked
    assert (done.entries, done.rounds, done.steps) == (run.state.number, 10, 10)
    assert (done.payloads, done.retired, done.snapshots, done.indexes) == (10 * 2 + 2 * 3, 0, 4, 1)
    assert not replay.notes


def test_without_initial_parameters_the_outer_parameters_are_checked_from_a_snapshot_on(tmp_path) -> None:
    run = Handwritten(tmp_path / "run", weights="tokens")
    run.train(6, snapshots_after=(2, 4))
    replay = replayed(str(run.directory))
    check(replay, run)
    assert (replay.checked.rounds, replay.checked.steps) == (12, 8)
    assert "from the oldest snapshots on" in replay.notes[0]
    young = Handwritten(tmp_path / "young")
    young.train(2)
    replay = replayed(str(young.directory))
    assert (replay.checked.payloads, replay.checked.steps) == (8, 0)
    assert "fragments 0, 1 not at all" in replay.notes[0]
    with pytest.raises(UserError, match="give the run's initial parameters"):
        replay.parameters()
    with pytest.raises(UserError, match="not the parameters with which the run began"):
        replayed(str(young.directory), initial=lambda facts: {name: v + 1 for name, v in run.initial.items()})


def test_from_the_newest_index_and_snapshots_a_replay_reads_little(tmp_path) -> None:
    run = Handwritten(tmp_path / "run", signers=signers(tmp_path))
    run.train(8, snapshots_after=(2, 4, 6), index_after=6)
    num_retired = run.retire()
    replay = replayed(str(run.directory), from_snapshot=True)
    check(replay, run)
    assert replay.checked.entries == 1 + 4 and replay.checked.steps == replay.checked.rounds == 4
    whole = replayed(str(run.directory), initial=lambda facts: run.initial)
    check(whole, run)
    assert whole.checked.retired == num_retired > 0
    assert whole.checked.rounds == whole.checked.steps == 8  # the oldest snapshots are of round 4
    for number in range(1, run.state.number - 5):
        run.path(ENTRY.name(number)).unlink()
    check(replayed(str(run.directory), from_snapshot=True), run)


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and old != new
    path.write_bytes(data.replace(old, new, 1))


def change_an_entry(run: Handwritten) -> None:
    rewrite(run.path(ENTRY.name(4)), b'"tokens":150', b'"tokens":151')


def remove_an_entry(run: Handwritten) -> None:
    run.path(ENTRY.name(5)).unlink()


def remove_many_entries(run: Handwritten) -> None:
    for number in range(5, 5 + 40):
        run.path(ENTRY.name(number)).unlink(missing_ok=True)
    run.path(ENTRY.name(60)).write_bytes(b"")


def cut_an_entry(run: Handwritten) -> None:
    path = run.path(ENTRY.name(4))
    path.write_bytes(path.read_bytes()[:-70])


def insert_an_entry(run: Handwritten) -> None:
    for number in range(run.state.number, 5, -1):
        run.path(ENTRY.name(number - 1)).rename(run.path(ENTRY.name(number)))
    shutil.copy(run.path(ENTRY.name(4)), run.path(ENTRY.name(5)))


def swap_two_entries(run: Handwritten) -> None:
    third, fourth = run.path(ENTRY.name(3)), run.path(ENTRY.name(4))
    first, second = third.read_bytes(), fourth.read_bytes()
    third.write_bytes(second)
    fourth.write_bytes(first)


def forge_a_signature(run: Handwritten) -> None:
    path = run.path(ENTRY.name(4))
    line, _, signature = path.read_bytes().partition(b"\n")
    path.write_bytes(line + b"\n" + (b"0" if signature[:1] != b"0" else b"1") + signature[1:])


def damage_a_payload(run: Handwritten) -> None:
    path = run.path(PAYLOAD.name(1, 0))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def swap_two_payloads(run: Handwritten) -> None:
    shutil.copy(run.path(PAYLOAD.name(0, 0)), run.path(PAYLOAD.name(1, 0)))


def lose_a_payload(run: Handwritten) -> None:
    run.path(PAYLOAD.name(1, 0)).unlink()


def lose_a_snapshot(run: Handwritten) -> None:
    run.snapshot(0)
    shutil.rmtree(run.path("snapshots"))


def lie_in_a_snapshot(run: Handwritten) -> None:
    run.snapshot(0, wrong=True)


def lie_in_an_index(run: Handwritten) -> None:
    run.index(positions={0: 5})


def lie_about_theta(run: Handwritten) -> None:
    sent = [run.send(0, 0, stale=1)]
    run.outer[0][0] += 1
    run.step(0, sent)


def send_against_another_theta(run: Handwritten) -> None:
    run.past[0][-1][0] += 1
    run.step(0, [run.send(0, 0)])


def write_unchecked(run: Handwritten, body: Body, author: int) -> None:
    """Write the next entry as a replica would that does not keep the rules."""
    data = sealed_entry(body, run.signer(author), author=author, previous=run.state.previous, keys=run.state.keys)
    run.path(ENTRY.name(run.state.number)).write_bytes(data)


def claim_tokens_that_cannot_be(run: Handwritten) -> None:
    contribution, _ = run.send(0, 1, tokens=1 << 39)
    parts = {"fragment": 0, "round": 4, "before": "0" * 16, "contributions": (contribution,)}
    write_unchecked(run, Outer(**parts), 1)


def step_after_the_end(run: Handwritten) -> None:
    contribution, _ = run.send(0, 1)
    run.close()
    parts = {"fragment": 0, "round": 4, "before": "0" * 16, "contributions": (contribution,)}
    write_unchecked(run, Outer(**parts), 1)


def close_with_another_theta(run: Handwritten) -> None:
    run.close(wrong=True)


VIOLATIONS = [
    (change_an_entry, "entry 4 of the log is forged"),
    (cut_an_entry, "entry 4 of the log can't be used"),
    (remove_an_entry, "entry 5 of the log is missing"),
    (remove_many_entries, "entry 5 of the log is missing"),
    (insert_an_entry, "entry 5 of the log"),
    (swap_two_entries, "entry 3 of the log does not follow the entry before it"),
    (forge_a_signature, "entry 4 of the log is forged"),
    (damage_a_payload, "entry 3 of the log counts a payload that is not sound: payload payloads/1/00000000"),
    (swap_two_payloads, "entry 3 of the log counts a payload that is not sound: payload payloads/1/00000000"),
    (lose_a_payload, "entry 3 of the log counts payloads/1/00000000, which is not in the store"),
    (lose_a_snapshot, "entry 10 of the log names snapshots/0/3-"),
    (lie_in_a_snapshot, "snapshot of entry 10 of the log is not what the entries before it make"),
    (lie_in_an_index, "index 10 of the log does not say what the entries 0 to 9 say"),
    (lie_about_theta, "entry 10 of the log: the outer parameters of fragment 0 after round 3"),
    (
        claim_tokens_that_cannot_be,
        "entry 10 of the log counts payload 6 of replica 1, but it claims 54975581388",
    ),
    (step_after_the_end, "entry 12 of the log follows the entry that closes the run"),
    (close_with_another_theta, "entry 11 of the log: the outer parameters of fragment 0 after round 3 are"),
    (send_against_another_theta, "entry 10 of the log counts payloads/0/00000006, which was taken against other"),
]


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory) -> Handwritten:
    folder = tmp_path_factory.mktemp("sound")
    run = Handwritten(folder / "run", signers=signers(folder))
    run.train(3)
    assert run.state.number == 10
    replayed(str(run.directory), initial=lambda facts: run.initial)
    return run


@pytest.mark.parametrize(("tamper", "sentence"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_that_was_tampered_with_is_refused(tamper, sentence, sound_run, tmp_path) -> None:
    run = sound_run.copy_to(tmp_path / "run")
    tamper(run)
    with pytest.raises(FileError, match=sentence.replace("(", r"\(")):
        replayed(str(run.directory), initial=lambda facts: run.initial)


@pytest.mark.parametrize(("with_initial", "retires"), [(True, False), (False, False), (False, True)])
def test_a_snapshot_that_was_not_retired_is_checked_however_old(with_initial, retires, tmp_path) -> None:
    """Repeated outer steps check all of it; without them, the digest of Θ in the log."""
    run = Handwritten(tmp_path / "run")
    run.train(1)
    wrong = run.snapshot(0, wrong=True)
    run.train_on(8, snapshots_after=(3, 5, 7))
    if retires:
        run.retire()
    sentence = f"the snapshot of entry {wrong} of the log"
    with pytest.raises(FileError, match=sentence):
        replayed(str(run.directory), initial=lambda facts: run.initial if with_initial else None)
    for path in run.path("snapshots/0").glob("1-*"):
        path.unlink()
    replay = replayed(str(run.directory), initial=lambda facts: run.initial if with_initial else None)
    unchecked = [note for note in replay.notes if "snapshots/" in note]
    assert replay.checked.snapshots == 6 and len(unchecked) == (not with_initial)
    assert with_initial or unchecked[0].count("snapshots/") == 2, "those after round 3, of which Θ alone is known"


def test_what_diloco_has_not_written_is_named_as_foreign(tmp_path) -> None:
    run = Handwritten(tmp_path / "run")
    run.train(3, snapshots_after=(2,))
    for name in ("log/zzz", "log/abc.tmp", f"snapshots/0/2-{'0' * 64}"):
        run.path(name).write_bytes(b"foreign")
    replay = replayed(str(run.directory), initial=lambda facts: run.initial)
    check(replay, run)
    assert list(replay.notes) == [
        "log/abc.tmp, log/zzz: diloco has not written them, and nobody reads them",
        f"no entry names snapshots/0/2-{'0' * 64}, so that nobody reads it",
    ]


def test_a_rule_that_is_not_diloco_s_own_is_not_repeated(tmp_path) -> None:
    other = Handwritten(tmp_path / "other", facts={"outer rule": "Mine"})
    other.train(1)
    replay = replayed(str(other.directory))
    assert "Mine, is not diloco's own" in replay.notes[0] and replay.checked.payloads == 4


def test_a_snapshot_that_is_retired_meanwhile_is_no_violation(tmp_path: Path, monkeypatch) -> None:
    ours = Replica(str(tmp_path), name="ours", snapshot_rounds=2)
    folder = tmp_path / "snapshots"
    while not folder.is_dir() or min((len([*each.iterdir()]) for each in folder.iterdir()), default=0) < 3:
        ours.step(pause_seconds=0.003)
    ours.exchange.abort("it stays as it is")
    find = Replay._find_snapshots

    async def find_then_retire(self: Replay) -> None:
        await find(self)
        for p, log in enumerate(self.state.fragments):
            needed = {snapshot_name(p, ref.round, ref.sha256) for ref in log.snapshots}
            for path in (folder / str(p)).iterdir():
                if str(path.relative_to(tmp_path)) not in needed:
                    path.unlink()

    monkeypatch.setattr(Replay, "_find_snapshots", find_then_retire)
    assert replayed(str(tmp_path), initial=lambda _: dict(new_model().named_parameters())).checked.steps


def test_a_payload_that_is_retired_meanwhile_is_no_violation(tmp_path: Path, monkeypatch) -> None:
    run = Handwritten(tmp_path / "run", signers=signers(tmp_path))
    run.train(3)
    find = Replay._find_snapshots

    async def find_while_a_payload_is_retired(self: Replay) -> None:
        await find(self)
        lose_a_payload(run)

    monkeypatch.setattr(Replay, "_find_snapshots", find_while_a_payload_is_retired)
    replay = replayed(str(run.directory), initial=lambda _: run.initial)
    assert "entry 3 of the log: a payload was retired during the check: check again" in replay.notes
    with pytest.raises(StoreError, match="went on, and deleted payloads of the newest outer steps"):
        replay.parameters()
    assert not replay.is_whole
    with pytest.raises(FileError, match="which is not in the store"):
        monkeypatch.setattr(Replay, "_find_snapshots", find)
        replayed(str(run.directory), initial=lambda _: run.initial)


@pytest.mark.parametrize(
    ("after", "has_initial"), [("_read_log", 1), ("_find_snapshots", 1), ("_find_snapshots", 0)]
)
def test_a_run_that_goes_on_while_it_is_read_is_no_violation(
    after, has_initial, tmp_path: Path, monkeypatch
) -> None:
    """All that the replay was to read is deleted, and the two snapshots after it."""
    run = Handwritten(tmp_path / "run")
    run.train(5, snapshots_after=(2, 4))
    method = getattr(Replay, after)

    async def and_go_on(self: Replay, *arguments: object) -> None:
        await method(self, *arguments)
        run.train_on(9, snapshots_after=(6, 8))
        run.retire()
        snapshots = [str(path.relative_to(run.directory)) for path in run.path("snapshots").glob("*/*")]
        for name in retirable(run.state, snapshots):
            run.path(name).unlink()

    monkeypatch.setattr(Replay, after, and_go_on)
    with pytest.raises(StoreError, match="went on, and deleted"):
        replayed(str(run.directory), initial=lambda _: run.initial if has_initial else None).parameters()
