"""torchtitan: its Trainer, and a section of its config, for one replica; every replica is a torchrun of its own.

torchrun starts this module as it starts `torchtitan.train`. The config file has
`custom_config_module = "diloco.integrations.torchtitan"` in its section `[job]`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, cast

from torch import nn

from diloco.engine.streaming import StreamingDiLoCo, check_optimizers
from diloco.errors import UserError
from diloco.exchange.connect import connect
from diloco.exchange.transport import agree
from diloco.files import requiring
from diloco.fragments import Fragments, sequential, strided, whole
from diloco.outer.rules import rules_of
from diloco.presets import PRESETS, DilocoSettings

with requiring("torchtitan", extra="torchtitan"):
    from torchtitan import config
    from torchtitan.components.checkpoint import DATALOADER
    from torchtitan.train import Trainer, main


@dataclass(frozen=True, kw_only=True)
class DiLoCo(DilocoSettings):
    """The section `[diloco]`: the arguments of `diloco.connect`, and settings.

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


@dataclass
class JobConfig(config.JobConfig):
    """torchtitan's config with the section `[diloco]`: its `job.custom_config_module` takes it from here."""

    diloco: DiLoCo = field(default_factory=DiLoCo)
    """DiLoCo."""


class DiLoCoTrainer(Trainer):
    """torchtitan's Trainer for one replica.

    An inner step is a train step, with its gradient accumulation. Validation is that of Θ. Checkpoints hold the
    replica's own parameters and the engine's state; the last one, which torchtitan saves for export, holds Θ. Each
    replica reads its own part of the dataset. Batch sizes in the config are those of one replica.

    Raises:
        UserError: if the config has no section [diloco], or a setting contradicts it.

    Source: the order of events in torchtitan's `Trainer.train`.
    """

    def __init__(self, job_config: config.JobConfig) -> None:
        self._settings = _checked(job_config)
        super().__init__(job_config)
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
        self.checkpointer.states |= {"diloco": self.engine, DATALOADER: self.dataloader}
        self.checkpointer.load = partial(self._load, self.checkpointer.load)
        if job_config.validation.enable:
            self.validator.validate = partial(self._validate, self.validator.validate)

    def build_engine(self, model: nn.Module) -> StreamingDiLoCo:
        """The engine of the section [diloco]; override it for what a config can't say."""
        settings = self._settings
        fragments = _fragments(model, settings)
        outer, mixing = rules_of(settings.of_method("streaming_overlapped_fp4"))
        return StreamingDiLoCo(
            model,
            fragments=fragments,
            schedule=settings.schedule(len(fragments)),
            exchange=self._exchange,
            outer=outer,
            mixing=mixing,
            wire=settings.wire or _METHOD.wire,
            combine=settings.combine,
            error_feedback=settings.error_feedback,
            offload=settings.offload,
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
        agree(self._exchange, {"training.steps": self.job_config.training.steps, "step": self.step})
        return loaded

    def _validate(self, validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self.engine.outer_parameters_applied():
            validate(*args, **kwargs)

    def _own_part_of_the_data(self) -> Any:
        """The dataloader again, as if all replicas were ranks of one job."""
        if self.train_spec.build_dataloader_fn is None:
            return self.dataloader
        rank, size = 0, 1
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            rank, size = mesh.get_local_rank(), mesh.size()
        return self.train_spec.build_dataloader_fn(
            dp_world_size=self._exchange.num_replicas * size,
            dp_rank=self._exchange.replica * size + rank,
            tokenizer=self.tokenizer,
            job_config=self.job_config,
        )


_METHOD = PRESETS["streaming_overlapped_fp4"]


def _fragments(model: nn.Module, settings: DiLoCo) -> Fragments:
    if settings.fragments == "whole":
        return whole(model)
    cut = sequential if settings.fragments == "sequential" else strided
    return cut(model, layers_per_fragment=settings.layers_per_fragment, blocks="layers")


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fault_tolerance.enable", bool, "joins the replicas by torchft, whose DiLoCo is another: set it to false"),
    (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        bool,
        "computes scales before a merge changes the parameters: set it to false",
    ),
    (
        "parallelism.pipeline_parallel_degree",
        lambda degree: degree > 1,
        "cuts the model into parts, and the engine takes a whole one: set 1",
    ),
    ("debug.seed", lambda seed: seed is None, "starts replicas from different weights: set it, the same on all"),
)
"""Settings that contradict the engine, the values that do, and the reason."""


def _checked(job_config: config.JobConfig) -> DiLoCo:
    """The section [diloco], where nothing else in the config contradicts it."""
    settings = getattr(job_config, "diloco", None)
    if settings is None:
        raise UserError(
            "the config has no section [diloco]: set job.custom_config_module to diloco.integrations.torchtitan",
            "job.custom_config_module",
        )
    for name, is_refused, reason in _REFUSED:
        value = reduce(getattr, name.split("."), cast(Any, job_config))
        if is_refused(value):
            raise UserError(f"{name}={str(value).lower()} {reason}", name)
    return cast(DiLoCo, settings)


if __name__ == "__main__":
    main(DiLoCoTrainer)
