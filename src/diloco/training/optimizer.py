"""The inner optimizer, by its name, and its learning rate at each step."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diloco.engine.parameters import local
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
        parameters: the parameters of each update.
        learning_rate: of the first step, until `param_groups` say another.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(self, parameters: Mapping[Update, Sequence[nn.Parameter]], learning_rate: float) -> None:
        groups = [{"params": [*of_one], "update": update} for update, of_one in parameters.items() if of_one]
        super().__init__(groups, {"lr": learning_rate})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {**group["update"].state(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None, *, found_inf: Tensor | None = None) -> None:
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
            for group in self.param_groups:
                for shard, state in ((local(p), self.state[p]) for p in group["params"]):
                    shards = {name: local(tensor) for name, tensor in state.items()}
                    if (point := group["update"].gradient_point(shard, shards)) is not None:
                        own.append((shard, shard.clone()))
                        shard.copy_(point)
        try:
            yield
        finally:
            for shard, kept in own:
                shard.copy_(kept)


def inner_optimizer(model: LanguageModel, config: OptimizerConfig) -> InnerOptimizer:
    """The optimizer of the parameters that are trained.

    With muon, it moves the matrices of the blocks, and AdamW embeddings, head and vectors, at the same rate.
    """
    decay = config.decay_per_rate
    moments = {"beta1": config.beta1, "beta2": config.beta2, "epsilon": config.epsilon, "weight_decay": decay}
    momentum = {"momentum": config.momentum, "nesterov": config.nesterov, "weight_decay": decay}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name == "muon":
        in_blocks = {*model.blocks.parameters()}
        matrices = [parameter for parameter in trained if parameter in in_blocks and parameter.ndim == 2]
        others = [parameter for parameter in trained if parameter not in {*matrices}]
        parameters = {Muon(ns_steps=config.ns_steps, **momentum): matrices, AdamW(**moments): others}
    elif config.name == "sgd":
        parameters = {SGD(**momentum): trained}
    elif config.name == "schedule_free":
        parameters = {ScheduleFree(**moments): trained}
    else:
        parameters = {AdamW(**moments): trained}
    return InnerOptimizer(parameters, config.learning_rate)


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
