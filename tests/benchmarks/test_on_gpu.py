"""The proof on a GPU, run dry: on the CPU, at a size of seconds."""

import json
from pathlib import Path

import pytest

from .scripts import end_of, run

pytestmark = pytest.mark.slow
PIECES = {
    "bits": 33,
    "waits": 6,
    "wire": 17,
    "loss": 5,
    "sync": 5,
    "exchange": 2,
    "throughput": 6,
    "jobs": 4,
    "suite": 1,
}
"""The pieces but for the training runs, with their numbers of measurements."""


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_runs_and_nothing_is_measured_twice(piece: str, tmp_path: Path):
    flags = ["--output", tmp_path, "--dry", *(["--apart"] if piece == "wire" else []), "--pieces", piece]
    imports = ["transformers.models.llama.modeling_llama"] if piece == "throughput" else []
    output = run("on_gpu.py", *flags, imports=imports)
    rows = [json.loads(line) for line in (tmp_path / f"{piece}.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in rows}) == len(rows) == PIECES[piece], output
    assert not any("error" in row or row.get("ok") is False for row in rows), output
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {row['key']} |" in report for row in rows)
    if piece == "wire":
        again = run("on_gpu.py", *flags)
        assert len((tmp_path / f"{piece}.jsonl").read_text().splitlines()) == len(rows), again


def test_a_call_that_ran_out_of_time_says_that_there_is_more(tmp_path: Path):
    process = end_of("on_gpu.py", "--output", tmp_path, "--dry", "--pieces", "wire", "bits", "--seconds", 0.01)
    assert process.returncode == 3 and "there is more: call it again" in process.stdout


def test_a_training_run_that_is_cut_off_goes_on(tmp_path: Path):
    command = ["on_gpu.py", "--output", tmp_path, "--dry", "--pieces", "training"]
    process = end_of(*command, "--seconds", 1)
    assert process.returncode == 3 and "trained: the runs stand at {" in process.stdout
    run(*command)
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row.get("num_tokens") for row in rows] == [None, *2 * [51_200], None]
