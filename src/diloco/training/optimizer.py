"""The inner optimizer, by its name, and its learning rate at each step."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diloco.engine.parameters import local
from diloco.errors import UserError
from diloco.models.language_model import LanguageModel
from diloco.training.config.config import OptimizerConfig
from diloco.training.updates.adamw import AdamW
from diloco.training.updates.muon import Muon
from diloco.training.updates.schedule_free import ScheduleFree
from diloco.training.updates.sgd import SGD
from diloco.training.updates.update import Update


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
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
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
