"""The one state object: everything of a replica that resumes, exchanges in flight included."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco.engine import StreamingDiLoCo, check_settings
from diloco.fragments import Fragments, sequential, strided, whole
from diloco.models.decoder import Decoder
from diloco.outer import Nesterov
from diloco.schedule import Schedule
from diloco.training.config import TrainConfig
from diloco.training.data_parallel import DataParallel
from diloco.training.world import World
from diloco.wire import codec


@dataclass
class TrainState:
    """One replica's model, inner optimizer, and what keeps it together with the others."""

    model: Decoder
    """θ_m."""
    forward: nn.Module
    """The model as training calls it: itself, compiled, or wrapped for Data-Parallel."""
    optimizer: torch.optim.Optimizer
    """AdamW."""
    passes: Callable[[bool], AbstractContextManager[None]]
    """Around each forward and backward pass; told whether it is the last of its step."""
    sync: StreamingDiLoCo | DataParallel
    """Θ, the outer momentum and what is in flight; or the baseline."""
    step: int = 0
    """Inner steps taken."""
    seconds: float = 0.0
    """Spent on them, in every part of a run that was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, containers and plain values, to be copied before training goes on."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave; every replica must load the same step."""
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])


def initial_state(config: TrainConfig, world: World) -> TrainState:
    """The state before the first step, equal on all replicas.

    Raises:
        ValueError: for settings that the engine refuses.
        DisagreementError: if the replicas were started with different ones.
    """
    model = Decoder(config.model, seed=config.seed).to(world.device)
    inner = config.optimizer
    assert inner.weight_decay is not None, "the config is resolved"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
        weight_decay=inner.weight_decay,
        fused=True,
    )
    forward: nn.Module = torch.compile(model) if config.compile else model  # pyright: ignore[reportAssignmentType]
    if config.method == "data_parallel":
        sync = DataParallel(model, forward)
        return TrainState(model, sync.forward, optimizer, sync.passes, sync)
    engine = StreamingDiLoCo(model, exchange=world.exchange, **_engine_settings(config, model))
    return TrainState(model, forward, optimizer, lambda _: nullcontext(), engine)


def check(config: TrainConfig) -> None:
    """Refuse what the engine would, before anything is started.

    Raises:
        ValueError: naming both values of a contradiction.
    """
    if config.method == "data_parallel":
        return
    with torch.device("meta"):
        model = Decoder(config.model, seed=config.seed)
    settings = _engine_settings(config, model)
    del settings["outer"], settings["offload"]
    check_settings(model, num_replicas=config.num_replicas, **settings)


def _engine_settings(config: TrainConfig, model: nn.Module) -> dict[str, Any]:
    """What StreamingDiLoCo is told, by its parameters' names."""
    diloco = config.diloco
    assert diloco.overlap_steps is not None and diloco.wire is not None, "the config is resolved"
    fragments = _fragments(config, model)
    schedule = Schedule(
        sync_every=diloco.sync_every,
        num_fragments=len(fragments),
        overlap_steps=diloco.overlap_steps,
        offsets=diloco.offsets,
        first_sync=diloco.first_sync,
    )
    return {
        "fragments": fragments,
        "schedule": schedule,
        "outer": Nesterov(lr=diloco.outer_learning_rate, momentum=diloco.outer_momentum),
        "mixing": diloco.mixing,
        "wire": codec(diloco.wire),
        "combine": diloco.combine,
        "error_feedback": diloco.error_feedback,
        "seed": config.seed,
        "offload": diloco.offload,
    }


def _fragments(config: TrainConfig, model: nn.Module) -> Fragments:
    if config.diloco.fragments == "whole":
        return whole(model)
    cut: Callable[..., Fragments] = strided if config.diloco.fragments == "strided" else sequential
    return cut(model, layers_per_fragment=config.diloco.layers_per_fragment)


def outer_forward(state: TrainState) -> Callable[[Tensor], Tensor]:
    """The model with the outer parameters in the place of its own, in FP32."""
    device = next(state.model.parameters()).device
    parameters = {name: outer.to(device) for name, outer in state.sync.outer_parameters().items()}
    return lambda tokens_BxT: torch.func.functional_call(state.model, parameters, (tokens_BxT,))
