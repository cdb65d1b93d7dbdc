"""What the loop makes of errors that are not its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.errors import TrainingError
from diloco.training.config import resolve
from diloco.training.loop import _lack_of_memory_explained
from diloco.training.recipes import tiny
from diloco.training.world import alone


def too_much() -> None:
    torch.empty(1 << 62, dtype=torch.uint8)


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 39.00 GiB.\nAnd more.")


@pytest.mark.parametrize("allocate", [too_much, too_much_for_a_gpu])
def test_a_lack_of_memory_names_the_settings_that_take_it(allocate):
    config = resolve(replace(tiny(), num_replicas=1, name="r"), vocab_size=257, prepared=Path())
    expected = r"not enough memory on its cpu: .*--micro-batch \(now 8\).*--resume runs/r \(.*allocate.*\)$"
    with pytest.raises(TrainingError, match=expected), _lack_of_memory_explained(config, alone(config)):
        allocate()


def test_other_errors_pass():
    config = resolve(replace(tiny(), num_replicas=1), vocab_size=257, prepared=Path())
    with pytest.raises(RuntimeError, match=r"^shapes"), _lack_of_memory_explained(config, alone(config)):
        raise RuntimeError("shapes differ")
