"""A torch optimizer as the outer rule: it takes Δ as the gradient of Θ, and its state lies in our slots.

Shapes: N elements of one fragment.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from diloco.errors import UserError
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import JSON, FragmentState, OuterRule
from diloco.schedule import Sync

_NUM_STEPS = "step"
_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how a step is computed, and not what: torch's defaults are taken."""


class TorchOptimizer:
    """Θ, s ← step(Θ, Δ, s), with the step and the state s of a torch optimizer.

    Each fragment is one flat parameter of an optimizer of its own: a norm over a parameter is one over a fragment.
    A tensor of s with an element for each of Θ's is a slot. So is a scalar, such as Adam's number of steps: each
    element of its slot holds it, so that a saved state may be cut into other fragments or shards. Θ has the same
    bits on all replicas if they compute on the same kind of device.

    Args:
        kind: the class of the optimizer.
        settings: its keyword arguments, all but the parameters.

    Raises:
        UserError: if a step needs more than a gradient, or its state has other shapes or dtypes.
    """

    shared = True

    def __init__(self, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._settings = {name: value for name, value in settings.items() if name not in _WAYS}
        self._vectors, self._scalars = self._slots_of_step()
        scalars = self._scalars if _NUM_STEPS in self._scalars else (*self._scalars, _NUM_STEPS)
        self.slots = (*self._vectors, *scalars)
        """The names of the optimizer's tensors and scalars; without a count of steps, one of ours."""

    def _slots_of_step(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the vectors and of the scalars in the state after one step."""
        theta_N = torch.zeros(7, requires_grad=True)
        theta_N.grad = torch.ones(7)
        name = self._kind.__name__
        try:
            optimizer = self._kind([theta_N], **self._settings)
            optimizer.step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"outer={name} can't take a step on a flat vector with its gradient alone ({error}): take another "
                "optimizer, or write an outer rule",
                "outer",
            ) from error
        vectors, scalars = [], []
        for slot, value in optimizer.state[theta_N].items():
            if isinstance(value, Tensor) and value.shape == theta_N.shape and value.dtype == torch.float32:
                vectors.append(slot)
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                scalars.append(slot)
            elif value is not None:
                shown = type(value).__name__
                if isinstance(value, Tensor):
                    shown = f"{tuple(value.shape)} in {value.dtype}"
                raise UserError(
                    f"outer={name} keeps {slot}, {shown}, beside a vector of 7 elements: an outer rule's state "
                    "holds FP32 tensors with an element for each parameter's, and scalars",
                    "outer",
                )
        return tuple(vectors), tuple(scalars)

    def facts(self) -> Mapping[str, JSON]:
        """The class and its settings."""
        settings: dict[str, JSON] = {"class": f"{self._kind.__module__}.{self._kind.__qualname__}"}
        for name, value in self._settings.items():
            if isinstance(value, tuple | list):
                settings[name] = [float(number) for number in value]
            else:
                settings[name] = value if isinstance(value, str | bool | None) else float(value)
        return settings

    def on_send(self, fragment: FragmentState, own: Callable[[], Tensor], sync: Sync) -> None:
        """Do nothing: the average of all is what counts."""

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the outer step."""
        outer_N = fragment.use("outer").detach().requires_grad_()
        outer_N.grad = average.divided()
        optimizer = self._kind([outer_N], **self._settings)
        slots = {name: fragment.use(name) for name in self.slots}
        num_steps = slots[_NUM_STEPS].max().item()
        if num_steps:  # else the optimizer begins its state itself
            state = {name: slots[name] for name in self._vectors}
            state |= {name: slots[name][:1].detach().cpu().clone().view(()) for name in self._scalars}
            optimizer.state[outer_N] = state
        optimizer.step()
        state = optimizer.state[outer_N]
        for name in self._vectors:
            slots[name].copy_(state[name])
        for name in self._scalars:
            slots[name].fill_(float(state[name]))
        if _NUM_STEPS not in self._scalars:
            slots[_NUM_STEPS].fill_(num_steps + 1)


def rule_of_optimizer(outer: Optimizer | type[Optimizer]) -> OuterRule:
    """The outer rule with the class and the settings of a torch optimizer, whatever parameters it was given.

    >>> rule_of_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.7, momentum=0.9, nesterov=True))
    Nesterov(lr=0.7, momentum=0.9)

    Raises:
        UserError: if the optimizer has several groups of parameters with other settings, or can't be a rule.
    """
    optimizer = cast(Any, outer)([torch.zeros(1, requires_grad=True)]) if isinstance(outer, type) else outer
    first, *others = ({n: group[n] for n in optimizer.defaults} for group in optimizer.param_groups)
    if any(other != first for other in others):
        raise UserError(
            f"outer={type(optimizer).__name__} has groups of parameters with other settings: give it one, since Θ "
            "is one vector per fragment",
            "outer",
        )
    is_nesterov = type(optimizer) is SGD and (first["nesterov"] or not first["momentum"])
    if is_nesterov and not (first["dampening"] or first["weight_decay"] or first["maximize"]):
        return Nesterov(lr=float(first["lr"]), momentum=float(first["momentum"]))
    # A group may hold more than the class takes: AdamW says there that it is Adam with decoupled weight decay.
    arguments = inspect.signature(type(optimizer)).parameters
    return TorchOptimizer(type(optimizer), {name: value for name, value in first.items() if name in arguments})
