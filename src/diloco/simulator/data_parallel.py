"""Data-Parallel in the physical model: a ring all-reduce of each layer's gradients at every step.

The all-reduces run one after the other, each once its gradients are ready on all replicas; a step ends with the
last. Replicas begin a step together, so that the slowest replica's compute time x decides its duration:

    seconds(x) = max(x, max_k (φ_k·x + Σ_{i ≥ k} all-reduce of i) + latency)

with gradients k in the order of the backward pass, those outside the blocks last, and φ_k the part of x after
which gradient k is ready: a step has the parts of the paper's simulator.

Shapes: B bandwidths, K gradients, L layers, S steps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.simulator.bandwidth import checked_gbit_s
from diloco.simulator.model_size import ModelSize
from diloco.simulator.replicas import Replica
from diloco.simulator.steady import Times


class DataParallelRun:
    """The duration of steps of Data-Parallel, for all bandwidths at once.

    Args:
        gbit_s: bandwidth of those links that have none of their own, (B,).
        replicas: the M machines.
        size: the model's parameters.
        bits_per_param: bits of one gradient value.
    """

    def __init__(
        self, gbit_s: ArrayLike, *, replicas: Sequence[Replica], size: ModelSize, bits_per_param: float
    ) -> None:
        gbit_s_B = checked_gbit_s(gbit_s)
        own = [replica.gbit_s for replica in replicas]
        slowest_B = np.minimum(
            np.inf if None not in own else gbit_s_B, min((g for g in own if g is not None), default=np.inf)
        ) * np.ones_like(gbit_s_B)
        num_replicas, num_layers = len(replicas), size.num_layers
        from_last_L = np.arange(1, num_layers + 1)
        parts_L = num_layers + 2 * from_last_L - (from_last_L == num_layers)
        self._ready_K = np.append(parts_L / (3 * num_layers - 1), 1.0)
        params_K = np.append(np.full(num_layers, size.block_params), size.outside_params)
        bits_K = 2 * (num_replicas - 1) / num_replicas * bits_per_param * params_K
        seconds_KxB = bits_K[:, None] / (slowest_B * 1e9)
        latency_seconds = 2 * (num_replicas - 1) * max(replica.latency_seconds for replica in replicas)
        self._left_KxB = seconds_KxB[::-1].cumsum(0)[::-1] + latency_seconds

    def run_seconds(self, slowest_S: NDArray[np.float64]) -> Times:
        """Duration of S steps, (B,), from the slowest replica's compute time in each."""
        total_B = np.zeros(self._left_KxB.shape[1])
        for some_S in np.array_split(slowest_S, -(-len(slowest_S) // 1000)):
            ends_SxKxB = self._ready_K[:, None] * some_S[:, None, None] + self._left_KxB
            total_B += np.maximum(ends_SxKxB.max(1), some_S[:, None]).sum(0)
        return total_B
