"""A torch optimizer as the outer rule: it takes Δ as the gradient of Θ, and its state lies in our slots.

Shapes: N elements of one fragment.
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
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

TORCH = "torch."
"""The beginning of the spelling of a torch optimizer, such as torch.AdamW:lr=0.1."""
_NUM_STEPS = "step"
_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how a step is computed, and not what: torch's defaults are taken."""


class TorchOptimizer(OuterRule):
    """Θ, s ← step(Θ, Δ, s), with the step and the state s of a torch optimizer.

    Each fragment is one flat parameter of an optimizer of its own: a norm over a parameter is one over a fragment,
    which a sharded replica of a fixed group does not have whole.
    A tensor of s with an element for each of Θ's is a slot. So is a scalar, such as Adam's number of steps: each
    element of its slot holds it, so that a saved state may be cut into other fragments or shards. Θ has the same
    bits on all replicas if they have the same torch, and the same model of processor or GPU.

    Args:
        kind: the class of the optimizer.
        settings: its keyword arguments, all but the parameters.

    Raises:
        UserError: if a step needs more than a gradient, or its state has other shapes or dtypes.
    """

    def __init__(self, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._settings = {name: value for name, value in settings.items() if name not in _WAYS}
        self._vectors, self._scalars = self._slots_of_step()
        self.facts()  # refuse now what replicas could not compare
        scalars = self._scalars if _NUM_STEPS in self._scalars else (*self._scalars, _NUM_STEPS)
        self.slots = (*self._vectors, *scalars)
        """The names of the optimizer's tensors and scalars; without a count of steps, one of ours."""

    def _slots_of_step(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the vectors and of the scalars in the state after one step."""
        theta_N = torch.zeros(7, dtype=torch.float32, device="cpu", requires_grad=True)
        theta_N.grad = torch.ones_like(theta_N)
        name = self._kind.__name__
        try:
            optimizer = self._kind([theta_N], **self._settings)
            begun = _settings_of(optimizer)
            optimizer.step()
        except Exception as error:  # of somebody's own class, anything
            raise UserError(
                f"outer={name} can't take a step on a flat vector with its gradient alone ({error}): take another "
                "optimizer, or write an outer rule",
                "outer",
            ) from error
        lost = {n: value for n, value in self._settings.items() if n in begun and begun[n] != value}
        changed = {n for n, value in _settings_of(optimizer).items() if n not in begun or begun[n] != value}
        if lost or changed:
            reason = f"takes {', '.join(lost)} otherwise" if lost else f"keeps state in its {', '.join(changed)}"
            raise UserError(
                f"outer={name} {reason}, which an outer rule made of its class and settings can't: take another "
                "optimizer, or write an outer rule",
                "outer",
            )
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

    @property
    def is_elementwise(self) -> bool:
        """True if each element's step is the same beside any others: a vector's is that of its parts."""
        values_N = torch.arange(1, 8, dtype=torch.float32, device="cpu")
        parts = [self._two_steps(part_n) for part_n in values_N.split(3)]
        return torch.allclose(torch.cat(parts, dim=1), self._two_steps(values_N))

    def _two_steps(self, values_n: Tensor) -> Tensor:
        """θ after each of two steps (2×n); the second gradient is long, since a rule may clip such ones alone."""
        theta_n, steps = values_n.clone().requires_grad_(), list[Tensor]()
        optimizer = self._kind([theta_n], **self._settings)
        for factor in (1.0, -1e4):
            theta_n.grad = factor * values_n.cos()
            optimizer.step()
            steps.append(theta_n.detach().clone())
        return torch.stack(steps)

    def facts(self) -> Mapping[str, JSON]:
        """The class and its settings."""
        settings = {name: _json(name, value) for name, value in self._settings.items()}
        return {"class": f"{self._kind.__module__}.{self._kind.__qualname__}", **settings}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "TorchOptimizer | None":
        """The rule with these facts, if its class is one of torch.optim; None for another."""
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
        module, _, name = str(settings.pop("class")).rpartition(".")
        kind = _optimizer(name) if module.startswith("torch.optim") else None
        return None if kind is None else cls(kind, settings)

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        """Take the outer step; a process that holds nothing of the fragment has none to take."""
        if not fragment.use("outer").numel():
            return
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

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.7, momentum=0.9, nesterov=True)
    >>> rule_of_optimizer(optimizer) == Nesterov(lr=0.7, momentum=0.9)
    True

    Raises:
        UserError: if the optimizer has several groups of parameters with other settings, or can't be a rule.
    """
    optimizer = _built(outer, {}) if isinstance(outer, type) else outer
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
    arguments = _arguments_of(type(optimizer))
    return TorchOptimizer(type(optimizer), {name: value for name, value in first.items() if name in arguments})


def spelled_optimizer(spec: str) -> OuterRule:
    """The outer rule of a spelling such as `torch.AdamW:lr=0.1,betas=0.9+0.99`.

    Raises:
        UserError: if torch.optim has no such optimizer, it takes no such settings, or can't be a rule.
    """
    name, _, options = spec.partition(":")
    if (kind := _optimizer(name.removeprefix(TORCH))) is None:
        raise UserError(f"{spec!r}: torch.optim has no {name.removeprefix(TORCH)}: take torch.AdamW, or another")
    settings = {key: text for key, _, text in (option.partition("=") for option in options.split(",") if option)}
    if unknown := [key for key in settings if key not in _arguments_of(kind) - {"self", "params", *_WAYS}]:
        raise UserError(f"{unknown[0]!r} is not a setting of {name}")
    return rule_of_optimizer(_built(kind, {key: _value(text) for key, text in settings.items()}))


def _optimizer(name: str) -> type[Optimizer] | None:
    """The optimizer of torch.optim that has a name."""
    kind = getattr(torch.optim, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer else None


def _value(text: str) -> Any:
    """The value of a setting: a number, a truth value, none, a word, or several, which + joins."""
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return tuple(map(_value, text.split("+"))) if "+" in text else text


def _arguments_of(kind: type) -> set[str]:
    """The names of a class's arguments, those that it passes on to the class above included."""
    arguments = inspect.signature(kind.__init__).parameters
    if any(each.kind is each.VAR_KEYWORD for each in arguments.values()) and kind is not Optimizer:
        return {*arguments, *_arguments_of(kind.__mro__[1])}
    return {*arguments}


def _built(kind: type[Optimizer], settings: Mapping[str, Any]) -> Optimizer:
    """An optimizer of a class with settings, and its own defaults for the others."""
    try:
        return cast(Any, kind)([torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)], **settings)
    except Exception as error:  # of somebody's own class, anything
        raise UserError(
            f"outer={kind.__name__} can't be built for a flat vector ({error}): pass an optimizer with its "
            "settings, another class, or an outer rule",
            "outer",
        ) from error


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """All that an optimizer's one group of parameters holds besides them."""
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def _json(name: str, value: Any) -> JSON:
    """A setting as replicas compare it."""
    if isinstance(value, tuple | list):
        return [_json(name, each) for each in value]
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise UserError(
        f"outer={name}={type(value).__name__} is a setting that replicas can't compare: take numbers, words and "
        "truth values, or write an outer rule",
        "outer",
    )
