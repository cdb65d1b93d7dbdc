"""Files that an earlier release wrote are read; make.py writes them, and a change of the code leaves them."""

import json
import shutil

import pytest
import torch
from tests.compatibility.make import WRITTEN, engine_of, hashes_of, key_in, model, take_steps
from tests.training.runs import lines, run, summary

import diloco
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import replayed
from diloco.training.records.checkpoints import finished, read
from diloco.training.records.runs import read_asked

EXPECTED = json.loads((WRITTEN / "expected.json").read_text())


def test_a_run_and_its_checkpoints_are_read():
    asked = read_asked(WRITTEN / "run")
    assert (asked.recipe, asked.num_replicas, asked.diloco.sync_every, asked.model.width) == ("tiny", 2, 4, 8)
    checkpoints = WRITTEN / "run" / "checkpoints"
    assert [finished(checkpoints / name) for name in EXPECTED["checkpoints"]] == [[10], [10]]
    assert hashes_of(WRITTEN / "run") == EXPECTED["checkpoints"]
    norm = torch.zeros(8)
    read(checkpoints, 0, 10, {"sync": {"outer": {"norm.weight": norm}}})
    assert norm.min() > 0.5, "it begins with ones"


@pytest.mark.slow
def test_a_run_is_resumed(tmp_path):
    shutil.copytree(WRITTEN, tmp_path / "written")
    process = run(tmp_path, "--resume", "written/run", "--data.prepared", str(tmp_path / "written" / "text"))
    assert process.returncode == 0, process.stderr
    resumed = tmp_path / "written" / "run"
    assert [line["step"] for line in lines(resumed, 1)] == list(range(1, 13)) and summary(resumed)["outer_hash"]


def test_a_store_is_replayed_and_joined(tmp_path):
    store = str(shutil.copytree(WRITTEN / "store", tmp_path / "store"))
    replay = replayed(store, initial=lambda facts: model().state_dict())
    assert replay.checked.snapshots > 0 and replay.checked.steps == replay.checked.rounds > 4
    assert parameters_hash(replay.parameters()) == EXPECTED["store"]
    engine, rendezvous, optimizer = engine_of(store, key_in(tmp_path), name="second")
    assert engine.outer_hash() == EXPECTED["store"]
    take_steps(engine, optimizer, 5)
    engine.finish()
    rendezvous.leave()
    assert engine.outer_hash() != EXPECTED["store"]


def test_published_weights_are_followed():
    follower = diloco.Follower(str(WRITTEN / "weights"), public_key=EXPECTED["public_key"])
    version = follower.update()
    assert version is not None and (version.number, version.digest) == (3, EXPECTED["weights"])
    assert torch.equal(follower.state["a"], (torch.arange(64.0) + 3 / 8).bfloat16())
