"""AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from diloco.training.updates.update import State, Update


@dataclass(frozen=True, kw_only=True)
class AdamW(Update):
    """AdamW (arXiv 1711.05101), torch's fused one, bit for bit, with the decay multiplied by the learning rate.

    m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  θ ← θ − η λ θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
    """

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def state(self, parameter: Tensor) -> State:
        """Steps t, and the moments m and v."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}}

    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        *,
        learning_rate: float,
        found_inf: Tensor,
    ) -> None:
        """Take a step of all parameters at once."""
        adamw(
            [*parameters],
            [*gradients],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            maximize=False,
        )
