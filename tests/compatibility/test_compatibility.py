"""Files that an earlier release wrote are read; make.py writes them, and a change of the code leaves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compatibility.make import engine_of, hashes_of, key_in, model, take_steps
from tests.training.runs import lines, run, summary

import diloco
from diloco.outer.step import parameters_hash
from diloco.rendezvous.replay import replayed
from diloco.training.records.checkpoints import finished, read
from diloco.training.records.runs import read_asked


@pytest.fixture(params=sorted(Path(__file__).parent.glob("[0-9]*")), ids=lambda path: path.name)
def written(request) -> Path:
    """The folder of a release."""
    return request.param


def expected(written: Path) -> dict[str, Any]:
    return json.loads((written / "expected.json").read_text())


def test_a_run_and_its_checkpoints_are_read(written):
    asked = read_asked(written / "run")
    assert (asked.recipe, asked.num_replicas, asked.diloco.sync_every, asked.model.width) == ("tiny", 2, 4, 8)
    checkpoints = written / "run" / "checkpoints"
    assert [finished(checkpoints / name) for name in expected(written)["checkpoints"]] == [[10], [10]]
    assert hashes_of(written / "run") == expected(written)["checkpoints"]
    norm = torch.zeros(8)
    read(checkpoints, 0, 10, {"sync": {"outer": {"norm.weight": norm}}})
    assert norm.min() > 0.5, "it begins with ones"


@pytest.mark.slow
def test_a_run_is_resumed(written, tmp_path):
    shutil.copytree(written, tmp_path / "written")
    process = run(tmp_path, "--resume", "written/run", "--data.prepared", str(tmp_path / "written" / "text"))
    assert process.returncode == 0, process.stderr
    resumed = tmp_path / "written" / "run"
    assert [line["step"] for line in lines(resumed, 1)] == list(range(1, 13)) and summary(resumed)["outer_hash"]


def test_a_store_is_replayed_and_joined(written, tmp_path):
    store = str(shutil.copytree(written / "store", tmp_path / "store"))
    replay = replayed(store, initial=lambda facts: model().state_dict())
    assert replay.checked.snapshots > 0 and replay.checked.steps == replay.checked.rounds > 4
    assert parameters_hash(replay.parameters()) == expected(written)["store"]
    engine, rendezvous, optimizer = engine_of(store, key_in(tmp_path), name="second")
    assert engine.outer_hash() == expected(written)["store"]
    take_steps(engine, optimizer, 5)
    engine.finish()
    rendezvous.leave()
    assert engine.outer_hash() != expected(written)["store"]


def test_published_weights_are_followed(written):
    follower = diloco.Follower(str(written / "weights"), public_key=expected(written)["public_key"])
    version = follower.update()
    assert version is not None and (version.number, version.digest) == (3, expected(written)["weights"])
    assert torch.equal(follower.state["a"], (torch.arange(64.0) + 3 / 8).bfloat16())
