"""What a run is: one frozen dataclass, resolved once, kept as `config.json`."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from diloco.data.config import DataConfig
from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.traits import to_json

Method = Literal["streaming", "diloco", "data_parallel"]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The inner optimizer and its learning-rate schedule."""

    learning_rate: float = 2e-3
    """Peak, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled; None is 1/T for a run of T steps."""
    warmup_steps: int | None = None
    """Linear from 0; None is min(1000, T/10)."""
    final_fraction: float = 0.05
    """What the cosine leaves of the peak at the last step."""
    clip_norm: float = 1.0
    """Largest gradient norm of a replica."""
    z_loss: float = 1e-4
    """Weight of (log Z)² in the training loss."""

    def __post_init__(self) -> None:
        """Refuse what can't train."""
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"optimizer.{name} must be above 0 and finite, not {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction must lie between 0 and 1, not {self.final_fraction}")
        for name in ("weight_decay", "warmup_steps", "z_loss"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise UserError(f"optimizer.{name} must be at least 0 and finite, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Outer step and exchange; data_parallel uses none of it. None is the method's own value."""

    sync_every: int = 30
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int | tuple[int, ...] | None = None
    """τ, one number or one a replica; None is 1 for streaming, 0 for diloco."""
    offsets: tuple[int, ...] | None = None
    """t_p, one a fragment; None is floor(p·H/P)."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """The first sync of a fragment is at the first due step t ≥ H, or early, at the first t ≥ 1."""
    fragments: Literal["strided", "sequential", "whole"] | None = None
    """How blocks form fragments; None is strided for streaming, whole for diloco."""
    layers_per_fragment: int = 3
    """Blocks in a strided or sequential fragment."""
    outer_learning_rate: float = 0.4
    """η of the outer SGD with Nesterov momentum."""
    outer_momentum: float = 0.9
    """μ of the same."""
    mixing: float | None = None
    """α, how much a replica keeps of its own parameters at a merge; None is 0.5 for streaming, 0 for diloco."""
    wire: str | None = None
    """Codec of the outer gradients, such as e3m0, int8 or topk:density=0.05; None is e3m0 for streaming, fp32 for
    diloco."""
    combine: str = "gather"
    """gather: each replica receives every other's payload. reduce_scatter: each averages a share and sends that,
    in the same codec or, as in reduce_scatter:bf16, another."""
    offload: bool = False
    """Keep the outer parameters and momentum in pinned host memory, and fetch one fragment ahead."""
    error_feedback: float | None = None
    """β: what the codec lost is sent later, e ← β e + Δ; None is not."""
    freeze: bool = False
    """Train no parameters but those of the fragment that is sent next (FedPart, arXiv 2410.21374)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved for a resume, on each replica's own disk."""

    every_steps: int = 200
    """Steps between two checkpoints; 0 saves none."""
    keep: int | None = None
    """How many of the newest stay; None is as many as replicas that are apart need, at least 3."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss of the outer parameters."""

    every_steps: int = 0
    """Steps between two evaluations while training, each replica on its share of the text; 0 is the end only."""
    num_tokens: int = 262_144
    """Held-out tokens to evaluate on at the most."""
    batch: int = 16
    """Sequences a forward pass."""

    def __post_init__(self) -> None:
        """Refuse what can't be evaluated."""
        for name, least in (("every_steps", 0), ("num_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise UserError(f"evaluation.{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run."""

    recipe: tyro.conf.Suppress[str] = ""
    """The recipe it was made from."""
    name: str = ""
    """Directory of the run below `--runs`; left out, the recipe's name and the time."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    method: Method = "streaming"
    """Streaming DiLoCo, DiLoCo, or the baseline that exchanges gradients at every step."""
    num_replicas: int = 2
    """M, how many replicas train; they are local processes, or under torchrun those of its world."""
    shards_per_replica: int | None = None
    """S, processes over which each replica is sharded (FSDP2), of M·S those in a row; None is 1, on a resume what
    the run was started with."""
    seed: int = 0
    """Decides the initial parameters and the order of the data."""
    num_tokens: int
    """Token budget of the whole run, over all replicas; a multiple of global_batch · sequence_length."""
    global_batch: int
    """Sequences a step over all replicas; a multiple of num_replicas · shards_per_replica."""
    micro_batch: int | None = None
    """Sequences a forward pass of one process, gradients accumulated; None is its whole share of the batch."""
    sequence_length: int
    """Tokens a sequence."""
    model: DecoderConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    num_connections: int = 1
    """TCP connections between two replicas; several fill a long link that loses packets."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 autocast or fp32; auto is bf16 where the hardware multiplies it faster."""
    compile: bool = False
    """Run the model through torch.compile."""
    timeout_seconds: float = 600.0
    """How long to wait for another replica before giving up."""
    log_layer_cosine: bool = False
    """Log the cosine between replicas' outer gradients for every block, not only for every fragment."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; the schedule, codec and fragments check their own."""
        counts = ("num_replicas", "num_shards", "num_tokens", "global_batch", "sequence_length", "num_connections")
        for name in counts:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be at least 0 and below 2^63, not {self.seed}")
        if not 0 < self.timeout_seconds <= 1e7:
            raise UserError(f"timeout_seconds must be above 0 and at most 1e7, not {self.timeout_seconds}")
        if self.method == "data_parallel" and self.num_connections > 1:
            raise UserError(
                f"num_connections={self.num_connections} means nothing to data_parallel, which leaves gradients "
                "to DistributedDataParallel: leave it out"
            )
        if self.method == "data_parallel" and self.num_shards > 1:
            raise UserError(
                f"shards_per_replica={self.shards_per_replica} with method=data_parallel: its replicas are whole; "
                "raise num_replicas instead"
            )
        if self.global_batch % self.num_processes:
            of = f"num_replicas={self.num_replicas}"
            of += f" · shards_per_replica={self.num_shards}" if self.num_shards > 1 else ""
            raise UserError(
                f"global_batch={self.global_batch} must be a multiple of {of}: each process takes an equal share"
            )
        if self.micro_batch is not None and (self.micro_batch < 1 or self.process_batch % self.micro_batch):
            raise UserError(
                f"micro_batch={self.micro_batch} must divide a process's share of the batch, {self.process_batch}"
            )
        per_step = self.tokens_per_step
        if rest := self.num_tokens % per_step:
            below = self.num_tokens - rest
            choice = f"{below} or {below + per_step}" if below else f"{per_step} or more"
            raise UserError(
                f"num_tokens={self.num_tokens} is no whole number of steps of global_batch·sequence_length="
                f"{per_step} tokens: take {choice}"
            )
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
        """Where this run's files are."""
        return self.runs / self.name

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.directory / "checkpoints"

    def _check_checkpoints(self) -> None:
        every, keep = self.checkpoint.every_steps, self.checkpoint.keep
        if every < 0 or (keep is not None and keep < 1):
            raise UserError(
                f"checkpoint.every_steps={every} must be at least 0, checkpoint.keep={keep} at least 1"
            )
        if keep is not None and keep < self.checkpoints_needed:
            raise UserError(
                f"checkpoint.keep={keep} with checkpoint.every_steps={every}: replicas may be {self.steps_apart} "
                f"steps apart, so keep at least {self.checkpoints_needed} checkpoints, or save less often"
            )

    @property
    def checkpoints_needed(self) -> int:
        """So many of each replica's newest hold one in common, however far apart the replicas are."""
        every = self.checkpoint.every_steps
        return 1 if not every or self.num_replicas == 1 else 2 - -self.steps_apart // every

    @property
    def default_keep(self) -> int:
        """What `checkpoint.keep` is where it was left out."""
        return max(3, self.checkpoints_needed)

    @property
    def steps_apart(self) -> int:
        """How far a replica may be ahead of another."""
        diloco, overlap = self.diloco, self.diloco.overlap_steps
        if self.method == "data_parallel":
            return 1
        waits_for_first = diloco.sync_every
        if diloco.offsets and diloco.first_sync == "full_period":
            waits_for_first += min(diloco.offsets)
        return waits_for_first + max(overlap if isinstance(overlap, tuple) else (overlap or 1,))


_METHOD_VALUES: dict[Method, dict[str, Any]] = {
    "streaming": {"overlap_steps": 1, "fragments": "strided", "mixing": 0.5, "wire": "e3m0"},
    "diloco": {"overlap_steps": 0, "fragments": "whole", "mixing": 0.0, "wire": "fp32"},
    "data_parallel": {},
}


def with_method_values(config: TrainConfig) -> TrainConfig:
    """The same with what was left to the method filled in."""
    left = {k: v for k, v in _METHOD_VALUES[config.method].items() if getattr(config.diloco, k) is None}
    return replace(config, diloco=replace(config.diloco, **left))


def resolve(config: TrainConfig, *, vocab_size: int, prepared: Path) -> TrainConfig:
    """Fill in everything that was left to the method, the tokenizer, and the length of the run.

    Raises:
        UserError: if the model's vocabulary is smaller than the tokenizer's, or much larger, if the warm-up does
            not end before the run, or there would be nothing to freeze.
    """
    model = config.model
    if model.vocab_size and model.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size}: "
            "leave it 0, or choose another tokenizer with --data.tokenizer"
        )
    if model.vocab_size > 2 * vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is more than twice the tokenizer's {vocab_size}: most of it "
            "would never be read; choose another tokenizer with --data.tokenizer, and text with --data.train, or "
            "set --model.vocab-size 0"
        )
    config = with_method_values(config)
    optimizer, num_steps = config.optimizer, config.num_steps
    if optimizer.warmup_steps is not None and optimizer.warmup_steps >= num_steps:
        raise UserError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} leaves nothing of the run's {num_steps} steps: take "
            "fewer, or a larger --num-tokens"
        )
    if config.diloco.freeze and config.diloco.fragments == "whole":
        raise UserError("diloco.freeze with diloco.fragments=whole freezes nothing: take strided or sequential")
    return replace(
        config,
        model=replace(model, vocab_size=model.vocab_size or vocab_size),
        data=replace(config.data, prepared=prepared),
        checkpoint=replace(
            config.checkpoint,
            keep=config.default_keep if config.checkpoint.keep is None else config.checkpoint.keep,
        ),
        shards_per_replica=config.num_shards,
        micro_batch=config.micro_batch or config.process_batch,
        optimizer=replace(
            optimizer,
            weight_decay=1 / num_steps if optimizer.weight_decay is None else optimizer.weight_decay,
            warmup_steps=min(1000, num_steps // 10) if optimizer.warmup_steps is None else optimizer.warmup_steps,
        ),
    )


def shared_facts(config: TrainConfig) -> dict[str, Any]:
    """What all replicas of a run must have in common, by field; text is compared by its digest, not its place."""
    return {name: value for name, value in to_json(config).items() if name not in _OWN_TO_A_REPLICA}


_OWN_TO_A_REPLICA = {"runs", "device", "data", "precision", "compile", "timeout_seconds"}
