"""Steps that end after the next one has begun, as on a GPU."""

from collections import deque
from dataclasses import asdict, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.fake_device import FakeDevice
from tests.processes import run_replicas
from tests.training.cases import begin, narrow, tokens_of, world_on_cpu

from diloco.errors import TrainingError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import DilocoConfig, TrainConfig
from diloco.training.loop import end_step
from diloco.training.state import initial_state
from diloco.training.world import alone

TIMES = ("step_seconds", "blocked_seconds", "engine")
LAST = 14


def config_of(num_replicas: int, **changes) -> TrainConfig:
    diloco = DilocoConfig(sync_every=5, layers_per_fragment=1, overlap_steps=2)
    return narrow(num_replicas=num_replicas, diloco=diloco, num_tokens=LAST * 8 * 64, **changes)


def batch_of(config: TrainConfig, step: int, replica: int = 0) -> np.ndarray:
    return tokens_of(config, config.process_batch, step, replica)


def metrics_of(steps_ahead: int) -> list[dict]:
    """The metrics of every step but for times."""
    config = config_of(2)
    world = world_on_cpu(config)
    state, begun, measured = initial_state(config, world), deque(), []
    while not state.is_over:
        begun.append(begin(state, batch_of(config, state.step + 1, world.replica), config, world))
        while len(begun) > (0 if state.is_over else steps_ahead):
            metrics = asdict(end_step(begun.popleft(), state, world, since=0.0))
            for outer_step in metrics["outer_steps"]:
                del outer_step["blocked_seconds"]
            measured.append({name: value for name, value in metrics.items() if name not in TIMES})
    return measured


def metrics_of_both() -> list[list[dict]]:
    return [metrics_of(steps_ahead) for steps_ahead in (0, 1)]


def test_a_step_that_ends_later_has_the_same_metrics():
    for at_once, later in run_replicas(metrics_of_both, 2):
        assert at_once == later and [metrics["step"] for metrics in later] == list(range(1, LAST + 1))
        assert sum(metrics["mean_loss"] is not None for metrics in later) > 3


def test_a_loss_that_is_not_finite_is_named_later_and_changes_nothing():
    config = config_of(1)
    world = alone(config.precision)
    state, begun = initial_state(config, world), {}
    for step in (1, 2, 3):
        begun[step] = begin(state, batch_of(config, step), config, world)
    kept = [parameter.clone() for parameter in state.model.parameters()]
    moments = [value.clone() for values in state.optimizer.state.values() for value in values.values()]
    with torch.no_grad():
        state.model.blocks[0].mlp_norm.weight[0] = torch.nan
    begun[4] = begin(state, batch_of(config, 4), config, world)
    state.model.blocks[0].mlp_norm.weight.data.copy_(dict(zip(names(state), kept, strict=True))[NORM])
    assert all(map(torch.equal, state.model.parameters(), kept)), "the step has changed no parameter"
    after = [value for values in state.optimizer.state.values() for value in values.values()]
    assert all(map(torch.equal, after, moments)), "nor a moment"
    begun[5] = begin(state, batch_of(config, 5), config, world)
    for step in (1, 2, 3):
        assert end_step(begun[step], state, world, since=0.0).step == step
    with pytest.raises(TrainingError, match="step 4: the loss of replica 0 is nan"):
        end_step(begun[4], state, world, since=0.0)


NORM = "blocks.0.mlp_norm.weight"


def names(state) -> list[str]:
    return [name for name, _ in state.model.named_parameters()]


def on_the_fake_device(like_apples: bool) -> tuple[list[float], list[str], list[list[int]], list[str], list[int]]:
    """A replica on the device: losses, the host's waits, copies off the device, races, and steps that ended late.

    A step is late if the host waits there for operations that came after its own.
    """
    config, build = config_of(1, log_layer_cosine=True), DecoderConfig.build

    def build_there(model: DecoderConfig, *, seed: int) -> torch.nn.Module:
        return device.on_device(build(model, seed=seed))

    with FakeDevice(like_apples=like_apples) as device, patch.object(DecoderConfig, "build", build_there):
        world = replace(alone(config.precision), device=device.device)
        state, begun, losses, waits, copies = initial_state(config, world), deque(), [], [], []
        training, late = device.stream, []
        while not state.is_over:
            batch = batch_of(config, state.step + 1)
            device.clear()
            step = begin(state, batch, config, world)
            begun.append((step, training.known[training.index]))
            waits += [] if state.is_over else device.host_reads  # with the last step `finish` waits for the device
            copies.append([num_bytes for num_bytes in device.to_host if num_bytes > 64])
            while len(begun) > (0 if state.is_over else 1):
                device.clear()
                step, num_operations = begun.popleft()
                losses.append(end_step(step, state, world, since=0.0).loss)
                if device.waited_for[training.index] > num_operations:
                    late.append(step.step)
        return losses, waits, copies, device.races, late


@pytest.mark.slow
def test_a_step_on_a_gpu_is_begun_without_a_wait():
    """A send copies a payload off the device; other copies, of logs and merges, are of a few numbers."""
    config = config_of(1)
    world = alone(config.precision)
    state, expected = initial_state(config, world), []
    for step in range(1, LAST + 1):
        begun = begin(state, batch_of(config, step), config, world)
        expected.append(end_step(begun, state, world, since=0.0).loss)
    [(losses, waits, copies, races, late)] = run_replicas(on_the_fake_device, 1, False)
    assert losses == pytest.approx(expected, rel=1e-4)
    [(on_apples, *_)] = run_replicas(on_the_fake_device, 1, True)
    assert on_apples == pytest.approx(losses, rel=1e-6)
    assert not waits and not races and not late
    assert [step for step, num in enumerate(copies, start=1) if num] == [5, 6, 8, 10, 11, 13]
    assert set(map(len, copies)) == {0, 1}


def in_precision(precision: str) -> tuple[str, list[float], list[set[torch.dtype]]]:
    """The hash of Θ, the losses, and the dtypes of parameters, moments and outer parameters."""
    config = replace(config_of(2), precision=precision)
    world = world_on_cpu(config)
    state, losses = initial_state(config, world), []
    while not state.is_over:
        begun = begin(state, batch_of(config, state.step + 1, world.replica), config, world)
        losses.append(end_step(begun, state, world, since=0.0).loss)
    assert not world.autocast
    moments = [values[name] for values in state.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = state.model.parameters(), moments, state.synchronizer.outer_parameters().values()
    return state.synchronizer.outer_hash(), losses, [{tensor.dtype for tensor in some} for some in tensors]


def in_both_precisions() -> list[tuple]:
    return [in_precision(precision) for precision in ("fp32", "bf16-params")]


def test_parameters_in_bfloat16_learn_beside_outer_parameters_in_fp32():
    results, others = run_replicas(in_both_precisions, 2)
    assert [outer_hash for outer_hash, *_ in results] == [outer_hash for outer_hash, *_ in others]
    (_, losses, _), (_, in_bf16, dtypes) = results
    assert dtypes == [{torch.bfloat16}, {torch.bfloat16}, {torch.float32}]
    assert in_bf16 == pytest.approx(losses, abs=0.05) and in_bf16 != losses
    assert in_bf16[-1] < in_bf16[0] - 0.1
