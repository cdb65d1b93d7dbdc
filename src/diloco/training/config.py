"""The settings of a run: one frozen dataclass, kept as `config.json`; each field declares its own traits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from diloco.data.config import DataConfig
from diloco.errors import UserError
from diloco.integrations.trackers import TrackerName
from diloco.models.spec import ModelConfig
from diloco.presets import Method
from diloco.training.sections import (
    AdamWConfig,
    CheckpointConfig,
    DilocoConfig,
    ElasticConfig,
    EvaluationConfig,
    out_of_range,
)
from diloco.training.traits import get, trait

_MOST_PROCESSES = 1 << 16
"""Largest number of processes, or of connections: what is counted by them stays small."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run."""

    recipe: tyro.conf.Suppress[str] = field(default="", metadata=trait(incidental=True))
    """The recipe it was made from."""
    name: str = field(default="", metadata=trait(incidental=True))
    """The run's directory below `runs`; left out, the recipe's name and the time. With a rendezvous it is the
    replica's own, and the name by which the others know it: a later process of that name takes its place."""
    runs: Path = field(default=Path("runs"), metadata=trait(incidental=True, own_to_a_replica=True))
    """Directory of all runs."""
    method: Method = field(default="streaming_overlapped_fp4", metadata=trait(planned=True))
    """Preset of the DiLoCo settings that are left out; data_parallel exchanges gradients at every step instead."""
    num_replicas: int = field(default=2, metadata=trait(column=True))
    """M, how many replicas train; they are local processes, or under torchrun those of its world. With a
    rendezvous a command starts one replica, and M, by default 1, must have joined before the first step."""
    rendezvous: str | None = field(default=None, metadata=trait(own_to_a_replica=True, may_change_on_resume=True))
    """Directory or bucket in which replicas that come and go meet: a path, s3://bucket/prefix, gs://… or az://….
    The first command creates the run there, and others join it at any time, each as one replica under its name."""
    replica_batch: int | None = field(
        default=None, metadata=trait(own_to_a_replica=True, may_change_on_resume=True)
    )
    """Sequences a step of this replica, all shards together, with a rendezvous; None is global_batch /
    num_replicas."""
    shards_per_replica: int | None = field(default=None, metadata=trait(may_change_on_resume=True, filled_in=True))
    """S, processes over which each replica is sharded (FSDP2), of M·S those in a row, with a rendezvous all that a
    command starts; None is 1, on a resume the run's own."""
    ddp_per_replica: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Processes that share each replica's batch and hold all of its parameters (DistributedDataParallel inside the
    replica), of M times as many those in a row; None is 1, on a resume the run's own."""
    seed: int = field(default=0, metadata=trait(column=True))
    """Seed of the initial parameters and of the order of the data."""
    num_tokens: int = field(metadata=trait(column=True, begins_a_phase=True))
    """Token budget of the whole run, over all replicas: whole steps of global_batch · sequence_length. The command
    `train` takes 1e6, 1M or 20x (times the parameters), too, and rounds to whole steps."""
    global_batch: int = field(metadata=trait(column=True))
    """Sequences a step over all replicas; a multiple of the number of processes."""
    micro_batch: int | None = field(default=None, metadata=trait(may_change_on_resume=True, filled_in=True))
    """Sequences a forward pass of one process, gradients accumulated; None is its whole share of the batch."""
    sequence_length: int
    """Tokens a sequence."""
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig, metadata=trait(own_to_a_replica=True))
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig, metadata=trait(own_to_a_replica=True))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    num_connections: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """TCP connections between two replicas; several fill a long link that loses packets."""
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata=trait(own_to_a_replica=True, may_change_on_resume=True)
    )
    """Device on which the replicas compute; auto is cuda where there is a GPU."""
    precision: Literal["auto", "bf16", "fp32", "bf16-params"] = field(
        default="auto", metadata=trait(own_to_a_replica=True)
    )
    """bf16 autocast or fp32; auto is bf16 where the hardware multiplies it faster. bf16-params keeps parameters,
    gradients and the inner optimizer's moments in bfloat16, and the outer parameters and momentum in FP32."""
    compile: bool = field(default=False, metadata=trait(own_to_a_replica=True))
    """Run the model through torch.compile."""
    timeout_seconds: float = field(
        default=600.0, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Seconds to wait for another replica before giving up."""
    trackers: tuple[TrackerName, ...] = field(
        default=("tensorboard",),
        metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True),
    )
    """Trackers to which each replica's curves go, beside its file of metrics."""
    prometheus_port: int | None = field(
        default=None, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Port of 127.0.0.1 on which a machine's first replica serves /metrics for Prometheus; its next replicas take
    the ports after it. None serves nothing."""
    log_layer_cosine: bool = field(default=False, metadata=trait(own_with_rendezvous=True))
    """Log the cosine between replicas' outer gradients for every block, not only for every fragment."""

    def __post_init__(self) -> None:
        """Refuse contradictions; the schedule, codec and fragments check their own."""
        for name in ("num_replicas", "num_tokens", "global_batch", "sequence_length", "num_connections"):
            if getattr(self, name) < 1:
                raise out_of_range(name, "at least 1", getattr(self, name))
        for name in ("shards_per_replica", "ddp_per_replica"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise out_of_range(name, "at least 1", getattr(self, name))
        for name in ("num_replicas", "shards_per_replica", "ddp_per_replica", "num_connections"):
            if (getattr(self, name) or 1) > _MOST_PROCESSES:
                raise out_of_range(name, f"at most {_MOST_PROCESSES}", getattr(self, name))
        if self.num_shards > 1 and self.num_ddp > 1:
            raise UserError(
                f"shards_per_replica={self.num_shards} with ddp_per_replica={self.num_ddp}: a replica's processes "
                "either hold shards or are equal; leave one of them out",
                *("shards_per_replica", "ddp_per_replica"),
            )
        if not 0 <= self.seed < 2**63:
            raise out_of_range("seed", "at least 0 and below 2^63", self.seed)
        if not 0 < self.timeout_seconds <= 1e7:
            raise out_of_range("timeout_seconds", "above 0 and at most 1e7", self.timeout_seconds)
        if self.prometheus_port is not None and not 0 < self.prometheus_port < 1 << 16:
            raise out_of_range("prometheus_port", "above 0 and below 65536", self.prometheus_port)
        if self.method == "data_parallel":
            _check_data_parallel(self)
        _check_rendezvous(self)
        _check_batch(self)
        _check_checkpoints(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all replicas."""
        return self.global_batch * self.sequence_length

    @property
    def num_shards(self) -> int:
        """S."""
        return 1 if self.shards_per_replica is None else self.shards_per_replica

    @property
    def num_ddp(self) -> int:
        """D."""
        return 1 if self.ddp_per_replica is None else self.ddp_per_replica

    @property
    def processes_per_replica(self) -> int:
        """S or D, of which one is 1."""
        return self.num_shards * self.num_ddp

    @property
    def num_local_replicas(self) -> int:
        """Replicas that one command starts, and whose files its directory holds: M, with a rendezvous 1."""
        return self.num_replicas if self.rendezvous is None else 1

    @property
    def num_processes(self) -> int:
        """Processes of all of these replicas."""
        return self.num_local_replicas * self.processes_per_replica

    @property
    def process_batch(self) -> int:
        """Sequences a step of one process."""
        return (self.replica_batch or self.global_batch // self.num_replicas) // self.processes_per_replica

    @property
    def num_steps(self) -> int:
        """T.

        Raises:
            UserError: if the budget is no whole number of steps.
        """
        num_steps, rest = divmod(self.num_tokens, self.tokens_per_step)
        if rest:
            below = self.num_tokens - rest
            choice = f"{below} or {below + self.tokens_per_step}" if below else f"{self.tokens_per_step} or more"
            raise UserError(
                f"num_tokens={self.num_tokens} is no whole number of steps of global_batch·sequence_length="
                f"{self.tokens_per_step} tokens: take {choice}",
                *("num_tokens", "global_batch", "sequence_length"),
            )
        return num_steps

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.runs / self.name

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.directory / "checkpoints"

    @property
    def checkpoints_needed(self) -> int:
        """Number of newest checkpoints of each replica that always share one step, however far apart they are."""
        every = self.checkpoint.every_steps
        return 1 if not every or self.num_local_replicas == 1 else 2 - -self.steps_apart // every

    @property
    def default_keep(self) -> int:
        """The value of `checkpoint.keep` where it was left out."""
        return max(3, self.checkpoints_needed)

    @property
    def steps_apart(self) -> int:
        """Largest number of steps by which a replica may be ahead of another."""
        diloco, overlap = self.diloco, self.diloco.overlap_steps
        if self.method == "data_parallel":
            return 1
        first_offset = min(diloco.offsets) if diloco.offsets and diloco.first_sync == "full_period" else 0
        return diloco.sync_every + first_offset + max(overlap if isinstance(overlap, tuple) else (overlap or 1,))


def _check_data_parallel(config: TrainConfig) -> None:
    if config.num_connections > 1:
        raise UserError(
            f"num_connections={config.num_connections} means nothing to data_parallel, which leaves gradients "
            "to DistributedDataParallel: leave it out",
            "num_connections",
        )
    if config.num_ddp > 1:
        raise UserError(
            f"ddp_per_replica={config.num_ddp} with method=data_parallel, whose replicas are equal processes "
            "already: raise num_replicas instead",
            *("ddp_per_replica", "method", "num_replicas"),
        )


def _check_rendezvous(config: TrainConfig) -> None:
    """Refuse what replicas that come and go can't do, and what only they can."""
    if config.replica_batch is not None and config.replica_batch < 1:
        raise out_of_range("replica_batch", "at least 1", config.replica_batch)
    if config.rendezvous is None:
        for name, value in (("replica_batch", config.replica_batch), *vars(config.elastic).items()):
            if value is not None:
                name = name if name == "replica_batch" else f"elastic.{name}"
                raise UserError(
                    f"{name}={value} means nothing without rendezvous: set it to a URL", name, "rendezvous"
                )
        return
    diloco = config.diloco
    refused = {
        "method": (config.method == "data_parallel", "it needs every replica at every step: take another"),
        "ddp_per_replica": (config.num_ddp > 1, "take shards_per_replica for the processes of a replica"),
        "num_connections": (config.num_connections > 1, "replicas exchange through the store: leave it out"),
        "diloco.overlap_steps": (isinstance(diloco.overlap_steps, tuple), "give each replica its own number"),
        "diloco.freeze": (diloco.freeze, "the order of the sends is not known before: leave it out"),
        "elastic.num_shares": (
            config.elastic.num_shares is not None and diloco.combine == "gather",
            "gather cuts nothing into shares: leave it out, or take diloco.combine=reduce_scatter",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise UserError(
                f"{name}={get(config, name)} with rendezvous={config.rendezvous}: {reason}", name, "rendezvous"
            )


def _check_batch(config: TrainConfig) -> None:
    num_processes = config.num_replicas * config.processes_per_replica
    if config.replica_batch is None and config.global_batch % num_processes:
        divisor = f"num_replicas={config.num_replicas}"
        for name in ("shards_per_replica", "ddp_per_replica"):
            divisor += f" · {name}={getattr(config, name)}" if (getattr(config, name) or 1) > 1 else ""
        raise UserError(
            f"global_batch={config.global_batch} must be a multiple of {divisor}: "
            "each process takes an equal share",
            *("global_batch", "num_replicas", "shards_per_replica", "ddp_per_replica"),
        )
    if config.replica_batch is not None and config.replica_batch % config.num_shards:
        raise UserError(
            f"replica_batch={config.replica_batch} must be a multiple of shards_per_replica={config.num_shards}: "
            "each process takes an equal share",
            *("replica_batch", "shards_per_replica"),
        )
    if config.micro_batch is not None and (config.micro_batch < 1 or config.process_batch % config.micro_batch):
        raise UserError(
            f"micro_batch={config.micro_batch} must divide a process's share of the batch, {config.process_batch}",
            "micro_batch",
        )


def _check_checkpoints(config: TrainConfig) -> None:
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep
    if every < 0:
        raise out_of_range("checkpoint.every_steps", "at least 0", every)
    if keep is not None and keep < 1:
        raise out_of_range("checkpoint.keep", "at least 1", keep)
    if keep is not None and keep < config.checkpoints_needed:
        raise UserError(
            f"checkpoint.keep={keep} with checkpoint.every_steps={every}: replicas may be {config.steps_apart} "
            f"steps apart, so keep at least {config.checkpoints_needed} checkpoints, or save less often",
            *("checkpoint.keep", "checkpoint.every_steps"),
        )
