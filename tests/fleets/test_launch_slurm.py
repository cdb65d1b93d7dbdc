"""Launches on a real Slurm: slurmctld and three slurmd on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fleets.cases import check_run, num_steps, wait, write_fleet
from tests.fleets.slurm import begin_now, running_slurm, slurm

from diloco.cli.main import main
from diloco.fleets.launch import states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_slurm(tmp_path_factory.mktemp("slurm")):
        yield


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, str]:
    """The second word of each line that a command prints, by the first."""
    capsys.readouterr()
    main([*command])
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_a_job_that_is_preempted_and_requeued_goes_on_with_its_replica(small_corpus, tmp_path, capsys):
    fleet = write_fleet(tmp_path, small_corpus, counts={"a": 1, "b": 1})
    launch = tmp_path / "launch"
    jobs = printed(capsys, "launch", str(fleet), "--on", "slurm", "--output", str(launch))
    wait(lambda: min(num_steps(tmp_path, name) for name in ("a-0", "b-0")) >= 10)
    slurm("scontrol", "suspend", jobs["a-0"])  # the run is not to end before the other is back
    slurm("scontrol", "requeue", jobs["b-0"])
    begin_now(jobs["b-0"])
    before = num_steps(tmp_path, "b-0")
    wait(lambda: num_steps(tmp_path, "b-0") > before)
    assert states(launch) == {"a-0": "waiting", "b-0": "running"}
    slurm("scontrol", "resume", jobs["a-0"])
    wait(lambda: set(states(launch).values()) == {"finished"}, explain=lambda: states(launch))
    log = (launch / "b-0.log").read_text()
    assert "stopped by SIGTERM: step" in log and "going on from step" in log, "both lives write to one file"
    check_run(tmp_path, "a-0", "b-0", said_so=True)


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
def heard(number, _):
    sys.exit(128 + number)
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, heard)
name = os.environ["DILOCO_NAME"]
lives = Path(name + ".lives")
lives.write_text(lives.read_text() + "." if lives.exists() else ".")
while len(lives.read_text()) < 2 or name == "a-2":
    time.sleep(0.02)
"""


@pytest.fixture
def oddly_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory whose path is neither one word of bash nor free of Slurm's patterns."""
    folder = tmp_path / '50%a of "my" $HOME\'s runs'
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_a_job_is_requeued_at_its_time_limit_and_an_array_grows_and_shrinks(oddly_named, capsys):
    Path("program.py").write_text(PROGRAM)
    Path("fleet.toml").write_text("""
        launch.command = "python3 program.py --rendezvous /store"
        [[machines]]
        name = "a"
        count = 2
        launch.slurm = { time = "10", options = ["--cpus-per-task=1"] }
        """)
    jobs = printed(capsys, "launch", "fleet.toml", "--on", "slurm")
    directory = Path("launches", "fleet")
    assert printed(capsys, "launch", "resize", "fleet", "a=3") == {"a-2": "starts"}
    wait(lambda: all(Path(f"a-{index}.lives").exists() for index in range(3)))
    slurm("scancel", "--batch", "--signal=USR1", jobs["a-0"])  # as Slurm does before the limit
    begin_now(jobs["a-0"])
    wait(lambda: states(directory)["a-0"] == "finished")
    assert Path("a-0.lives").read_text() == ".."
    assert printed(capsys, "launch", "resize", "fleet", "a=2") == {"a-2": "stops"}
    printed(capsys, "launch", "stop", "fleet")
    wait(lambda: states(directory) == {"a-0": "finished", "a-1": "stopped"})
    assert Path("a-1.lives").read_text() == Path("a-2.lives").read_text() == "."
    assert {path.name for path in directory.glob("*.log")} == {"a-0.log", "a-1.log", "a-2.log"}


def test_the_machines_of_a_fixed_group_have_their_numbers(oddly_named, tmp_path, capsys):
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/bash\necho "$@" > "$DILOCO_NAME.arguments"\n')
    torchrun.chmod(0o755)
    Path("fleet.toml").write_text(f"""
        launch.command = "diloco train laptop --num-replicas 3"
        launch.address = "first:29500"
        launch.setup = ['export PATH={torchrun.parent}:$PATH']
        [[machines]]
        name = "a"
        count = 2
        [[machines]]
        name = "b"
        count = 1
        """)
    printed(capsys, "launch", "fleet.toml", "--on", "slurm")
    wait(lambda: set(states(Path("launches", "fleet")).values()) == {"finished"})
    arguments = [Path(f"{name}.arguments").read_text().split() for name in ("a-0", "a-1", "b-0")]
    ranks = [words[words.index("--node-rank") + 1] for words in arguments]
    assert ranks == ["0", "1", "2"]
    assert all(words[words.index("--nnodes") + 1] == "3" for words in arguments)
    assert all(words[-5:] == ["diloco", "train", "laptop", "--num-replicas", "3"] for words in arguments)
