import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.training.launcher import _explain


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (1, "replica 1 ended with exit code 1"),
        (-signal.SIGKILL, "replica 1 was killed by SIGKILL (out of memory?)"),
        (-signal.SIGSEGV, "replica 1 was killed by SIGSEGV"),
    ],
)
def test_a_replica_that_ends_without_a_word_is_named(exit_code, sentence, tmp_path):
    assert str(_explain(1, exit_code, tmp_path / "none", num_ranks=1)) == sentence


def test_a_process_that_ends_without_a_word_is_named(tmp_path):
    error = _explain(5, 1, tmp_path / "none", num_ranks=2)
    assert str(error) == "replica 2, process 1, ended with exit code 1"


_LAUNCH = """
import sys
from dataclasses import replace
from diloco.errors import ReplicaFailedError
from diloco.training.launcher import launch
from diloco.training.prepare import refuse_what_means_nothing
from diloco.training.recipes import recipe
from tests.training.test_launcher import touch_and_sleep

if __name__ == "__main__":
    if sys.argv[1] == "sleep":
        launch(touch_and_sleep, 2, 1, sys.argv[2])
    try:
        launch(refuse_what_means_nothing, 2, 1, replace(recipe("tiny"), num_replicas=1, num_connections=2))
    except ReplicaFailedError as error:
        print(error, error.exit_code, error.fields)
"""


ROOT = Path(__file__).parents[2]


def test_an_error_of_a_replica_arrives_whole():
    command = [sys.executable, "-c", _LAUNCH, "fail"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.stdout == (
        "num_connections=2 means nothing to one replica: leave it out 2 ('num_connections',)\n"
    )
    assert not process.stderr


def touch_and_sleep(folder: str) -> None:
    """The entrypoint of a replica that waits to be ended."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(100)


@pytest.mark.slow
def test_replicas_end_with_their_launcher(tmp_path):
    with subprocess.Popen([sys.executable, "-c", _LAUNCH, "sleep", str(tmp_path)], cwd=ROOT) as process:
        deadline = time.monotonic() + 90
        while len(abandoned := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
    while any(is_alive(replica) for replica in abandoned):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
