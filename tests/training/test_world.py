"""Joining the other processes: what they believe, and what a process that does not belong to them can do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.processes import run_replicas

from diloco.errors import DisagreementError, UserError
from diloco.training.config.recipes import recipe
from diloco.training.world import _agree_on_groups, join


class Trap:
    """An object whose pickle makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def join_a_rogue(trap: Path) -> None:
    """Process 1 was started with another setting, and then sends a pickle."""
    is_rogue = dist.get_rank() == 1
    config = recipe("tiny")
    with pytest.raises(DisagreementError, match=r"process 0 has \(2, 1, 1, 1\), process 1 has \(2, 1, 1, 3\)"):
        _agree_on_groups(replace(config, num_connections=3 if is_rogue else 1), 2)
    if is_rogue:
        dist.all_gather_object([None, None], Trap(trap))  # gloo ends this process: the others expect less
    with pytest.raises((RuntimeError, DisagreementError), match=r"gloo|disagree"):  # the pickle's length, at most
        _agree_on_groups(config, 2)


@pytest.mark.parametrize(
    ("changes", "world_size", "sentence"),
    [
        ({}, 1, "started 1 process, and num_replicas=2 needs 2: have it start 2, or set num_replicas=1"),
        (
            {"shards_per_replica": 2},
            6,
            "num_replicas=2 with shards_per_replica=2 needs 4: have it start 4, or set num_replicas=3",
        ),
        ({"shards_per_replica": 2}, 3, "with shards_per_replica=2 needs 4: have it start 4"),
        (
            {"shards_per_replica": 2, "rendezvous": "store"},
            4,
            "started 4 processes with rendezvous=store, .* shards_per_replica=2: set it to 4",
        ),
    ],
)
def test_a_launcher_of_another_number_of_processes_is_refused(changes, world_size, sentence, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=f"{sentence}$"), join(replace(recipe("tiny"), **changes)):
        pass


def test_what_another_process_sends_is_never_run(tmp_path):
    run_replicas(join_a_rogue, 2, tmp_path / "trap", mortal=(1,))
    assert not (tmp_path / "trap").exists()
