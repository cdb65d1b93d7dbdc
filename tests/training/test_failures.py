"""Errors of torch, explained."""

from types import SimpleNamespace

import pytest
import torch
from tests.training.cases import resolved

from diloco.errors import ExchangeError, TrainingError
from diloco.training.loop import lack_of_memory_explained, lost_processes_named
from diloco.training.world import alone


def too_much() -> None:
    torch.empty(1 << 62, dtype=torch.uint8)


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 39.00 GiB.\nAnd more.")


@pytest.mark.parametrize("allocate", [too_much, too_much_for_a_gpu])
def test_a_lack_of_memory_names_the_settings_that_take_it(allocate):
    config = resolved(num_replicas=1, name="r")
    expected = r"not enough memory on its cpu: .*micro_batch \(now 8\).*resume runs/r \(.*allocate.*\)$"
    with pytest.raises(TrainingError, match=expected), lack_of_memory_explained(config, alone(config.precision)):
        allocate()


def test_other_errors_pass():
    config = resolved(num_replicas=1)
    with pytest.raises(RuntimeError, match=r"^shapes"), lack_of_memory_explained(config, alone(config.precision)):
        raise RuntimeError("shapes differ")


def test_a_collective_that_lost_a_process_names_the_step():
    state = SimpleNamespace(step=3)
    expected = r"^step 4: another process of the run is gone: .*gloo.*closed by peer$"
    with pytest.raises(ExchangeError, match=expected), lost_processes_named(state):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer\nmore")
    with pytest.raises(ExchangeError, match=r"^fragment 1"), lost_processes_named(state):
        raise ExchangeError("fragment 1")
