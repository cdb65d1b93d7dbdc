"""The inner optimizer: AdamW, and its learning rate at each step."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as step_adamw

from diloco.training.config.config import AdamWConfig


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, bit for bit, which changes nothing in a step whose gradients are not finite.

    torch's own methods import its compiler, which takes a second: these are the same without their guard, and not
    to be called in code that torch compiles.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    @torch.no_grad()
    def step(self, closure: None = None, *, found_inf: Tensor | None = None) -> None:
        """Take a step.

        Args:
            closure: none is called.
            found_inf: a scalar on the parameters' device; where it is 1, parameters and state stay as they are.
        """
        assert closure is None, "the gradients are there"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in parameters]
            beta1, beta2 = group["betas"]
            step_adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state |= no_moments(parameter)
        return state


def no_moments(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **zeros}


def adamw(model: nn.Module, config: AdamWConfig) -> AdamW:
    """The inner optimizer of the parameters that are trained."""
    assert config.weight_decay is not None, "the config is resolved"
    return AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(inner: AdamWConfig, step: float, *, num_steps: int) -> float:
    """Linear warm-up to the peak, then the schedule down to `final_fraction` of it, where it stays.

    With x from 0 to 1 on the way down, the height above that end is (1 + cos π x) / 2 for the cosine, and 1 − √x
    for wsd (arXiv 2405.18392), which begins at the last `decay_fraction` of the steps after `start_step`.
    Between two steps it is defined, too: where replicas come and go, the run need not stand at a whole step.

    Args:
        inner: the inner optimizer's settings, resolved.
        step: t.
        num_steps: T, the last step.
    """
    first, last = inner.start_step, num_steps
    assert inner.warmup_steps is not None, "the config is resolved"
    warm = first + inner.warmup_steps
    if step <= warm:
        if step <= first:
            return inner.start_rate
        return inner.start_rate + (inner.learning_rate - inner.start_rate) * (step - first) / inner.warmup_steps
    if inner.schedule == "cosine":
        progress = (min(step, last) - warm) / (last - warm)
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        begin = first + (1 - inner.decay_fraction) * (last - first)
        height = 1 - math.sqrt(max(0.0, min(step, last) - begin) / (last - begin))
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * height)
