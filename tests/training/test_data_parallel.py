"""The baseline on two real processes."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import run_replicas

from diloco.training.checkpoints import Checkpoints
from diloco.training.config import TrainConfig
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.recipes import tiny
from diloco.training.resolve import resolve
from diloco.training.state import TrainState, initial_state
from diloco.training.step import inner_step
from diloco.training.world import World, alone, world_of

SAVED, LAST = 3, 6


def config_of(num_replicas: int) -> TrainConfig:
    unresolved = replace(
        tiny(), num_replicas=num_replicas, method="data_parallel", micro_batch=2, precision="fp32"
    )
    return resolve(unresolved, vocab_size=257, prepared=Path())


def advance(state: TrainState, config: TrainConfig, world: World, last: int) -> list[float]:
    losses = []
    for step in range(state.step + 1, last + 1):
        tokens = np.random.default_rng(step).integers(0, 257, (config.global_batch, config.sequence_length + 1))
        share = np.split(np.sort(tokens), config.num_replicas)[world.replica]
        losses.append(inner_step(state, share, config, world, 1e-3)[0])
        assert state.sync.step() == ()
        state.step = step
    return losses


def train_and_resume(folder: Path) -> tuple[list[float], dict[str, np.ndarray], bool, bool]:
    """Losses and final parameters; whether a resumed replica has the same, and has counted the same bytes."""
    config = config_of(2)
    world = world_of(config, torch.device("cpu"), timedelta(seconds=20), is_first_on_machine=False)
    state = initial_state(config, world)
    checkpoints = Checkpoints(folder, world.replica, world.own_group, keep=1)
    losses = advance(state, config, world, SAVED)
    state.save(checkpoints)
    losses += advance(state, config, world, LAST)
    checkpoints.wait()
    resumed = initial_state(config, world)
    resumed.load(checkpoints, SAVED)
    same_losses = advance(resumed, config, world, LAST) == losses[SAVED:]
    num_params = sum(parameter.numel() for parameter in state.model.parameters())
    counted = {s.sync.bytes_sent for s in (state, resumed)} == {LAST * ring_all_reduce_bytes(num_params, 2)}
    parameters = {name: value.numpy() for name, value in state.sync.outer_parameters().items()}
    return losses, parameters, same_losses and resumed.sync.outer_hash() == state.sync.outer_hash(), counted


@pytest.mark.slow
def test_two_replicas_are_one_with_the_whole_batch_and_resume_bit_for_bit(tmp_path):
    one, other = run_replicas(train_and_resume, 2, tmp_path)
    config = replace(config_of(1), method="diloco", diloco=resolved_diloco())
    world = alone(config)
    state = initial_state(config, world)
    whole = []
    for step in range(1, LAST + 1):
        tokens = np.random.default_rng(step).integers(0, 257, (config.global_batch, config.sequence_length + 1))
        whole.append(inner_step(state, np.sort(tokens), config, world, 1e-3)[0])
    assert np.mean([one[0], other[0]], axis=0) == pytest.approx(whole, rel=1e-5)
    for name, parameter in state.model.named_parameters():
        np.testing.assert_array_equal(one[1][name], other[1][name])
        np.testing.assert_allclose(one[1][name], parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
    assert one[2:] == other[2:] == (True, True)


def resolved_diloco():
    return resolve(replace(tiny(), method="diloco"), vocab_size=257, prepared=Path()).diloco


def test_bytes_are_those_of_a_ring_all_reduce():
    assert [ring_all_reduce_bytes(1000, num_replicas) for num_replicas in (1, 2, 4)] == [0, 4000, 6000]
