"""Schedule-free AdamW."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.engine.parameters import local
from diloco.training.updates.update import State, Update
from diloco.wire.kernels.memory import widest


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Update):
    """Schedule-free AdamW (arXiv 2405.15682): x is an average of z, the gradient is taken between both, at y.

    y = x + (1 − β₁)(z − x);  v ← β₂ v + (1 − β₂) g(y)²
    z ← z − η (g / (√(v / (1 − β₂ᵗ)) + ε) + λ y);  x ← x + c (z − x), c = η² / Σ η²

    The parameters are x, but for the passes of a step: x is what is exchanged, evaluated and exported, and θ of
    DiLoCo. The state has u = z − x in the place of z. So a merge that moves x moves y and z as far, and u, how far
    z is ahead, stays. In u the second line is, with w = u − η (…): x ← x + c w; u ← (1 − c) w.

    √(v / (1 − β₂ᵗ)) is that of the authors' code; the paper's runs had η √(1 − β₂ᵗ) in its place, which the code
    calls less stable, and which would also change the weights η².
    """

    has_gradient_point = True

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def state(self, parameter: Tensor) -> State:
        """Steps t, Σ η², v and u."""
        scalars = {
            name: torch.zeros((), dtype=widest(parameter.device), device=parameter.device)
            for name in ("step", "rate_squares")
        }
        return {**scalars, **{name: torch.zeros_like(parameter.detach()) for name in ("exp_avg_sq", "ahead")}}

    def gradient_point(self, shard: Tensor, state: State) -> Tensor:
        """Y."""
        return shard + (1 - self.beta1) * state["ahead"]

    def moved(self, parameter: Tensor, gradient: Tensor, state: State, learning_rate: float) -> list[Tensor]:
        """The class's equations."""
        x, ahead = local(parameter), state["ahead"]
        step, squares = state["step"] + 1, state["rate_squares"] + learning_rate**2
        second = state["exp_avg_sq"].lerp(gradient.square(), 1 - self.beta2)
        direction = gradient / ((second / (1 - self.beta2**step)).sqrt() + self.epsilon)
        direction += self.weight_decay * self.gradient_point(x, state)
        ahead = ahead - learning_rate * direction
        weight = learning_rate**2 / squares
        return [x + weight * ahead, step, squares, second, (1 - weight) * ahead]
