"""An update: how a parameter moves by its gradient, a file each."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from diloco.engine.parameters import local

State = Mapping[str, Tensor]
"""The tensors that an update keeps of a parameter, by name; sharded as the parameter is, or scalars."""


class Update(ABC):
    """One step of some parameters by their gradients."""

    has_gradient_point: ClassVar[bool] = False
    """True if gradients are taken at `gradient_point`, and not at θ."""

    @abstractmethod
    def state(self, parameter: Tensor) -> State:
        """The state of a parameter before its first step."""

    def moved(self, parameter: Tensor, gradient: Tensor, state: State, learning_rate: float) -> list[Tensor]:
        """The new values of this process's shard of a parameter, and of its state's tensors, in their order.

        An update has this, or a `step` of its own.

        Args:
            parameter: θ, whole or sharded; all processes of a replica call it for the same parameters in order.
            gradient: g, this process's shard.
            state: this process's shards.
            learning_rate: η.
        """
        raise NotImplementedError

    def gradient_point(self, shard: Tensor, state: State) -> Tensor:
        """The values at which the gradient is taken, of a shard of a parameter."""
        return shard

    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        *,
        learning_rate: float,
        found_inf: Tensor,
    ) -> None:
        """Take a step in place; where `found_inf`, a scalar on the device, is 1, nothing changes."""
        skips = found_inf.bool()
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            shards = {name: local(tensor) for name, tensor in state.items()}
            moved = self.moved(parameter, local(gradient), shards, learning_rate)
            for old, new in zip([local(parameter), *shards.values()], moved, strict=True):
                torch.where(skips, old, new, out=old)
