"""Schedule-free optimizers (arXiv 2405.15682), whose result x is an average that stands in no tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diloco.engine.parameters import local, sharded_like
from diloco.errors import UserError


class ScheduleFreeMasters:
    """The `masters` of a model that an optimizer of the package `schedulefree` trains: θ is x.

    Schedule-free keeps z, the sequence of the base optimizer, and x, its running average; gradients are taken at

        y = β x + (1 − β) z.

    In training the parameters are y, and the optimizer's state has z: so x = y + (1 − 1/β)(z − y). In evaluation,
    after `optimizer.eval()`, the parameters are x. The outer gradient is Δ = Θ − x, so that Θ is made of what
    schedule-free ships, and a merge changes x by d = α x + (1 − α) Θ − x. All three sequences move by d:

        x ← x + d;  z ← z + d;  y ← y + d.

    This keeps y = β x + (1 − β) z, and how far z is ahead of x. With α = 0, x = Θ up to rounding on all replicas;
    where z = x, as before the first step, x = y = z = Θ.

    Where the engine puts Θ into the model, Θ is x: the optimizer is in evaluation there, and `optimizer.eval()`
    changes nothing. After `engine.copy_outer_to_model()` call `optimizer.train()` to train on.

    The outer momentum speeds up x, and z with it: with α = 0 and a momentum of 0.9 training diverges. Take the
    engine's default mixing, or no outer momentum.

    Args:
        model: the replica's copy.
        optimizer: its AdamWScheduleFree, RAdamScheduleFree or SGDScheduleFree.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = dict(model.named_parameters()), optimizer

    @torch.no_grad()
    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of x."""
        return {s.name: sharded_like(s.x(), self._parameters[s.name]) for s in self._sequences(names)}

    @torch.no_grad()
    def write(self, masters: Mapping[str, Tensor]) -> None:
        """Move the parameters and z as far as x was moved."""
        for sequences in self._sequences(masters):
            moved = local(masters[sequences.name]) - sequences.x()
            sequences.parameter.add_(moved)
            if sequences.z is not None:
                sequences.z.add_(moved)

    def expose(self) -> Callable[[], None]:
        """Begin the optimizer's evaluation, without a change of values; the returned function ends it alike."""
        modes = [(group, group["train_mode"]) for group in self._optimizer.param_groups]

        def set_back() -> None:
            for group, mode in modes:
                group["train_mode"] = mode

        for group, _ in modes:
            group["train_mode"] = False
        return set_back

    def _sequences(self, names: Iterable[str]) -> "Iterator[_Sequences]":
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for name in names:
            parameter = self._parameters[name]
            if (group := groups.get(id(parameter))) is None:
                raise UserError(f"parameter {name} is in no group of the schedule-free optimizer", "masters")
            z = self._optimizer.state[parameter].get("z")
            beta = group["betas"][0] if "betas" in group else group["momentum"]
            if beta == 0:
                raise UserError(
                    "with β = 0 x can't be computed from y and z: set betas or momentum above 0", "masters"
                )
            z = None if z is None else local(z)
            yield _Sequences(name, local(parameter), z, beta if group["train_mode"] else 1.0)


class _Sequences(NamedTuple):
    """The tensors of one parameter."""

    name: str
    parameter: Tensor
    """y, or x in evaluation."""
    z: Tensor | None
    """z; None before the first step."""
    beta: float
    """β; 1 in evaluation, where the parameter is x itself."""

    def x(self) -> Tensor:
        y = self.parameter.float()
        return y.clone() if self.z is None else y + (1 - 1 / self.beta) * (self.z.float() - y)
