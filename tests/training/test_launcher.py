import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from diloco.training.launcher import _explain


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (1, "replica 1 ended with exit code 1"),
        (-signal.SIGKILL, r"replica 1 was killed by SIGKILL \(out of memory\?\)"),
        (-signal.SIGSEGV, "replica 1 was killed by SIGSEGV"),
    ],
)
def test_a_replica_that_ends_without_a_word_is_named(exit_code, sentence):
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=exit_code, error_file="<N/A>")
    error = _explain(ChildFailedError("entrypoint", {1: failure}), num_shards=1)
    with pytest.raises(type(error), match=sentence):
        raise error


def test_a_shard_that_ends_without_a_word_is_named():
    failure = ProcessFailure(local_rank=5, pid=1, exitcode=1, error_file="<N/A>")
    error = _explain(ChildFailedError("entrypoint", {5: failure}), num_shards=2)
    assert str(error) == "replica 2, shard 1, ended with exit code 1"


_LAUNCH = """
from pathlib import Path
from diloco.errors import ReplicaFailedError
from diloco.training.launcher import launch
from diloco.training.runs import read_config
import sys, time

if __name__ == "__main__":
    if sys.argv[1] == "sleep":
        launch(time.sleep, 2, 1, 100)
    try:
        launch(read_config, 2, 1, Path("nowhere"))
    except ReplicaFailedError as error:
        print(error, error.exit_code, error.fields)
"""


def test_an_error_of_a_replica_arrives_whole(tmp_path):
    process = subprocess.run([sys.executable, "-c", _LAUNCH, "fail"], capture_output=True, text=True, timeout=60)
    assert process.stdout == "nowhere holds no run: nowhere/config.json is missing 2 ()\n"
    assert not process.stderr


def test_replicas_end_with_their_launcher():
    with subprocess.Popen([sys.executable, "-c", _LAUNCH, "sleep"]) as process:
        deadline = time.monotonic() + 60
        while len(abandoned := replicas(process.pid)) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
    while any(is_alive(replica) for replica in abandoned):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def replicas(launcher: int) -> list[int]:
    """The forks of the launcher's children."""
    return [replica for ancestor in children(launcher) for replica in children(ancestor)]


def children(pid: int) -> Iterator[int]:
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return


def is_alive(pid: int) -> bool:
    """Whether a process is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
