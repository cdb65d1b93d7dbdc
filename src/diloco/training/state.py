"""The one state object: everything of a replica that resumes, exchanges in flight included."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco.engine.streaming import StreamingDiLoCo
from diloco.models.language_model import LanguageModel
from diloco.schema import Count, Seconds
from diloco.training.adamw import AdamW
from diloco.training.checkpoints import Checkpoints
from diloco.training.config import TrainConfig
from diloco.training.data_parallel import (
    DataParallel,
    ReplicatedDataParallel,
    ShardedDataParallel,
    data_parallel,
    settle_buckets,
)
from diloco.training.engine_settings import engine_settings, frozen_parameters
from diloco.training.mean_loss import MeanLoss, MeanLossState
from diloco.training.progress import ElasticProgress, FixedProgress, Progress, Standing
from diloco.training.sections import AdamWConfig
from diloco.training.sizes import check_sizes
from diloco.training.synchronizer import Synchronizer
from diloco.training.world import World


@dataclass
class TrainState:
    """One replica's model, its inner optimizer, and its synchronizer with the other replicas."""

    model: LanguageModel
    """θ_m, or this process's shards of it."""
    forward: nn.Module
    """The model as training calls it: itself, compiled, or wrapped in DistributedDataParallel."""
    optimizer: torch.optim.Optimizer
    """AdamW."""
    sync: Synchronizer
    """Θ, the outer momentum and what is in flight; or the baseline."""
    progress: Progress
    """The progress of the whole run."""
    passes: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext()
    """Context of a forward and backward pass, given whether the pass is the last of its step."""
    frozen: Callable[[int], Iterable[nn.Parameter]] = lambda step: ()
    """The parameters that are not trained at a step."""
    mean_loss: MeanLoss | None = None
    """The losses of all replicas, for logs; None for the baseline, and with a rendezvous."""
    step: int = 0
    """Inner steps taken."""
    standing: Standing = field(init=False)
    """The standing of the whole run after the last step taken."""
    seconds: float = 0.0
    """Time that the steps took, in every part of a run that was interrupted."""
    blocked_seconds: float = 0.0
    """The part of `seconds` in which a process of this replica waited for other replicas."""

    def __post_init__(self) -> None:
        """Ask how far the run is."""
        self.took(self.step)

    @property
    def is_over(self) -> bool:
        """Whether the last step was taken; a replica takes one at least."""
        return self.step > 0 and self.standing.is_over

    def took(self, step: int) -> None:
        """Note that a step was taken, and ask how far the run is; all processes of the replica ask together."""
        self.step, self.standing = step, self.progress.after(step)

    def save(self, checkpoints: Checkpoints) -> None:
        """Copy everything now, and write it in the background."""
        facts, sync = _parted(self.sync.state_dict())
        mean_loss = self.mean_loss and self.mean_loss.state(self.step)
        facts = _Facts(self.step, self.seconds, self.blocked_seconds, facts, mean_loss)
        checkpoints.save(self.step, asdict(facts), self._tensors(sync))

    def load(self, checkpoints: Checkpoints, step: int) -> None:
        """Take up what was saved, on as many shards as there are now; every replica must load the same step."""
        facts = checkpoints.facts(step, _Facts)
        tensors = self._tensors(_parted(self.sync.state_dict())[1])
        # An older checkpoint has what was in flight, and no zeros for the rest.
        checkpoints.load(step, tensors, optional="sync.sent.")
        self.seconds, self.blocked_seconds = facts.seconds, facts.blocked_seconds
        self.model.load_state_dict(tensors["model"])
        moments = dict(enumerate(tensors["optimizer"].values()))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        self.sync.load_state_dict(facts.sync | tensors["sync"])
        if self.mean_loss is not None and facts.mean_loss is not None:
            self.mean_loss.restore(facts.mean_loss)
        self.took(facts.step)

    def _tensors(self, sync: dict[str, Any]) -> dict[str, Any]:
        """All tensors by name: the model's, the optimizer's, and the synchronizer's."""
        optimizer = {
            name: self.optimizer.state[parameter] or _no_moments(parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return {"model": self.model.state_dict(), "optimizer": optimizer, "sync": sync}


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain values of a synchronizer's state, and its tensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, dict)}
    return {name: value for name, value in state.items() if name not in tensors}, tensors


def _no_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state before its first step."""
    zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros(()), **zeros}


@dataclass(frozen=True)
class _Facts:
    """The plain values of a checkpoint; see `TrainState`."""

    step: Count
    seconds: Seconds
    blocked_seconds: Seconds
    sync: dict[str, Any]
    mean_loss: MeanLossState | None = None  # an earlier checkpoint has none


def initial_state(config: TrainConfig, world: World) -> TrainState:
    """The state before the first step, equal on all replicas.

    Raises:
        UserError: for settings that the engine refuses, and sizes beyond this machine's memory.
        DisagreementError: if the replicas were started with different settings.
    """
    check_sizes(config, here=True)
    model = config.model.initial(seed=config.seed)
    if config.precision == "bf16-params":
        for parameter in model.parameters():  # not the buffers, such as the frequencies of RoPE
            parameter.data = parameter.data.to(torch.bfloat16)
    if world.mesh is None:
        model.to(world.device)
    else:
        _shard(model, world)
    optimizer = _adamw(model, config.optimizer)
    forward: nn.Module = torch.compile(model) if config.compile else model  # pyright: ignore[reportAssignmentType]
    if config.method == "data_parallel":
        baseline = _data_parallel(config, world, model, forward)
        return TrainState(
            model, baseline.forward, optimizer, baseline, FixedProgress(config), passes=baseline.passes
        )
    settings = engine_settings(config, model)
    exchange = world.rendezvous or world.exchange
    engine = StreamingDiLoCo(model, exchange=exchange, offload=config.diloco.offload, **vars(settings))
    if world.rendezvous is not None:
        progress = ElasticProgress(config, engine, world)
        return TrainState(model, forward, optimizer, engine, progress)
    mean_loss = MeanLoss(world.exchange, max_overlap=settings.schedule.max_overlap)
    state = TrainState(model, forward, optimizer, engine, FixedProgress(config), mean_loss=mean_loss)
    if config.num_ddp > 1:
        state.forward = inside = data_parallel(forward, world.own_device_group)
        settle_buckets(inside, _batch_shape(config), autocast=world.autocast)
        state.passes = lambda is_last: nullcontext() if is_last else inside.no_sync()
    if config.diloco.freeze:
        state.frozen = frozen_parameters(settings, model)
    return state


def _data_parallel(config: TrainConfig, world: World, model: LanguageModel, forward: nn.Module) -> DataParallel:
    if world.mesh is None:
        return ReplicatedDataParallel(model, forward, _batch_shape(config), autocast=world.autocast)
    return ShardedDataParallel(model, forward, world.mesh.get_group("replica"))


def slow_imports(config: TrainConfig) -> tuple[str, ...]:
    """Modules that every process of a run needs, and that take a second to import."""
    modules = config.model.slow_imports
    if config.num_shards > 1:
        return (*modules, "torch._dynamo", "torch.distributed.fsdp")
    needs_dynamo = config.method == "data_parallel" or config.num_ddp > 1 or config.compile
    return (*modules, "torch._dynamo") if needs_dynamo else modules


def _batch_shape(config: TrainConfig) -> tuple[int, int]:
    """The shape (B, T) of the tokens of a pass."""
    assert config.micro_batch is not None, "the config is resolved"
    return config.micro_batch, config.sequence_length


def _shard(model: LanguageModel, world: World) -> None:
    """Put the shards on the device, a block at a time: whole, the model might not fit."""
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    assert world.mesh is not None, "a replica is several processes"
    for module in (*model.blocks, model):
        # What is gathered for a pass is given up after it, so that the engine and the optimizer, which change
        # the shards, never leave it stale.
        fully_shard(module, mesh=world.mesh["shard"], reshard_after_forward=True)


def _adamw(model: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    assert config.weight_decay is not None, "the config is resolved"
    return AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
