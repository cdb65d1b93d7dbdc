"""The replicas of tests: what a test learns of one that dies, and that none outlives the test process."""

import ctypes
import os
import signal
import time
from multiprocessing import forkserver, get_context
from pathlib import Path

import pytest
from tests.processes import ReplicaError, run_replicas, use_server, wait_for_end, wait_for_files


def read_nothing() -> None:
    ctypes.string_at(0)


def sleep(folder: Path) -> None:
    Path(folder, "new").write_text(f"{os.getpid()} {os.getppid()}")
    Path(folder, "new").rename(folder / "pids")
    time.sleep(600)


def be_test_process(server: str, folder: Path) -> None:
    use_server(server)
    run_replicas(sleep, 1, folder)


def test_a_crash_of_a_replica_shows_its_traceback():
    with pytest.raises(ReplicaError, match=r"Segmentation fault(.|\n)*in read_nothing"):
        run_replicas(read_nothing, 1)


def test_replicas_end_with_a_test_process_that_is_killed(tmp_path: Path):
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_address
    process = get_context("fork").Process(target=be_test_process, args=(server, tmp_path))
    process.start()
    wait_for_files(tmp_path / "pids")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for pid in (tmp_path / "pids").read_text().split():
        wait_for_end(int(pid))
