"""The replay of a run whose fragments are cut into shares: every average is made again, and who lied is named."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.engine.test_elastic import counted, until
from tests.rendezvous.replicas import P, Replica
from tests.rendezvous.test_averager import CUT, R, averager_of, check, headers, verify

from diloco.errors import FileError
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.objects import AVERAGE, PAYLOAD, MadeAverage, average_of, header_of
from diloco.rendezvous.payloads import Averager


def two(folder: Path) -> tuple[Replica, Replica]:
    return Replica(str(folder), name="a", **CUT), Replica(str(folder), name="b", **CUT)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Replica]:
    folder = tmp_path_factory.mktemp("whole")
    a, b = two(folder)
    until(lambda: min(counted(a) + counted(b)) >= P, a, b)
    a.finish()
    b.finish()
    check(folder, a, b)
    return folder, b  # which has waited for the last decision


def copied(whole_run: tuple[Path, Replica], tmp_path: Path) -> tuple[Path, Replica]:
    shutil.copytree(whole_run[0], tmp_path / "run")
    return tmp_path / "run", whole_run[1]


def first_average(folder: Path) -> Path:
    """The average of share 1 in the first outer entry."""
    return min((folder / "averages").iterdir()) / "1"


def test_averages_that_were_lost_are_made_again(whole_run, tmp_path) -> None:
    folder, last = copied(whole_run, tmp_path)
    shutil.rmtree(folder / "averages")
    replay = verify(folder, last)
    assert replay.checked.steps == replay.state.num_outer > P and not replay.notes
    theta = np.concatenate([value.reshape(-1).numpy() for value in replay.parameters().values()])
    np.testing.assert_array_equal(theta, np.concatenate(last.outer()))
    assert replay.checked.payloads == (1 + R) * len(check(folder).contributions)  # headers and shares


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_an_average_or_a_share_that_was_tampered_with_is_named(whole_run, tmp_path) -> None:
    folder, a = copied(whole_run, tmp_path)
    average = first_average(folder)
    number, true = int(average.parent.name), average.read_bytes()
    name = f"averages/{average.parent.name}/1"
    damage(average)
    with pytest.raises(FileError, match=f"entry {number} of the log: average {name} can't be used: its body does"):
        verify(folder, a)
    shutil.copy(average.with_name("0"), average)
    with pytest.raises(FileError, match=f"average {name} can't be used: it has share 0, where 1 is expected"):
        verify(folder, a)
    average.write_bytes(true)
    seq = min(c["seq"] for c in check(folder).contributions if c["replica"] == 1)
    share = folder / f"{PAYLOAD.name(1, seq)}-1"
    damage(share)
    reason = f"counts a share that is not sound: payload payloads/1/{share.name} can't be used: its body does not"
    with pytest.raises(FileError, match=rf"entry \d+ of the log: averages/\d+/1, by replica \d, {reason}"):
        verify(folder, a)
    share.unlink()
    with pytest.raises(FileError, match=rf"is not sound: payload payloads/1/{share.name} is not in the store"):
        verify(folder, a)


def lie(averager: Averager) -> None:
    """Let a replica upload other averages than it should: with a sign changed."""

    async def made(ref, share):
        state = averager._access.state
        form, members = averager._objects.form, (c.replica for c in ref.body.contributions)
        fetched = [await averager._contributed(ref, c, share) for c in ref.body.contributions]
        made = average_of(state, form, ref.body, share, dict(zip(members, fetched, strict=True)))
        payload = form.second.encode(-made.values)
        false = MadeAverage(payload, -made.values, made.norm, {})
        header = header_of(state, form, ref, share, false, replica=0, left_out=())
        data = AVERAGE.seal(header, Signer()) + payload.numpy().tobytes()
        await averager._objects.store.create(AVERAGE.name(ref.number, share), data)
        return await averager._stored(ref, share)

    averager._made = made


def test_a_false_average_is_everybodys_and_a_replay_names_who_made_it(tmp_path) -> None:
    a, b = two(tmp_path)
    lie(averager_of(a))
    until(lambda: min(counted(a) + counted(b)) >= P, a, b)
    for p, rounds in enumerate(a.rounds):
        if rounds == b.rounds[p]:
            np.testing.assert_array_equal(a.outer()[p], b.outer()[p])
    a.finish()
    b.finish()
    reason = "is not the average of what the entry counts: replica 0 made it"
    with pytest.raises(FileError, match=rf"entry \d+ of the log: averages/\d+/\d {reason}"):
        verify(tmp_path, a)


def test_who_leaves_out_a_sound_share_is_noted(tmp_path) -> None:
    a, b = two(tmp_path)
    averager, contributed = averager_of(a), averager_of(a)._contributed

    async def leave_out(ref, part, share):
        return None if part.replica == 1 and share == 2 else await contributed(ref, part, share)

    averager._contributed = leave_out
    until(lambda: min(counted(a) + counted(b)) >= P and any(h.left_out for h in headers(tmp_path, a)), a, b)
    a.finish()
    b.finish()
    replay = verify(tmp_path, a)
    assert replay.checked.steps == replay.state.num_outer
    sentence = r"averages/\d+/2, by replica 0, leaves out replica 1, whose share is sound: replica 0 could not"
    assert replay.notes and all(re.search(sentence, note) for note in replay.notes)
