"""A merge rule of one's own: the replica stays within a limit of Θ."""

from dataclasses import dataclass

import torch
from torch import Tensor

import diloco
from diloco.extend import MergeRule, Past

model = torch.nn.Linear(8, 1)


# --8<-- [start:rule]
@dataclass(frozen=True)
class Clipped(MergeRule):
    """θ ← Θ + clamp(θ − Θ, ±limit)."""

    limit: float

    def merge(self, theta_N: Tensor, outer_N: Tensor, past: Past) -> Tensor:
        return outer_N + (theta_N - outer_N).clamp(-self.limit, self.limit)


# --8<-- [end:rule]

# --8<-- [start:use]
engine = diloco.StreamingDiLoCo(
    model,
    fragments="whole",
    sync_every=2,
    overlap_steps=0,
    mixing=Clipped(0.01),
    exchange=diloco.LoopbackExchange(),
)
# --8<-- [end:use]

for _ in range(2):
    with torch.no_grad():
        model.weight.add_(1)
    engine.step()
outer = engine.outer_parameters()["weight"]
assert 0 < (model.weight - outer).abs().max() <= 0.01 + 1e-6
