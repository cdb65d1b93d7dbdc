"""SGD with momentum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.engine.parameters import local
from diloco.training.updates.update import State, Update


@dataclass(frozen=True, kw_only=True)
class SGD(Update):
    """SGD with momentum, as torch.optim.SGD has it, but with a decay beside the gradient (arXiv 1711.05101).

    v ← μ v + g;  θ ← θ − η λ θ − η (g + μ v), without Nesterov θ ← θ − η λ θ − η v
    """

    momentum: float
    nesterov: bool
    weight_decay: float

    def state(self, parameter: Tensor) -> State:
        """The momentum v."""
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def moved(self, parameter: Tensor, gradient: Tensor, state: State, learning_rate: float) -> list[Tensor]:
        """The class's equations."""
        momentum = self.momentum * state["momentum_buffer"] + gradient
        update = gradient + self.momentum * momentum if self.nesterov else momentum
        decayed = local(parameter) * (1 - learning_rate * self.weight_decay)
        return [decayed - learning_rate * update, momentum]
