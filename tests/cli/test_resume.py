"""The command that goes on with a run, and when it is shown."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.commands import refusal

from diloco.cli.train import resume_command
from diloco.training.config.recipes import recipe
from diloco.training.records.runs import running

CONFIG = replace(recipe("tiny"), name="my run", runs=Path("runs"))


def test_a_run_of_one_machine_is_resumed_by_its_directory():
    assert resume_command(CONFIG, {}) == "diloco train tiny --resume 'runs/my run'"
    assert resume_command(replace(CONFIG, recipe=""), {}) == "diloco train --resume 'runs/my run'"


def test_under_torchrun_each_machine_has_its_own_command():
    """As torchrun describes the second of three machines with two processes each."""
    environment = {
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
    }
    expected = (
        "torchrun --nnodes 3 --nproc-per-node 2 --node-rank 1 --master-addr host --master-port 29500 "
        "-m diloco train tiny --resume 'runs/my run'"
    )
    assert resume_command(CONFIG, environment) == expected


@pytest.mark.parametrize("flags", [["--name", "one"], ["--resume", "RUN"]])
def test_a_run_that_is_being_trained_is_not_started_again(flags, finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "runs" / "one"
    if "RUN" in flags:
        shutil.copytree(finished_run, where)
        flags = ["--resume", str(where)]
    with running(where):
        assert f"{where.name} is in use: process " in refusal(capsys, "train", "tiny", *flags)
