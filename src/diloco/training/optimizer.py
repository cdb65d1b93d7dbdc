"""The inner optimizers: how a parameter moves by its gradient, and the learning rate at each step."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from diloco.engine.parameters import gathered, local, own_place, sharded_like
from diloco.errors import UserError
from diloco.models.language_model import LanguageModel
from diloco.training.config.config import OptimizerConfig
from diloco.wire.kernels.memory import widest

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
        weight = learning_rate**2 / squares.clamp(min=torch.finfo(squares.dtype).tiny)  # 0 / 0 is 0
        return [x + weight * ahead, step, squares, second, (1 - weight) * ahead]


@dataclass(frozen=True, kw_only=True)
class Muon(Update):
    """Muon, as torch.optim.Muon has it, bit for bit, with its `adjust_lr_fn="match_rms_adamw"`.

    b ← b + (1 − μ) (g − b);  u = g + μ (b − g), without Nesterov u = b
    θ ← θ − η λ θ − 0.2 η √max(A, B) orthogonal(u)      for a matrix of A × B

    An orthogonal matrix has elements of about 1/√max(A, B), so that each update is 0.2 η in the root mean square,
    as AdamW's are (arXiv 2502.16982, section 2.2): a learning rate that suits AdamW suits Muon.

    Of a replica with shards each process gathers the whole u in bfloat16, and orthogonalizes it: nothing else is
    exchanged, and the processes' matrices are one, bit for bit.
    """

    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float

    def state(self, parameter: Tensor) -> State:
        """The momentum b."""
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def moved(self, parameter: Tensor, gradient: Tensor, state: State, learning_rate: float) -> list[Tensor]:
        """The class's equations."""
        momentum = state["momentum_buffer"].lerp(gradient, 1 - self.momentum)
        update = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        whole = orthogonal(gathered(sharded_like(update.bfloat16(), parameter)), self.ns_steps)
        direction = whole[own_place(parameter, part=False)]
        rate = learning_rate * 0.2 * math.sqrt(max(parameter.shape))
        decayed = local(parameter) * (1 - learning_rate * self.weight_decay)
        return [decayed.add_(direction, alpha=-rate), momentum]


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """U Vᵀ of a matrix U S Vᵀ, nearly: the singular values come to lie about 1, most within 0.3 of it.

    Steps of the Newton-Schulz iteration X ← a X + (b G + c G²) X with G = X Xᵀ, in bfloat16, from X of norm 1;
    a, b and c are Keller Jordan's, which raise small singular values fast.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


_A, _B, _C = 3.4445, -4.7750, 2.0315


class InnerOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters each have an update, and all their state from the start.

    torch's own methods import its compiler, which takes a second: these are the same without their guard, and not
    to be called in code that torch compiles.

    Args:
        parameters: the updates, and the parameters of each.
        learning_rate: of the first step, until `param_groups` say another.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(self, parameters: Sequence[tuple[Update, Sequence[nn.Parameter]]], learning_rate: float) -> None:
        groups = [{"params": [*of_one], "update": update} for update, of_one in parameters if of_one]
        super().__init__(groups, {"lr": learning_rate})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {**group["update"].state(parameter)}

    @torch.no_grad()
    def step(  # pyrefly: ignore[bad-override]
        self, closure: None = None, *, found_inf: Tensor | None = None
    ) -> None:
        """Take a step.

        Args:
            closure: none is called.
            found_inf: a scalar on the parameters' device; where it is 1, parameters and state stay as they are.
        """
        assert closure is None, "the gradients are there"
        if found_inf is None:
            found_inf = torch.zeros((), dtype=torch.float32, device=self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                group["update"].step(
                    parameters,
                    [parameter.grad for parameter in parameters],
                    [self.state[parameter] for parameter in parameters],
                    learning_rate=group["lr"],
                    found_inf=found_inf,
                )

    @contextmanager
    def at_gradient_points(self) -> Iterator[None]:
        """A context in which the parameters have the values at which their update takes gradients."""
        own: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for group in (group for group in self.param_groups if group["update"].has_gradient_point):
                for shard, state in ((local(p), self.state[p]) for p in group["params"]):
                    shards = {name: local(tensor) for name, tensor in state.items()}
                    own.append((shard, shard.clone()))
                    shard.copy_(group["update"].gradient_point(shard, shards))
        try:
            yield
        finally:
            for shard, kept in own:
                shard.copy_(kept)


def inner_optimizer(model: LanguageModel, config: OptimizerConfig) -> InnerOptimizer:
    """The optimizer of the parameters that are trained.

    With muon, it moves the matrices of the blocks, and AdamW embeddings, head and vectors, at the same rate.

    Raises:
        UserError: if there are no such matrices.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay, nesterov = config.decay_per_rate, {"momentum": config.momentum, "nesterov": config.nesterov}
    moments = {"beta1": config.beta1, "beta2": config.beta2, "epsilon": config.epsilon}
    adamw = AdamW(**moments, weight_decay=decay)
    if config.name == "muon":
        in_blocks = {parameter for parameter in model.blocks.parameters() if parameter.ndim == 2}
        matrices = [parameter for parameter in trained if parameter in in_blocks]
        if not matrices:
            raise UserError(
                "optimizer.name=muon moves matrices of the model's blocks, and none is there to be trained: take "
                "adamw",
                "optimizer.name",
            )
        others = [parameter for parameter in trained if parameter not in in_blocks]
        muon = Muon(**nesterov, ns_steps=config.ns_steps, weight_decay=decay)
        return InnerOptimizer([(muon, matrices), (adamw, others)], config.learning_rate)
    updates: dict[str, Update] = {
        "adamw": adamw,
        "sgd": SGD(**nesterov, weight_decay=decay),
        "schedule_free": ScheduleFree(**moments, weight_decay=decay),
    }
    return InnerOptimizer([(updates[config.name], trained)], config.learning_rate)


def learning_rate(inner: OptimizerConfig, step: float, *, num_steps: int) -> float:
    """Linear warm-up to the peak, then the schedule down to `final_fraction` of it, where it stays.

    Schedule-free stays at the peak. With x from 0 to 1 on the way down, the height above that end is
    (1 + cos π x) / 2 for the cosine, and 1 − √x for wsd (arXiv 2405.18392), which begins at the last
    `decay_fraction` of the steps after `start_step`. Between two steps it is defined, too: where replicas come and
    go, the run need not stand at a whole step.

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
    if inner.name == "schedule_free":
        return inner.learning_rate
    if inner.schedule == "cosine":
        progress = (min(step, last) - warm) / (last - warm)
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        begin = first + (1 - inner.decay_fraction) * (last - first)
        height = 1 - math.sqrt(max(0.0, min(step, last) - begin) / (last - begin))
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * height)
