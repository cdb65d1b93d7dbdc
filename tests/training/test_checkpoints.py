import hashlib
import subprocess
import sys

import pytest
import torch

from diloco.training.checkpoints import CheckpointError, Checkpoints

STATE = {
    "step": 3,
    "tensors": [torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16)],
    "flag": None,
    "pair": (1, 2),
}


def test_what_is_loaded_is_what_was_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=2)
    checkpoints.save(3, STATE)
    checkpoints.wait()
    loaded = checkpoints.load(3)
    assert loaded["step"] == 3 and loaded["flag"] is None and loaded["pair"] == (1, 2)
    for saved, found in zip(STATE["tensors"], loaded["tensors"], strict=True):
        assert saved.dtype == found.dtype and torch.equal(saved, found)


def test_the_state_is_copied_before_save_returns(tmp_path):
    tensor = torch.zeros(1_000_000)
    checkpoints = Checkpoints(tmp_path, 0, keep=1)
    checkpoints.save(1, {"tensor": tensor})
    tensor += 1
    checkpoints.wait()
    assert not checkpoints.load(1)["tensor"].any()


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, STATE)
    checkpoints.wait()
    assert checkpoints.steps() == [20, 30]
    assert sorted(path.name for path in (tmp_path / "replica-0").iterdir()) == [
        "step-00000020.pt",
        "step-00000020.pt.sha256",
        "step-00000030.pt",
        "step-00000030.pt.sha256",
    ]


def test_what_lies_beyond_the_step_of_a_resume_is_dropped(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=3)
    for step in (10, 20, 30):
        checkpoints.save(step, STATE)
    checkpoints.wait()
    checkpoints.drop_after(10)
    assert checkpoints.steps() == [10] and len(list((tmp_path / "replica-0").iterdir())) == 2


def test_the_checksum_is_that_of_the_file(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=1)
    checkpoints.save(1, STATE)
    checkpoints.wait()
    digest, name = (tmp_path / "replica-0" / "step-00000001.pt.sha256").read_text().split()
    assert digest == hashlib.sha256((tmp_path / "replica-0" / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: b[:100] + b"\xff" + b[101:]])
def test_a_damaged_checkpoint_is_refused_with_the_way_out(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path, 0, keep=2)
    checkpoints.save(1, STATE)
    checkpoints.save(2, STATE)
    checkpoints.wait()
    path = tmp_path / "replica-0" / "step-00000002.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"step-00000002.pt is damaged.*to resume from step 1"):
        checkpoints.load(2)
    assert checkpoints.load(1)["step"] == 3


def test_a_checkpoint_without_checksum_was_never_finished(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=2)
    checkpoints.save(1, STATE)
    checkpoints.wait()
    (tmp_path / "replica-0" / "step-00000001.pt.sha256").unlink()
    assert checkpoints.steps() == []


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep=1)
    checkpoints.save(1, {"object": print})
    checkpoints.wait()
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        checkpoints.load(1)


_FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from diloco.training.checkpoints import Checkpoints, CheckpointWriteError

checkpoints = Checkpoints(Path(sys.argv[1]), 0, keep=1)
checkpoints.save(1, {"tensor": torch.zeros(10)})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpoints.save(2, {"tensor": torch.zeros(1_000_000)})
try:
    checkpoints.wait()
except CheckpointWriteError as error:
    print(error)
print(checkpoints.steps(), sorted(path.name for path in Path(sys.argv[1], "replica-0").iterdir()))
"""


def test_a_full_disk_is_told_and_costs_nothing_that_was_saved(tmp_path):
    """A file-size limit makes the write fail as a full disk does: in the middle."""
    process = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    told, left = process.stdout.splitlines()
    assert told.startswith("could not write a checkpoint to") and "make room, then resume" in told
    assert left == "[1] ['step-00000001.pt', 'step-00000001.pt.sha256']"
