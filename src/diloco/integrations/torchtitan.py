"""torchtitan: its Trainer, and a section of its config, for one replica; every replica is a torchrun of its own.

A config function of torchtitan's returns `with_diloco(config, DiLoCo(...))`, and `torchtitan.train` trains it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from typing import Any, cast

from torch import nn

from diloco.auto import AUTO
from diloco.engine.streaming import StreamingDiLoCo, check_optimizers
from diloco.errors import UserError
from diloco.exchange.connect import connect
from diloco.exchange.transport import agree
from diloco.files import requiring
from diloco.fragments import Fragments, sequential, strided, whole
from diloco.presets import DilocoSettings

with requiring("torchtitan", extra="torchtitan"):
    from torchtitan.components.checkpointer import DATALOADER
    from torchtitan.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class DiLoCo(DilocoSettings):
    """The section `diloco` of the config: the arguments of `diloco.connect`, and settings.

    What is left out is that of the method streaming_overlapped_fp4, but for τ, which is 0.
    """

    address: str | None = None
    """host:port of replica 0; None is DILOCO_ADDRESS in the environment."""
    replica: int | None = None
    """This replica, from 0; None is DILOCO_REPLICA."""
    num_replicas: int | None = None
    """M; None is DILOCO_NUM_REPLICAS."""
    leader: bool = False
    """Let the first process exchange for all, where all hold the same parameters: not with FSDP."""
    timeout_seconds: float = 600.0
    """Longest wait for the other replicas, in seconds."""
    sync_every: int = 100
    """H: inner steps between two syncs of the same fragment."""


class DiLoCoTrainer(Trainer):
    """torchtitan's Trainer for one replica.

    An inner step is a train step, with its gradient accumulation. Validation is that of Θ. Checkpoints hold the
    replica's own parameters and the engine's state; the last one, which torchtitan saves for export, holds Θ. Each
    replica reads its own part of the dataset. Batch sizes in the config are those of one replica.

    Raises:
        UserError: if a setting of torchtitan's contradicts the engine.

    Source: the order of events in torchtitan's `Trainer.train`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's config with the section `diloco`."""

        diloco: DiLoCo = field(default_factory=DiLoCo)
        """DiLoCo."""

    def __init__(self, config: Config) -> None:
        _check(config)
        self._settings = config.diloco
        super().__init__(config)
        settings = self._settings
        self._exchange = connect(
            settings.address,
            replica=settings.replica,
            num_replicas=settings.num_replicas,
            leader=settings.leader,
            timeout_seconds=settings.timeout_seconds,
        )
        self.engine = self.build_engine(self.model_parts[0])
        """The engine."""
        check_optimizers(self.engine, [self.optimizers])
        self.dataloader = self._own_part_of_the_data()
        if config.checkpoint.enable:
            # pyrefly: ignore[missing-attribute]
            self.checkpointer.states |= {"diloco": self.engine, DATALOADER: self.dataloader}
        self.checkpointer.load = partial(self._load, self.checkpointer.load)
        if config.validator.enable:
            self.validator.validate = partial(self._validate, self.validator.validate)

    def build_engine(self, model: nn.Module) -> StreamingDiLoCo:
        """The engine of the section `diloco`; override it for what a config can't say."""
        settings = self._settings.of_method("streaming_overlapped_fp4")
        fragments = _fragments(model, settings)
        assert settings.wire is not None, "it is the method's"
        return StreamingDiLoCo(
            model,
            fragments=fragments,
            schedule=self._settings.schedule(len(fragments)),  # τ is not the method's
            exchange=self._exchange,
            outer=settings.outer_rule,
            mixing=settings.merge_rule,
            wire=settings.wire,
            combine=settings.combine,
            error_feedback=settings.error_feedback,
            offload=settings.offload,
            num_steps=self.config.training.steps if settings.outer_rule == AUTO else None,
        )

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Take and count an inner step; after the last, leave Θ in the model for the last checkpoint."""
        super().train_step(data_iterator)
        self.engine.step()
        if not self.should_continue_training():
            self._finish()

    def train(self) -> None:
        """Train, and leave Θ in the model."""
        super().train()
        self._finish()  # the data may have ended before the last step

    def _finish(self) -> None:
        self.engine.finish()
        self.engine.copy_outer_to_model()

    def _load(self, load: Callable[..., bool], step: int = -1) -> bool:
        loaded = load(step=step)
        if loaded and not self.engine.num_steps:  # weights alone, such as those of a pretrained model
            self.engine.reset_outer()
        agree(self._exchange, {"training.steps": self.config.training.steps, "step": self.step})
        return loaded

    def _validate(self, validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self.engine.outer_parameters_applied():
            validate(*args, **kwargs)

    def _own_part_of_the_data(self) -> Any:
        """The dataloader again, as if all replicas were ranks of one job."""
        rank, size = 0, 1
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            rank, size = mesh.get_local_rank(), mesh.size()
        checkpoint, training = self.config.checkpoint, self.config.training
        return self.config.dataloader.build(
            dp_world_size=self._exchange.num_replicas * size,
            dp_rank=self._exchange.replica * size + rank,
            tokenizer=self.tokenizer,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            snapshot_every_n_steps=(
                checkpoint.interval * self.gradient_accumulation_steps if checkpoint.enable else None
            ),
        )


def with_diloco(config: Trainer.Config, settings: DiLoCo) -> DiLoCoTrainer.Config:
    """A config of torchtitan's with the section `diloco`, which builds a `DiLoCoTrainer`.

    Raises:
        UserError: if the config is that of another Trainer, whose own work would be left out.
    """
    if type(config) is not Trainer.Config:
        raise UserError(
            f"the config is a {type(config).__qualname__}, of another Trainer: derive that from DiLoCoTrainer, "
            "and its Config from DiLoCoTrainer.Config",
            "config",
        )
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return DiLoCoTrainer.Config(**own, diloco=settings)


def _fragments(model: nn.Module, settings: DiLoCo) -> Fragments:
    if settings.fragments == "whole":
        return whole(model)
    cut = sequential if settings.fragments == "sequential" else strided
    return cut(model, layers_per_fragment=settings.layers_per_fragment, blocks="layers")


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "parallelism.pipeline_parallel_degree",
        lambda degree: degree > 1,
        "cuts the model into parts, and the engine takes a whole one: set 1",
    ),
    ("debug.seed", lambda seed: seed is None, "starts replicas from different weights: set it, the same on all"),
)
"""Settings that contradict the engine, the values that do, and the reason."""


def _check(config: Trainer.Config) -> None:
    """Refuse settings that contradict the engine."""
    for name, is_refused, reason in _REFUSED:
        value = reduce(getattr, name.split("."), cast(Any, config))
        if is_refused(value):
            raise UserError(f"{name}={str(value).lower()} {reason}", name)
