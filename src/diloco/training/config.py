"""The settings of a run: one frozen dataclass, kept as `config.json`; each field declares its own traits."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from diloco.data.config import DataConfig
from diloco.errors import UserError
from diloco.models.spec import ModelConfig
from diloco.presets import Method
from diloco.training.traits import trait


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The inner optimizer and its learning-rate schedule."""

    learning_rate: float = field(default=2e-3, metadata=trait(column="learning_rate"))
    """Peak, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay; None is 1/T for a run of T steps."""
    warmup_steps: int | None = None
    """Steps of linear warm-up from 0; None is min(1000, T/10)."""
    final_fraction: float = 0.05
    """Learning rate at the last step of the cosine, as a fraction of the peak."""
    clip_norm: float = 1.0
    """Largest gradient norm of a replica."""
    z_loss: float = 1e-4
    """Weight of (log Z)² in the training loss."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing can be trained."""
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise _out_of_range(f"optimizer.{name}", "above 0 and finite", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise _out_of_range(f"optimizer.{name}", "at least 0 and below 1", getattr(self, name))
        if not 0 <= self.final_fraction <= 1:
            raise _out_of_range("optimizer.final_fraction", "between 0 and 1", self.final_fraction)
        for name in ("weight_decay", "warmup_steps", "z_loss"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise _out_of_range(f"optimizer.{name}", "at least 0 and finite", getattr(self, name))


def _out_of_range(name: str, bounds: str, value: Any) -> UserError:
    return UserError(f"{name} must be {bounds}, not {value}", name)


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Outer step and exchange; data_parallel uses none of it."""

    sync_every: int = field(default=30, metadata=trait(planned=True, column="sync_every"))
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int | tuple[int, ...] | None = field(default=None, metadata=trait(planned=True))
    """τ: inner steps between sending a fragment and merging it, one number or one a replica; None is the method's
    own."""
    offsets: tuple[int, ...] | None = field(default=None, metadata=trait(planned=True))
    """t_p, one a fragment; None is floor(p·H/P)."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """First sync of a fragment: full_period is the first due step t ≥ H; early, the first due step t ≥ 1."""
    fragments: Literal["strided", "sequential", "whole"] | None = field(default=None, metadata=trait(planned=True))
    """How blocks form fragments; None is the method's own."""
    layers_per_fragment: int = field(default=3, metadata=trait(planned=True))
    """Blocks in a strided or sequential fragment."""
    outer_learning_rate: float = field(default=0.4, metadata=trait(column="outer_learning_rate"))
    """η of the outer SGD with Nesterov momentum."""
    outer_momentum: float = 0.9
    """μ of the outer SGD with Nesterov momentum."""
    mixing: float | None = None
    """α: how much of its own parameters a replica keeps at a merge; None is the method's own."""
    wire: str | None = field(default=None, metadata=trait(planned=True))
    """Codec of the outer gradients, such as e3m0, int8 or topk:density=0.05; None is the method's own."""
    combine: str = field(default="gather", metadata=trait(planned=True))
    """gather: each replica receives every other's payload. reduce_scatter: each averages a share and sends that,
    in the same codec or, as in reduce_scatter:bf16, another."""
    offload: bool = field(default=False, metadata=trait(may_change_on_resume=True))
    """Keep the outer parameters and momentum in pinned host memory, and fetch one fragment ahead."""
    error_feedback: float | None = None
    """β of error feedback, e ← β e + Δ, which sends later what the codec lost; None is no error feedback."""
    freeze: bool = False
    """Train no parameters but those of the fragment that is sent next (FedPart, arXiv 2410.21374)."""

    def __post_init__(self) -> None:
        """Refuse an outer rule with which nothing can be trained; the engine checks the rest."""
        if not 0 < self.outer_learning_rate < math.inf:
            raise _out_of_range("diloco.outer_learning_rate", "above 0 and finite", self.outer_learning_rate)
        if not 0 <= self.outer_momentum < 1:
            raise _out_of_range("diloco.outer_momentum", "at least 0 and below 1", self.outer_momentum)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints for a resume, on each replica's own disk."""

    every_steps: int = field(default=200, metadata=trait(may_change_on_resume=True))
    """Steps between two checkpoints; 0 saves none."""
    keep: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Number of the newest checkpoints to keep; None is as many as replicas that are apart need, at least 3."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss of the outer parameters."""

    every_steps: int = 0
    """Steps between two evaluations while training, each replica on its share of the text; 0 is the end only."""
    num_tokens: int = 262_144
    """Largest number of held-out tokens to evaluate on."""
    batch: int = field(default=16, metadata=trait(may_change_on_resume=True))
    """Sequences a forward pass."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing can be evaluated."""
        for name, least in (("every_steps", 0), ("num_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise _out_of_range(f"evaluation.{name}", f"at least {least}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run."""

    recipe: tyro.conf.Suppress[str] = field(default="", metadata=trait(incidental=True))
    """The recipe it was made from."""
    name: str = field(default="", metadata=trait(incidental=True))
    """The run's directory below `runs`; left out, the recipe's name and the time."""
    runs: Path = field(default=Path("runs"), metadata=trait(incidental=True, own_to_a_replica=True))
    """Directory of all runs."""
    method: Method = field(default="streaming_overlapped_fp4", metadata=trait(planned=True))
    """Preset of the DiLoCo settings that are left out; data_parallel exchanges gradients at every step instead."""
    num_replicas: int = field(default=2, metadata=trait(column="replicas"))
    """M, how many replicas train; they are local processes, or under torchrun those of its world."""
    shards_per_replica: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """S, processes over which each replica is sharded (FSDP2), of M·S those in a row; None is 1, on a resume the
    run's own."""
    seed: int = field(default=0, metadata=trait(column="seed"))
    """Seed of the initial parameters and of the order of the data."""
    num_tokens: int = field(metadata=trait(column="tokens"))
    """Token budget of the whole run, over all replicas; a multiple of global_batch · sequence_length."""
    global_batch: int = field(metadata=trait(column="batch_tokens"))
    """Sequences a step over all replicas; a multiple of num_replicas · shards_per_replica."""
    micro_batch: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Sequences a forward pass of one process, gradients accumulated; None is its whole share of the batch."""
    sequence_length: int
    """Tokens a sequence."""
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig, metadata=trait(own_to_a_replica=True))
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    num_connections: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """TCP connections between two replicas; several fill a long link that loses packets."""
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto", metadata=trait(own_to_a_replica=True, may_change_on_resume=True)
    )
    """Where the replicas compute; auto is cuda where there is a GPU."""
    precision: Literal["auto", "bf16", "fp32"] = field(default="auto", metadata=trait(own_to_a_replica=True))
    """bf16 autocast or fp32; auto is bf16 where the hardware multiplies it faster."""
    compile: bool = field(default=False, metadata=trait(own_to_a_replica=True))
    """Run the model through torch.compile."""
    timeout_seconds: float = field(
        default=600.0, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Seconds to wait for another replica before giving up."""
    log_layer_cosine: bool = False
    """Log the cosine between replicas' outer gradients for every block, not only for every fragment."""

    def __post_init__(self) -> None:
        """Refuse contradictions; the schedule, codec and fragments check their own."""
        for name in ("num_replicas", "num_tokens", "global_batch", "sequence_length", "num_connections"):
            if getattr(self, name) < 1:
                raise _out_of_range(name, "at least 1", getattr(self, name))
        if self.num_shards < 1:
            raise _out_of_range("shards_per_replica", "at least 1", self.num_shards)
        if not 0 <= self.seed < 2**63:
            raise _out_of_range("seed", "at least 0 and below 2^63", self.seed)
        if not 0 < self.timeout_seconds <= 1e7:
            raise _out_of_range("timeout_seconds", "above 0 and at most 1e7", self.timeout_seconds)
        if self.method == "data_parallel":
            self._check_data_parallel()
        self._check_batch()
        self._check_checkpoints()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all replicas."""
        return self.global_batch * self.sequence_length

    @property
    def num_shards(self) -> int:
        """S."""
        return 1 if self.shards_per_replica is None else self.shards_per_replica

    @property
    def num_processes(self) -> int:
        """M·S."""
        return self.num_replicas * self.num_shards

    @property
    def process_batch(self) -> int:
        """Sequences a step of one process."""
        return self.global_batch // self.num_processes

    @property
    def num_steps(self) -> int:
        """T."""
        return self.num_tokens // self.tokens_per_step

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.runs / self.name

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.directory / "checkpoints"

    def _check_data_parallel(self) -> None:
        if self.num_connections > 1:
            raise UserError(
                f"num_connections={self.num_connections} means nothing to data_parallel, which leaves gradients "
                "to DistributedDataParallel: leave it out",
                "num_connections",
            )
        if self.num_shards > 1:
            raise UserError(
                f"shards_per_replica={self.shards_per_replica} with method=data_parallel: its replicas are whole; "
                "raise num_replicas instead",
                *("shards_per_replica", "method", "num_replicas"),
            )

    def _check_batch(self) -> None:
        if self.global_batch % self.num_processes:
            divisor = f"num_replicas={self.num_replicas}"
            divisor += f" · shards_per_replica={self.num_shards}" if self.num_shards > 1 else ""
            raise UserError(
                f"global_batch={self.global_batch} must be a multiple of {divisor}: "
                "each process takes an equal share",
                *("global_batch", "num_replicas", "shards_per_replica"),
            )
        if self.micro_batch is not None and (self.micro_batch < 1 or self.process_batch % self.micro_batch):
            raise UserError(
                f"micro_batch={self.micro_batch} must divide a process's share of the batch, {self.process_batch}",
                "micro_batch",
            )
        per_step = self.tokens_per_step
        if rest := self.num_tokens % per_step:
            below = self.num_tokens - rest
            choice = f"{below} or {below + per_step}" if below else f"{per_step} or more"
            raise UserError(
                f"num_tokens={self.num_tokens} is no whole number of steps of global_batch·sequence_length="
                f"{per_step} tokens: take {choice}",
                *("num_tokens", "global_batch", "sequence_length"),
            )

    def _check_checkpoints(self) -> None:
        every, keep = self.checkpoint.every_steps, self.checkpoint.keep
        if every < 0:
            raise _out_of_range("checkpoint.every_steps", "at least 0", every)
        if keep is not None and keep < 1:
            raise _out_of_range("checkpoint.keep", "at least 1", keep)
        if keep is not None and keep < self.checkpoints_needed:
            raise UserError(
                f"checkpoint.keep={keep} with checkpoint.every_steps={every}: replicas may be {self.steps_apart} "
                f"steps apart, so keep at least {self.checkpoints_needed} checkpoints, or save less often",
                *("checkpoint.keep", "checkpoint.every_steps"),
            )

    @property
    def checkpoints_needed(self) -> int:
        """Number of newest checkpoints of each replica that always share one step, however far apart they are."""
        every = self.checkpoint.every_steps
        return 1 if not every or self.num_replicas == 1 else 2 - -self.steps_apart // every

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
