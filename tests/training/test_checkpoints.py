import hashlib
import re
import subprocess
import sys

import pytest
import torch

from diloco.errors import CheckpointError, CheckpointWriteError
from diloco.exchange.transport import OneProcess
from diloco.training.records import checkpoints as checkpoints_module
from diloco.training.records.checkpoints import Checkpoints

FACTS = {"step": 3, "flag": None, "pair": [1, 2.5], "name": {"deeper": "Θ"}}
TENSORS = {"model": {"weight": torch.arange(4.0), "half": torch.ones(2, dtype=torch.bfloat16)}, "empty": {}}


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, 0, OneProcess(), keep=2)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, FACTS, TENSORS)
    checkpoints.wait()


def test_a_checkpoint_is_loaded_as_it_was_saved(checkpoints):
    save(checkpoints, 3)
    assert checkpoints.facts(3) == FACTS
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in TENSORS["model"].items()}, "empty": {}}
    checkpoints.load(3, loaded)
    for name, tensor in TENSORS["model"].items():
        assert tensor.dtype == loaded["model"][name].dtype and torch.equal(tensor, loaded["model"][name])


def test_the_state_is_copied_before_save_returns(checkpoints):
    tensor, loaded = torch.zeros(1_000_000), {"tensor": torch.ones(1_000_000)}
    checkpoints.save(1, {}, {"tensor": tensor})
    tensor += 1
    checkpoints.wait()
    checkpoints.load(1, loaded)
    assert not loaded["tensor"].any()


def test_a_view_is_saved_alone(checkpoints, tmp_path):
    save_one = {"part": torch.zeros(1_000_000)[:10]}
    checkpoints.save(1, {}, save_one)
    checkpoints.wait()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 100_000


def test_the_newest_are_kept(checkpoints, tmp_path):
    save(checkpoints, 10, 20, 30)
    assert checkpoints.steps() == [20, 30]
    assert sorted(path.name for path in (tmp_path / "replica-0").iterdir()) == [
        "step-00000020",
        "step-00000020.sha256",
        "step-00000030",
        "step-00000030.sha256",
    ]


def test_a_resume_drops_later_and_unfinished_checkpoints(checkpoints, tmp_path):
    save(checkpoints, 10, 20)
    (tmp_path / "replica-0" / "step-00000030.sha256").write_text("")
    (tmp_path / "replica-0" / "step-00000030").mkdir()
    (tmp_path / "replica-0" / "step-00000005").mkdir()
    checkpoints.drop_after(10)
    assert checkpoints.steps() == [10]
    assert sorted(path.name for path in (tmp_path / "replica-0").iterdir()) == [
        "step-00000010",
        "step-00000010.sha256",
    ]


def test_the_checksums_are_those_of_all_files(checkpoints, tmp_path):
    save(checkpoints, 1)
    folder = tmp_path / "replica-0"
    lines = [line.split() for line in (folder / "step-00000001.sha256").read_text().splitlines()]
    assert {name for _, name in lines} == {
        f"step-00000001/{path.name}" for path in (folder / "step-00000001").iterdir()
    }
    for digest, name in lines:
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["shard-0.safetensors", "facts.json"])
@pytest.mark.parametrize("damage", [lambda b: b[:-10], lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:], None])
def test_a_damaged_checkpoint_is_refused_with_the_way_out(checkpoints, tmp_path, name, damage):
    save(checkpoints, 1, 2)
    path = tmp_path / "replica-0" / "step-00000002" / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{name} is damaged.*to resume from step 1"):
        checkpoints.facts(2)
    assert checkpoints.facts(1)["step"] == 3


def test_a_checkpoint_is_written_to_its_end_when_the_run_fails(checkpoints):
    with pytest.raises(ZeroDivisionError), checkpoints:
        checkpoints.save(7, FACTS, {"tensor": torch.zeros(3_000_000)})
        raise ZeroDivisionError
    assert checkpoints.steps() == [7] and checkpoints.facts(7) == FACTS


def test_files_that_another_process_wrote_elsewhere_are_missed(checkpoints, tmp_path, monkeypatch):
    """The second process of a replica has a disk of its own, as it seems."""
    real = checkpoints_module._check_disk

    def elsewhere(path, metadata):
        (path / "shard-0.safetensors").unlink()
        real(path, metadata)

    monkeypatch.setattr(checkpoints_module, "_check_disk", elsewhere)
    checkpoints.save(1, FACTS, TENSORS)
    with pytest.raises(CheckpointWriteError, match="a replica needs one disk"):
        checkpoints.wait()
    assert checkpoints.steps() == [] and not list((tmp_path / "replica-0").iterdir())


_FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from diloco.exchange.transport import OneProcess
from diloco.training.records.checkpoints import Checkpoints
from diloco.errors import CheckpointWriteError

checkpoints = Checkpoints(Path(sys.argv[1]), 0, OneProcess(), keep=1)
checkpoints.save(1, {}, {"tensor": torch.zeros(10)})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpoints.save(2, {}, {"tensor": torch.zeros(1_000_000)})
try:
    checkpoints.wait()
except CheckpointWriteError as error:
    print(error)
print(checkpoints.steps(), sorted(path.name for path in Path(sys.argv[1], "replica-0").iterdir()))
"""


@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.slow
def test_a_full_disk_is_reported_and_costs_nothing_that_was_saved(tmp_path):
    """A file-size limit makes the write fail as a full disk does: in the middle."""
    process = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    message, files = process.stdout.splitlines()
    assert message.startswith("could not write a checkpoint to") and "make room, then resume" in message
    assert re.search(r"can't write \S+/shard-0\.safetensors: .*\(needs 4,000,000 bytes\)", message), message
    assert files == "[1] ['step-00000001', 'step-00000001.sha256']"
