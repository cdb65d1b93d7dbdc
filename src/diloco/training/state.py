"""The one state object: everything of a replica that resumes, exchanges in flight included."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from diloco.engine.streaming import StreamingDiLoCo, silence_end_warning, uncounted_tokens
from diloco.exchange.process_group import TorchGroup
from diloco.models.language_model import LanguageModel
from diloco.outer.step import OuterStep
from diloco.schema import Count, Seconds
from diloco.training.config.config import OptimizerConfig, TrainConfig
from diloco.training.config.engine_settings import engine_settings, frozen_parameters
from diloco.training.config.resolve import check_sizes
from diloco.training.data_parallel import (
    DataParallel,
    ReplicatedDataParallel,
    ShardedDataParallel,
    data_parallel,
    settle_buckets,
)
from diloco.training.optimizer import InnerOptimizer, inner_optimizer
from diloco.training.records.checkpoints import Checkpoints
from diloco.training.records.metrics import MeanLoss, MeanLossState
from diloco.training.world import World


@dataclass(frozen=True)
class Standing:
    """The whole run, as one replica knows it after its step t."""

    tokens: int
    """Tokens that all replicas together have read."""
    next_tokens: int
    """Tokens that all replicas will have read after step t + 1, which set its learning rate."""
    is_over: bool
    """True if t was the last step of this replica."""


class Progress(Protocol):
    """The progress of the whole run."""

    def after(self, step: int) -> Standing:
        """The standing after step t, which this replica has taken."""
        ...


@dataclass(frozen=True)
class FixedProgress:
    """The progress of replicas that take the same steps."""

    num_steps: int
    """T."""
    tokens_per_step: int
    """B · sequence length."""

    def after(self, step: int) -> Standing:
        """The standing after step t; T is the last."""
        return Standing(step * self.tokens_per_step, (step + 1) * self.tokens_per_step, step >= self.num_steps)


class ElasticProgress:
    """The progress of replicas that come and go; it never goes back.

        tokens = Σ counted / P + M · uncounted

    An outer entry counts the tokens of its contributions to one fragment, hence / P. `uncounted` is what this
    replica has read since, on average over the fragments, and M the number of active replicas. For fixed
    members of equal speed this is t · B · sequence length. As a replica that was cut off for long says nothing
    about the others, no more than 2 H + τ of its steps are taken for theirs.

    The first process of a sharded replica knows it. All of its processes ask together, once a step, since each
    answer makes the host wait for the device.

    Args:
        engine: of this replica.
        world: of this process, with the rendezvous that the engine has joined.
        num_tokens: the budget of the whole run.
        own_tokens: tokens of a step of this replica.
    """

    def __init__(self, engine: StreamingDiLoCo, world: World, *, num_tokens: int, own_tokens: int) -> None:
        assert world.rendezvous is not None, "replicas come and go"
        self._engine, self._rendezvous, self._group = engine, world.rendezvous, world.group
        self._budget, self._own_tokens = num_tokens, own_tokens
        schedule = engine.settings.schedule
        self._most_steps = 2 * schedule.sync_every + schedule.overlap(0)
        self._tokens = self._next_tokens = 0

    def after(self, step: int) -> Standing:
        """The standing as far as this replica has taken the outer steps of the log.

        The run is over once the budget is spent, here or by the word of another replica.
        """
        numbers = self._read(step) if self._group.index == 0 else (0, 0, 0)
        tokens, next_tokens, is_over = self._group.broadcast_numbers(numbers)
        return Standing(tokens, next_tokens, bool(is_over))

    def _read(self, step: int) -> tuple[int, int, bool]:
        self._tokens = max(self._tokens, self._estimate(step))
        self._next_tokens = max(self._next_tokens, self._tokens, self._estimate(step + 1))
        is_over = self._tokens >= self._budget or self._rendezvous.state.finished
        return self._tokens, self._next_tokens, is_over

    def _estimate(self, step: int) -> int:
        """The tokens of the class's equation."""
        engine, state = self._engine, self._rendezvous.state
        num_fragments, num_others = len(engine.settings.fragments), max(0, len(state.active) - 1)
        ahead = (step - engine.num_steps) * self._own_tokens
        own = (
            round(num_fragments * uncounted_tokens(engine)) + num_fragments * ahead
        )  # a whole number, P times `uncounted`
        others = num_others * min(own, num_fragments * self._most_steps * self._own_tokens)
        return (self._rendezvous.counted[0] + own + others) // num_fragments


class Synchronizer(Protocol):
    """Exchanges with the other replicas after each inner step."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent by all shards of the replica, each destination counted."""
        ...

    @property
    def bytes_received(self) -> int:
        """Payload bytes from the other replicas that were merged."""
        ...

    @property
    def blocked_seconds(self) -> float:
        """Seconds in which training waited for the network."""
        ...

    def step(self, *, tokens: int | None = None, loss: float | Tensor | None = None) -> Sequence[OuterStep]:
        """Count an inner step, send and merge what is due; returns the outer steps taken."""
        ...

    def finish(self, *, close: bool = False) -> Sequence[OuterStep]:
        """Receive and merge everything in flight; with `close`, end a run whose replicas come and go."""
        ...

    def logs(self, *, computed: bool = True) -> dict[str, float]:
        """Numbers for trackers, by name; every process of a replica must call it, unless none is computed."""
        ...

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, sharded as the model is."""
        ...

    def outer_parameters_applied(self) -> AbstractContextManager[None]:
        """A context in which the model has Θ in the place of its own parameters."""
        ...

    def outer_hash(self) -> str:
        """SHA-256 over Θ, equal on all replicas after `finish()`; every process of the replica must call it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that resumes: plain values, and dicts of tensors by name, always of the same shapes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` gave; every replica must load the same step."""
        ...


@dataclass
class TrainState:
    """One replica's model, its inner optimizer, and its synchronizer with the other replicas."""

    model: LanguageModel
    """θ_m, or this process's shards of it."""
    forward: nn.Module
    """The model as training calls it: itself, compiled, or wrapped in DistributedDataParallel."""
    optimizer: InnerOptimizer
    """The inner optimizer."""
    inner: OptimizerConfig
    """The settings of the inner step: of the optimizer, the loss and the clipping."""
    micro_batch: int
    """Sequences a forward pass of this process."""
    synchronizer: Synchronizer
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
    resumed_step: int = 0
    """Inner steps taken before this process."""
    standing: Standing = field(init=False)
    """The standing of the whole run after the last step taken."""
    seconds: float = 0.0
    """Time that the steps took, in every part of a run that was interrupted."""
    blocked_seconds: float = 0.0
    """The part of `seconds` in which a process of this replica waited for other replicas."""

    def __post_init__(self) -> None:
        self.took(self.step)

    @property
    def is_over(self) -> bool:
        """True once the last step was taken; a replica takes one at least."""
        return self.step > 0 and self.standing.is_over

    def took(self, step: int) -> None:
        """Note that a step was taken, and ask how far the run is; all processes of the replica ask together."""
        self.step, self.standing = step, self.progress.after(step)

    def save(self, checkpoints: Checkpoints, *, drops_old: bool = True) -> None:
        """Copy everything now, and write it in the background; then drop all checkpoints but those to keep."""
        facts, sync = _parted(self.synchronizer.state_dict())
        mean_loss = None if self.mean_loss is None else self.mean_loss.state(self.step)
        facts = _Facts(self.step, self.seconds, self.blocked_seconds, facts, mean_loss)
        checkpoints.save(self.step, asdict(facts), self._tensors(sync), drops_old=drops_old)

    def load(self, checkpoints: Checkpoints, step: int) -> None:
        """Take up what was saved, on as many shards as there are now; every replica must load the same step."""
        facts = checkpoints.facts(step, _Facts)
        tensors = self._tensors(_parted(self.synchronizer.state_dict())[1])
        checkpoints.load(step, tensors)  # the optimizer's in place
        self.seconds, self.blocked_seconds = facts.seconds, facts.blocked_seconds
        self.model.load_state_dict(tensors["model"])
        self.synchronizer.load_state_dict(facts.sync | tensors["sync"])
        if self.mean_loss is not None and facts.mean_loss is not None:
            self.mean_loss.restore(facts.mean_loss)
        self.took(facts.step)
        self.resumed_step = facts.step

    def _tensors(self, sync: dict[str, Any]) -> dict[str, Any]:
        """All tensors by name: the model's, the optimizer's, and the synchronizer's."""
        optimizer = {
            name: self.optimizer.state[parameter]
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return {"model": self.model.state_dict(), "optimizer": optimizer, "sync": sync}


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain values of a synchronizer's state, and its tensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, dict)}
    return {name: value for name, value in state.items() if name not in tensors}, tensors


@dataclass(frozen=True)
class _Facts:
    """The plain values of a checkpoint; see `TrainState`."""

    step: Count
    seconds: Seconds
    blocked_seconds: Seconds
    sync: dict[str, Any]
    mean_loss: MeanLossState | None


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
            if type(parameter) is nn.Parameter:  # not the class of weights that are packed in 4 bits
                parameter.data = parameter.data.to(torch.bfloat16)
    if world.mesh is None:
        model.to(world.device)
    else:
        _shard(model, world)
    assert config.micro_batch is not None, "the config is resolved"
    inner, micro_batch = config.optimizer, config.micro_batch
    optimizer, batch = inner_optimizer(model, inner), (micro_batch, config.sequence_length)
    forward: nn.Module = torch.compile(model) if config.compile else model  # pyrefly: ignore[bad-assignment]
    fixed = FixedProgress(config.num_steps, config.tokens_per_step)
    if config.method == "data_parallel":
        parallel = _data_parallel(world, model, forward, batch)
        return TrainState(
            model, parallel.forward, optimizer, inner, micro_batch, parallel, fixed, passes=parallel.passes
        )
    settings = engine_settings(config.diloco, model, seed=config.seed)
    exchange = world.exchange if world.rendezvous is None else None
    engine = StreamingDiLoCo(
        model,
        exchange=exchange,
        rendezvous=world.rendezvous,
        offload=config.diloco.offload,
        **vars(settings),
    )
    silence_end_warning(engine)
    if world.rendezvous is not None:
        progress = ElasticProgress(engine, world, num_tokens=config.num_tokens, own_tokens=config.replica_tokens)
        return TrainState(model, forward, optimizer, inner, micro_batch, engine, progress)
    mean_loss = MeanLoss(world.exchange, max_overlap=settings.schedule.max_overlap)
    state = TrainState(model, forward, optimizer, inner, micro_batch, engine, fixed, mean_loss=mean_loss)
    if config.ddp_per_replica > 1 and world.mesh is None:
        assert isinstance(world.group, TorchGroup), "a replica is several processes"
        state.forward = inside = data_parallel(forward, world.group.group)
        settle_buckets(inside, batch, autocast=world.autocast)
        state.passes = lambda is_last: nullcontext() if is_last else inside.no_sync()
    if config.diloco.freeze:
        state.frozen = frozen_parameters(settings, model)
    return state


def _data_parallel(world: World, model: LanguageModel, forward: nn.Module, batch: tuple[int, int]) -> DataParallel:
    """The baseline's synchronizer; `batch` is the shape (B, T) of the tokens of a pass."""
    if world.num_replicas == 1:  # its shards, if it has several, are averaged by FSDP2
        return DataParallel(model, forward, 1)
    if world.mesh is None:
        return ReplicatedDataParallel(model, forward, batch, autocast=world.autocast)
    return ShardedDataParallel(model, forward, world.mesh.get_group("replica"))


def _shard(model: LanguageModel, world: World) -> None:
    """Put the shards on the device, a block at a time: whole, the model might not fit."""
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    assert world.mesh is not None, "a replica is several processes"
    names = world.mesh.mesh_dim_names or ()
    # It warns of sums along one dimension after another, as that of the gradient norm is.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if "tensor" in names:
        model.parallelize(world.mesh["tensor"])
    for module in (*model.blocks, model):
        # What is gathered for a pass is given up after it, so that the engine and the optimizer, which change
        # the shards, never leave it stale.
        mesh = world.mesh[("copy", "shard") if "copy" in names else "shard"]
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
