"""Bad stores, entries and payloads: a replica loses none of its work, and the others go on."""

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.test_elastic import counted, until
from tests.rendezvous.cases import header_of
from tests.rendezvous.replay import replayed
from tests.rendezvous.replicas import H, Replica, theta0
from tests.wire import reference as wire_reference

from diloco.errors import DilocoError, ExchangeError
from diloco.rendezvous.log.keys import Signer
from diloco.rendezvous.objects import PAYLOAD
from diloco.wire import codec


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk(options)`: a file system in memory; called again, it is mounted with other options."""
    place = tmp_path / "disk"
    place.mkdir()
    is_mounted = False

    def mount(options: str) -> Path:
        nonlocal is_mounted
        options = f"remount,{options}" if is_mounted else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a file system can't be mounted here")
        is_mounted = True
        return place

    yield mount
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_read_only_directory_is_refused(small_disk: Callable[[str], Path]) -> None:
    place = small_disk("size=1m,ro")
    with pytest.raises(DilocoError, match=r"can't create check/.* in .*: read-only file system"):
        Replica(str(place))


def test_on_a_full_disk_training_goes_on_and_nothing_is_lost(small_disk: Callable[[str], Path]) -> None:
    place = small_disk("size=48k")
    ours = Replica(str(place), snapshot_rounds=100)
    until(lambda: ours.exchange.store.outage is not None, ours)
    steps, newest = ours.engine.num_steps, min(counted(ours))
    until(lambda: ours.engine.num_steps > steps + 50, ours)
    outage = ours.exchange.store.outage
    assert outage is not None and "no space left on device" in outage.trouble
    small_disk("size=4m")
    until(lambda: min(counted(ours)) > newest and ours.exchange.store.outage is None, ours)
    ours.finish()
    run = replayed(place, theta0())
    for p, theta in enumerate(ours.outer()):
        np.testing.assert_array_equal(theta, run.outer[p][-1])
    assert {c["tokens"] for c in run.contributions} != {8 * H}, "one payload held what the disk did not take"
    assert not list(place.rglob("*#*")), "nothing half written is left"


def test_an_entry_that_is_not_sound_ends_those_who_read_it_with_its_number(tmp_path) -> None:
    ours = Replica(str(tmp_path), name="ours")
    number = 2  # the log has its creation and one join
    Path(tmp_path, "log", f"{number:010d}").write_bytes(b"rogue")
    with pytest.raises(ExchangeError, match=r"entry 2 of the log can't be used"):
        until(lambda: False, ours)
    ours.vanish()


class Rogue:
    """Writes payloads in the name of a replica that has joined and is silent."""

    def __init__(self, folder: Path, replica: int, member: Replica) -> None:
        self.folder, self.replica, self.member, self.seq = folder, replica, member, 0

    def put(self, data: bytes) -> None:
        path = self.folder / PAYLOAD.name(self.replica, self.seq)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.with_name("new").write_bytes(data)
        path.with_name("new").rename(path)
        self.seq += 1

    def sound(self, value: float, base_round: int, *, nan: bool = False) -> bytes:
        """A payload of fragment 0 in the right form, against the Θ_p of another replica."""
        delta = np.full(4, value, np.float32)
        body = wire_reference.encode("fp32", delta)
        if nan:
            body = wire_reference.sealed(body[:24], np.full(4, np.nan, np.float32).tobytes())
        claim = {"replica": self.replica, "seq": self.seq, "base_round": base_round, "position": 1}
        base = self.member.engine._membership.base(0)
        offer = {"run": self.member.exchange.state.run, "fragment": 0, "base": f"{base:016x}"}
        norm = float(np.linalg.norm(delta.astype(np.float64)))
        header = header_of(codec("fp32"), 4, [body], [norm], tokens=1, steps=1, **claim, **offer)
        return PAYLOAD.seal(header, Signer()) + body


@pytest.mark.slow
def test_bad_payloads_are_left_out_and_the_run_goes_on(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    members = [Replica(str(tmp_path), name=name, snapshot_rounds=100) for name in ("a", "b", "silent")]
    a, b, silent = members
    silent.vanish()
    rogue = Rogue(tmp_path, silent.exchange.replica, a)
    until(lambda: len(a.exchange.state.fragments[0].norms) >= 8, a, b)
    with caplog.at_level(logging.WARNING, "diloco"):
        rogue.put(b"forged")
        rogue.put(rogue.sound(0.1, 1)[:-3])
        rogue.put(bytes(1 << 20))
        rogue.put(rogue.sound(0.1, a.rounds[0], nan=True))
        rogue.put((tmp_path / PAYLOAD.name(0, 0)).read_bytes())
        rogue.put(rogue.sound(0.1, 1).replace(b'"norms":[0.2', b'"norms":[0.1'))
        until(lambda: sum("left out" in record.getMessage() for record in caplog.records) >= 12, a, b)
        rogue.put(rogue.sound(5e5, a.rounds[0]))
        rounds = a.rounds[0] + 2
        until(lambda: a.rounds[0] >= rounds and b.rounds[0] >= rounds, a, b)
        last = rogue.seq
        while not (run := a.exchange.state).fragments[0].last_seq.get(2):
            rogue.put(rogue.sound(0.1, run.fragments[0].round))
            until(lambda: a.exchange.state.fragments[0].round > run.fragments[0].round, a, b)
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert all(PAYLOAD.name(2, seq) in messages for seq in range(6))
    a.finish()
    b.finish()
    seqs = [c["seq"] for c in replayed(tmp_path, theta0()).contributions if c["replica"] == 2]
    assert seqs and min(seqs) >= last
