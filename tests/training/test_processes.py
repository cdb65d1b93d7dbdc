import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.util import register_after_fork
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import Program, program
from tests.sockets import family_of, listening

from diloco.errors import ReplicaFailedError
from diloco.training import processes
from diloco.training.config.recipes import recipe
from diloco.training.prepare import refuse_what_means_nothing
from diloco.training.processes import (
    SIGNALS,
    STORE,
    Ancestor,
    Call,
    _explain,
    import_modules,
    launch,
    num_cores,
    on_signal,
    prepared,
)
from diloco.training.world import join


@pytest.mark.parametrize(
    ("rank", "num_ranks", "exit_code", "sentence"),
    [
        (1, 1, 1, "replica 1 ended with exit code 1"),
        (1, 1, -signal.SIGKILL, "replica 1 was killed by SIGKILL (out of memory?)"),
        (1, 1, -signal.SIGSEGV, "replica 1 was killed by SIGSEGV"),
        (5, 2, 1, "replica 2, process 1, ended with exit code 1"),
    ],
)
def test_a_process_that_ends_without_a_word_is_named(rank, num_ranks, exit_code, sentence):
    assert str(_explain(rank, exit_code, nothing_sent(), processes_per_replica=num_ranks)) == sentence


def test_an_error_that_a_kill_has_cut_off_is_not_read():
    report, theirs = Pipe(duplex=False)
    os.write(theirs.fileno(), (100).to_bytes(4, "big") + b'{"message"')
    theirs.close()
    assert str(_explain(1, -signal.SIGKILL, report, processes_per_replica=1)).startswith("replica 1 was killed")


@pytest.mark.parametrize("is_there", [True, False])
def test_where_there_is_no_file_without_a_name_replicas_meet_in_a_directory(is_there, monkeypatch):
    def refuse(name: str) -> int:
        raise PermissionError

    if is_there:
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    with processes._meeting_file() as path:
        assert Path(path).parent.is_dir() and Path(path).parent.name.startswith("diloco-")
    assert not Path(path).parent.exists()


def nothing_sent() -> Connection:
    report, theirs = Pipe(duplex=False)
    theirs.close()
    return report


def test_a_signal_that_nohup_has_ignored_stays_ignored():
    before, caught = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        with on_signal(lambda number, _: caught.append(number)):
            for number in SIGNALS:
                signal.raise_signal(number)  # to this thread: another one would take it later
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert sorted(caught) == sorted({*SIGNALS} - {signal.SIGHUP})


_LAUNCH = """
from pathlib import Path
import sys
from tests.training.test_processes import join_and_fail, launch_all

if __name__ == "__main__":
    launch_all(join_and_fail, Path(sys.argv[1]))
"""


def launch_all(entrypoint: Callable[..., None], *folders: Path) -> None:
    """Launch two replicas for each folder, one pair after another, and print their errors."""
    for folder in folders:
        try:
            launch(entrypoint, 2, 1, os.getpid(), folder)
        except ReplicaFailedError as error:
            sys.stdout.write(f"{error} {error.exit_code} {error.fields}\n")
            sys.stdout.flush()


def launch_forked(*folders: Path) -> None:
    """The same by an ancestor that is forked before, as the command line has it."""
    with prepared():
        launch_all(touch_and_sleep, *folders)


def launch_with_temporary_files_in(temporary: Path, *folders: Path) -> None:
    tempfile.tempdir = str(temporary)  # known already in the process that this one is forked from
    launch_forked(*folders)


ROOT = Path(__file__).parents[2]


def join_and_fail(launcher: int, folder: str) -> None:
    """The entrypoint of a replica that writes down who listens where in the whole run, and then fails."""
    config = recipe("tiny")
    with join(config):
        where = [(str(address), port) for address, port in listening(*family_of(launcher))]
        facts = {"listening": where, "names of the store": Path(os.environ[STORE]).stat().st_nlink}
        facts["threads"] = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
        Path(folder, os.environ["RANK"]).write_text(json.dumps(facts))
        dist.barrier()  # the first to fail ends the other
    refuse_what_means_nothing(replace(config, num_replicas=1, num_connections=2))


@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.slow
def test_a_run_of_one_machine_listens_on_loopback_and_an_error_of_a_replica_arrives_whole(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.run(
        [sys.executable, "-c", _LAUNCH, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | {"GLOO_SOCKET_IFNAME": "no-such-interface", "MASTER_ADDR": "192.0.2.1"},
    )
    own = [
        line for line in process.stdout.splitlines() if not line.startswith("[Gloo]")
    ]  # torch 2.9's gloo prints
    assert own == ["num_connections=2 means nothing to one replica: leave it out 2 ('num_connections',)"]
    assert not process.stderr
    facts = json.loads((tmp_path / "0").read_text())
    assert {address for address, _ in facts["listening"]} == {"127.0.0.1"}
    assert facts["names of the store"] == 0
    share = max(1, num_cores() // 2)
    assert facts["threads"] == [share, str(share)], "each replica has its share of the cores"


def test_a_users_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in processes._environment(0, 2, "folder")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert processes._environment(0, num_cores(), "folder")["OMP_NUM_THREADS"] == "1"


def touch_and_sleep(launcher: int, folder: str) -> None:
    """The entrypoint of a replica that waits to be ended."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(100)


def test_replicas_end_with_their_launcher(tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    with program(launch_forked, *folders, folder=ROOT) as running:
        for folder, number in zip(folders, (signal.SIGTERM, signal.SIGINT, signal.SIGKILL), strict=True):
            abandoned = replicas_in(folder, running)
            os.kill(running.pid, number)
            if number != signal.SIGKILL:
                sentence = f"stopped by {number.name} {128 + number} ()"
                assert running.wait_for_lines(1 + int(folder.name))[-1] == sentence
                assert not any(map(is_alive, abandoned))
        wait_for_the_end(abandoned)


def test_replicas_end_with_their_ancestor(tmp_path):
    with program(launch_forked, tmp_path, folder=ROOT) as running:
        abandoned = replicas_in(tmp_path, running)
        os.kill(parent(parent(abandoned[0])), signal.SIGKILL)
        sentence = "the process that starts the replicas was killed (out of memory?) 1 ()\n"
        assert running.wait(60).stdout == sentence
        wait_for_the_end(abandoned)


def test_a_run_whose_processes_are_all_killed_leaves_no_temporary_file(tmp_path):
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    with program(launch_with_temporary_files_in, temporary, folder, folder=ROOT) as running:
        abandoned = replicas_in(folder, running)
        os.killpg(running.pid, signal.SIGKILL)
        wait_for_the_end(abandoned)
    assert [*temporary.iterdir()] == []


def unblock_and_sleep() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    time.sleep(60)


def test_a_call_that_is_ended_before_it_starts_ends_at_its_start():
    call = Call(unblock_and_sleep)
    call.end()
    call.end()  # the same signal, by way of another process
    begin = time.monotonic()
    with Ancestor("fork") as ancestor, pytest.raises(EOFError):
        ancestor.run(call)
    assert call.pid is not None and time.monotonic() - begin < 30


def interrupt_itself(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_while_the_ancestor_is_forked_is_left_to_the_process_that_launches():
    watched = Call(os.getpid)
    register_after_fork(watched, interrupt_itself)
    with Ancestor("fork") as ancestor:
        assert ancestor.run(watched) != os.getpid()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def replicas_in(folder: Path, running: Program) -> list[int]:
    """The replicas of `touch_and_sleep`, once both have begun."""
    deadline = time.monotonic() + 60
    while len(paths := [path for path in folder.iterdir() if path.name.isdigit()]) < 2:
        assert time.monotonic() < deadline and running.process.exitcode is None
        time.sleep(0.02)
    return [int(path.name) for path in paths]


def wait_for_the_end(abandoned: list[int]) -> None:
    """Wait until replicas have ended."""
    deadline = time.monotonic() + 30
    while any(map(is_alive, abandoned)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("is_enabled", [True, False])
def test_imports_leave_the_collector_as_it_was(is_enabled, monkeypatch):
    states = []
    monkeypatch.setattr(processes, "import_module", lambda name: states.append(gc.isenabled()) or 1 / len(name))
    if not is_enabled:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            import_modules(["torch", ""])
        assert gc.isenabled() == is_enabled and states == [False, False] and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
