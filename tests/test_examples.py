"""The examples, as a reader would start them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def torchrun(cwd: Path, num_processes: int, *command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    process = subprocess.run([*launcher, *command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    return process.stdout


def losses(told: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+),", told)]


def agreed(told: str, *, num_processes: int) -> bool:
    hashes = re.findall("outer hash ([0-9a-f]{16})", told)
    return len(hashes) == num_processes and len(set(hashes)) == 1


def test_a_loop_of_ones_own_learns_and_its_replicas_agree(tmp_path):
    told = torchrun(tmp_path, 2, str(EXAMPLES / "own_loop.py"))
    assert len(losses(told)) == 4 and losses(told)[-1] < 1, "chance is log 32 = 3.47"
    assert agreed(told, num_processes=2)


def test_sharded_replicas_go_on_unsharded(tmp_path):
    pytest.importorskip("transformers")
    example = str(EXAMPLES / "sharded_replicas.py")
    told = torchrun(tmp_path, 4, example)
    resumed = torchrun(tmp_path, 2, example, "--num-shards", "1", "--resume")
    assert agreed(told, num_processes=4) and agreed(resumed, num_processes=2)
    (first, *_, last), (again, end) = losses(told), losses(resumed)
    assert last < 1 < first and again < first
    # Rank 0's loss is of half of the batch in one case, and of all of it in the other.
    assert end == pytest.approx(last, rel=0.3)
