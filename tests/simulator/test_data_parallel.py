import numpy as np
import pytest

from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_a_step_ends_with_the_last_of_its_all_reduces(num_replicas):
    """Each layer's all-reduce begins when the slowest replica has its gradients and the link is free."""
    num_layers, steps, gbit_s = 4, [1.0] * (num_replicas - 1) + [1.5], 10.0
    model = PhysicalModel(
        settings=MethodSettings(method="data_parallel"),
        size=ModelSize(num_params=1e9, num_layers=num_layers, width=2048, vocab_size=50_000),
        replicas=[Replica(step_seconds=s, latency_seconds=0.01) for s in steps],
        wire="bf16",
    )
    link = 0.0
    for layer in range(num_layers, 0, -1):
        nodes = num_layers + 2 * (num_layers - layer + 1) - (layer == 1)
        link = max(link, 1.5 * nodes / (3 * num_layers - 1))
        link += 2 * (num_replicas - 1) / num_replicas * 16 * model.size.block_params / 1e10
    link = max(link, 1.5) + 2 * (num_replicas - 1) / num_replicas * 16 * 50_000 * 2048 / 1e10
    link += 2 * (num_replicas - 1) * 0.01
    expected = np.mean(steps) / link
    np.testing.assert_allclose(model.compute_utilization([gbit_s]), expected)
    np.testing.assert_allclose(model.compute_utilization([gbit_s], num_steps=2500), expected)
