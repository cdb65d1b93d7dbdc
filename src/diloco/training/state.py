"""The one state object: everything of a replica that resumes, exchanges in flight included."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco.engine.settings import Settings
from diloco.engine.streaming import StreamingDiLoCo
from diloco.errors import UserError
from diloco.fragments import Fragments, sequential, strided, whole
from diloco.models.decoder import Decoder
from diloco.outer.mixing import Mixing
from diloco.outer.nesterov import Nesterov
from diloco.schedule import Schedule
from diloco.training.checkpoints import Checkpoints
from diloco.training.config import TrainConfig
from diloco.training.data_parallel import DataParallel
from diloco.training.world import World
from diloco.wire import codec


@dataclass
class TrainState:
    """One replica's model, inner optimizer, and what keeps it together with the others."""

    model: Decoder
    """θ_m, or this process's shards of it."""
    forward: nn.Module
    """The model as training calls it: itself, compiled, or wrapped for Data-Parallel."""
    optimizer: torch.optim.Optimizer
    """AdamW."""
    passes: Callable[[bool], AbstractContextManager[None]]
    """Around each forward and backward pass; told whether it is the last of its step."""
    sync: StreamingDiLoCo | DataParallel
    """Θ, the outer momentum and what is in flight; or the baseline."""
    freezes: bool = False
    """Whether only the fragment that is sent next is trained."""
    step: int = 0
    """Inner steps taken."""
    seconds: float = 0.0
    """Spent on them, in every part of a run that was interrupted."""
    blocked_seconds: float = 0.0
    """The part of them in which a process of this replica waited for other replicas."""

    def frozen(self, step: int) -> Iterator[nn.Parameter]:
        """Those that are not trained in a step."""
        if not self.freezes:
            return
        assert isinstance(self.sync, StreamingDiLoCo), "Data-Parallel freezes nothing"
        trained = self.sync.settings.schedule.next_sent(step)
        for index, fragment in enumerate(self.sync.settings.fragments):
            if index not in trained:
                yield from (self.model.get_parameter(name) for name in fragment.parameters)

    def save(self, checkpoints: Checkpoints) -> None:
        """Copy everything now, and write it in the background."""
        facts, tensors = self._contents()
        checkpoints.save(self.step, facts, tensors)

    def load(self, checkpoints: Checkpoints, step: int) -> None:
        """Take up what was saved, on as many shards as there are now; every replica must load the same step."""
        facts, (_, tensors) = checkpoints.facts(step), self._contents()
        if isinstance(self.sync, StreamingDiLoCo):
            tensors["sync"]["sent"] = self.sync.sent_like(facts["sync"]["in_flight"])
        checkpoints.load(step, tensors)
        self.step, self.seconds, self.blocked_seconds = (facts[name] for name in _COUNTERS)
        self.model.load_state_dict(tensors["model"])
        moments = dict(enumerate(tensors["optimizer"].values()))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.sync.load_state_dict(facts["sync"] | tensors["sync"])

    def _contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain values, and tensors by name."""
        sync = self.sync.state_dict()
        tensors = {name: value for name, value in sync.items() if isinstance(value, dict)}
        facts = {name: getattr(self, name) for name in _COUNTERS}
        facts["sync"] = {name: value for name, value in sync.items() if name not in tensors}
        optimizer = {
            name: self.optimizer.state[parameter] or _no_moments(parameter)
            for name, parameter in self.model.named_parameters()
        }
        return facts, {"model": self.model.state_dict(), "optimizer": optimizer, "sync": tensors}


def _no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state before its first step."""
    zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros(()), **zeros}


_COUNTERS = ("step", "seconds", "blocked_seconds")


def initial_state(config: TrainConfig, world: World) -> TrainState:
    """The state before the first step, equal on all replicas.

    Raises:
        UserError: for settings that the engine refuses.
        DisagreementError: if the replicas were started with different ones.
    """
    model = Decoder(config.model, seed=config.seed)
    if world.mesh is None:
        model.to(world.device)
    else:  # which puts shards on the device, a block at a time: whole it might not fit
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        for module in (*model.blocks, model):
            # What is gathered for a pass is given up after it, so that the engine and the optimizer, which change
            # the shards, never leave it stale.
            fully_shard(module, mesh=world.mesh["shard"], reshard_after_forward=True)
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
        assert config.micro_batch is not None, "the config is resolved"
        batch = config.micro_batch, config.sequence_length
        sync = DataParallel(model, forward, batch, autocast=world.autocast)
        return TrainState(model, sync.forward, optimizer, sync.passes, sync)
    diloco = config.diloco
    settings = vars(_engine_settings(config, model))
    engine = StreamingDiLoCo(model, exchange=world.exchange, offload=diloco.offload, **settings)
    return TrainState(model, forward, optimizer, lambda _: nullcontext(), engine, freezes=diloco.freeze)


def check(config: TrainConfig) -> None:
    """Refuse what the engine would, before anything is started.

    Raises:
        UserError: naming both values of a contradiction.
    """
    if config.method == "data_parallel":
        return
    with torch.device("meta"):
        model = Decoder(config.model, seed=config.seed)
    settings = _engine_settings(config, model)
    settings.check(model, config.num_replicas)
    schedule = settings.schedule
    last = max(range(schedule.num_fragments), key=schedule.send_step)
    if (step := schedule.send_step(last)) > config.num_steps:
        raise UserError(
            f"fragment {last} is first sent at step {step}, and the run has {config.num_steps}: its outer "
            "parameters would stay the initial ones; lower --diloco.sync-every, or raise --num-tokens"
        )


def _engine_settings(config: TrainConfig, model: nn.Module) -> Settings:
    diloco = config.diloco
    assert diloco.overlap_steps is not None, "the config is resolved"
    assert diloco.mixing is not None and diloco.wire is not None, "the config is resolved"
    fragments = _fragments(config, model)
    schedule = Schedule(
        sync_every=diloco.sync_every,
        num_fragments=len(fragments),
        overlap_steps=diloco.overlap_steps,
        offsets=diloco.offsets,
        first_sync=diloco.first_sync,
    )
    return Settings(
        fragments=fragments,
        schedule=schedule,
        outer=Nesterov(lr=diloco.outer_learning_rate, momentum=diloco.outer_momentum),
        mixing=Mixing(diloco.mixing),
        wire=codec(diloco.wire),
        combine=diloco.combine,
        error_feedback=diloco.error_feedback,
        seed=config.seed,
    )


def _fragments(config: TrainConfig, model: nn.Module) -> Fragments:
    if config.diloco.fragments == "whole":
        return whole(model)
    cut: Callable[..., Fragments] = strided if config.diloco.fragments == "strided" else sequential
    return cut(model, layers_per_fragment=config.diloco.layers_per_fragment)
