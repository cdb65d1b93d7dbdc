"""The baseline on real processes: replicas of one process, and sharded ones."""

from pathlib import Path

import numpy as np
import pytest
from tests.processes import run_replicas
from tests.training.cases import narrow, share_of, world_on_cpu

from diloco.engine.parameters import gathered
from diloco.outer.digest import parameters_hash
from diloco.training.config.config import OptimizerConfig, TrainConfig
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.loop import inner_step
from diloco.training.records.checkpoints import Checkpoints
from diloco.training.state import TrainState, initial_state
from diloco.training.world import World, alone

SAVED, LAST = 2, 4


def config_of(num_replicas: int, num_shards: int = 1, optimizer: str = "adamw") -> TrainConfig:
    processes = {"num_replicas": num_replicas, "shards_per_replica": num_shards}
    inner = OptimizerConfig(name=optimizer)
    return narrow(**processes, method="data_parallel", micro_batch=1, optimizer=inner)


def advance(state: TrainState, config: TrainConfig, world: World, last: int) -> list[tuple[float, float]]:
    """The loss of the replica, and the norm of the average gradient, at each step."""
    losses = []
    for step in range(state.step + 1, last + 1):
        losses.append(inner_step(state, share_of(config, world, step), world, 1e-3))
        assert state.synchronizer.step() == ()
        state.step = step
    return losses


def train_and_resume(num_replicas: int, num_shards: int, optimizer: str, folder: Path) -> tuple:
    """Losses, parameters, outer hash and counters of a process, and whether a resumed one has the same."""
    config = config_of(num_replicas, num_shards, optimizer)
    world = world_on_cpu(config)
    state = initial_state(config, world)
    checkpoints = Checkpoints(folder, world.replica, world.host_group, keep=1)
    losses = advance(state, config, world, SAVED)
    state.save(checkpoints)
    losses += advance(state, config, world, LAST)
    checkpoints.wait()
    world.host_group.barrier()  # the first process writes the checksums last
    resumed = initial_state(config, world)
    resumed.load(checkpoints, SAVED)
    same_losses = advance(resumed, config, world, LAST) == losses[SAVED:]
    parameters = {name: gathered(value) for name, value in state.synchronizer.outer_parameters().items()}
    outer_hash = state.synchronizer.outer_hash()
    assert outer_hash == parameters_hash(parameters)
    same = (
        same_losses
        and resumed.synchronizer.outer_hash() == outer_hash
        and resumed.synchronizer.bytes_sent == state.synchronizer.bytes_sent
    )
    return (
        losses,
        {name: value.numpy() for name, value in parameters.items()},
        outer_hash,
        state.synchronizer.logs(computed=False),
        same,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "num_shards", "optimizer"),
    [(2, 1, "schedule_free"), (2, 2, "sgd")],
)
def test_replicas_are_one_with_the_whole_batch_and_resume_bit_for_bit(
    tmp_path, num_replicas, num_shards, optimizer
):
    """By DistributedDataParallel, and with FSDP2: losses, gradients and parameters of one process."""
    sizes = num_replicas, num_shards
    processes = run_replicas(train_and_resume, num_replicas * num_shards, *sizes, optimizer, tmp_path)
    config = config_of(1, optimizer=optimizer)
    world = alone(config.precision)
    state = initial_state(config, world)
    assert state.forward is state.model, "a replica alone has nobody to average with"
    whole = []
    for step in range(1, LAST + 1):
        whole.append(inner_step(state, share_of(config, world, step), world, 1e-3))
    assert np.mean([losses for losses, *_ in processes], axis=0) == pytest.approx(np.array(whole), rel=1e-5)
    num_params = sum(parameter.numel() for parameter in state.model.parameters())
    for _, parameters, outer_hash, counters, resumed_alike in processes:
        for name, parameter in state.model.named_parameters():
            np.testing.assert_allclose(parameters[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
        assert outer_hash == processes[0][2] and resumed_alike
        assert counters["bytes_sent"] == LAST * ring_all_reduce_bytes(num_params, num_replicas)
        assert (counters["blocked_seconds"] > 0) == (num_replicas > 1)


def test_bytes_are_those_of_a_ring_all_reduce():
    assert [ring_all_reduce_bytes(1000, num_replicas) for num_replicas in (1, 2, 4)] == [0, 4000, 6000]
