import signal

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


def test_a_replica_that_says_why_is_quoted(tmp_path):
    (tmp_path / "error.json").write_text('{"message": "the disk is full", "timestamp": "1"}')
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    error = _explain(ChildFailedError("entrypoint", {0: failure}), num_shards=1)
    assert (str(error), error.exit_code) == ("the disk is full", 2)
