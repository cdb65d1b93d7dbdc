"""The lock on a run's directory."""

import errno
import os
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco.errors import UserError
from diloco.training.records.runs import check_not_running, fcntl, running


def test_a_second_command_hears_who_trains_there(tmp_path):
    directory = tmp_path / "runs" / "one"
    check_not_running(directory)
    with running(directory):
        who = rf"process {os.getpid()} on {socket.gethostname()} since 20.*"
        for attempt in (lambda: running(directory).__enter__(), lambda: check_not_running(directory)):
            with pytest.raises(
                UserError, match=rf"one is in use: {who} trains there; wait for it, or choose"
            ) as error:
                attempt()
            assert error.value.field == "name"
        (directory / "config.json").touch()
    check_not_running(directory)
    with running(directory):
        pass
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "running"]


def test_a_grid_waits_for_the_command_before(tmp_path):
    def wait():
        with running(tmp_path / "one", waits=True):
            return ended.is_set()

    ended = threading.Event()
    with ThreadPoolExecutor() as threads:
        with running(tmp_path / "one"):
            waiting = threads.submit(wait)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            ended.set()
        assert waiting.result(10)


def test_a_directory_to_which_nothing_was_written_goes_away(tmp_path):
    with pytest.raises(ZeroDivisionError), running(tmp_path / "one"):
        _ = 1 / 0
    assert not (tmp_path / "one").exists()


def test_a_lock_on_a_file_that_was_just_removed_is_taken_again(tmp_path, monkeypatch):
    """The command before ends between this one's look at the file and its lock: a third would lock a new file."""
    flock, ended = fcntl.flock, []

    def end_before(file, kind):
        if not ended:
            ended.append(shutil.rmtree(tmp_path / "one"))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", end_before)
    with (
        running(tmp_path / "one"),
        pytest.raises(UserError, match=rf"is in use: process {os.getpid()}"),
        running(tmp_path / "one"),
    ):
        pass


def test_an_error_is_not_hidden_by_a_directory_that_was_deleted(tmp_path):
    with pytest.raises(ZeroDivisionError), running(tmp_path / "one"):
        shutil.rmtree(tmp_path / "one")
        _ = 1 / 0


def test_without_locks_a_run_goes_on_after_one_sentence(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with running(tmp_path / "one"):
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path}/one/running can't be locked (Function not implemented): nobody will notice if a second "
            "command trains in this directory"
        ]
