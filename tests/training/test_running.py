"""The lock on a run's directory."""

import os
import socket

import pytest

from diloco.errors import UserError
from diloco.training.running import check_not_running, running


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


def test_a_directory_to_which_nothing_was_written_goes_away(tmp_path):
    with pytest.raises(ZeroDivisionError), running(tmp_path / "one"):
        _ = 1 / 0
    assert not (tmp_path / "one").exists()
