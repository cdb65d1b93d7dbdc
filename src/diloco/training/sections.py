"""The sections of a run's settings: inner optimizer, outer step and exchange, checkpoints, evaluation."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro

from diloco.errors import UserError
from diloco.rendezvous.entries import MOST_SHARES
from diloco.training.traits import trait

Parameters = Literal["outer", "replica", "average"]
"""Parameters of a run to use: Θ, which the replicas share; replica 0's own; or the mean of all replicas' own."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The inner optimizer and its learning-rate schedule."""

    learning_rate: float = field(default=2e-3, metadata=trait(column=True, begins_a_phase=True))
    """Peak of the learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Number that is added to the root of the second moment."""
    weight_decay: float | None = field(default=None, metadata=trait(filled_in=True))
    """Decoupled weight decay; None is 1/T for a run of T steps."""
    warmup_steps: int | None = field(default=None, metadata=trait(begins_a_phase=True, filled_in=True))
    """Steps of linear warm-up from 0; None is min(1000, T/10)."""
    schedule: Literal["cosine", "wsd"] = field(default="cosine", metadata=trait(begins_a_phase=True))
    """After the warm-up: a cosine, or wsd (warm-up, stable, decay), which stays at the peak until the decay."""
    decay_fraction: float = field(default=0.2, metadata=trait(begins_a_phase=True))
    """Share of the run's steps, the last ones, in which wsd decays; cosine has no use for it."""
    final_fraction: float = field(default=0.05, metadata=trait(begins_a_phase=True))
    """Learning rate at the last step, as a fraction of the peak."""
    start_step: tyro.conf.Suppress[int] = field(default=0, metadata=trait(own_with_rendezvous=True))
    """The step at which the schedule begins: above 0 after a resume that changed it."""
    start_rate: tyro.conf.Suppress[float] = field(default=0.0, metadata=trait(own_with_rendezvous=True))
    """Learning rate at that step, from which the warm-up rises."""
    clip_norm: float = 1.0
    """Largest gradient norm of a replica."""
    z_loss: float = 1e-4
    """Weight of (log Z)² in the training loss."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing can be trained."""
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise out_of_range(f"optimizer.{name}", "above 0 and finite", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise out_of_range(f"optimizer.{name}", "at least 0 and below 1", getattr(self, name))
        if not 0 <= self.final_fraction <= 1:
            raise out_of_range("optimizer.final_fraction", "between 0 and 1", self.final_fraction)
        if not 0 < self.decay_fraction <= 1:
            raise out_of_range("optimizer.decay_fraction", "above 0 and at most 1", self.decay_fraction)
        for name in ("weight_decay", "warmup_steps", "z_loss", "start_step", "start_rate"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise out_of_range(f"optimizer.{name}", "at least 0 and finite", getattr(self, name))


def out_of_range(name: str, bounds: str, value: Any) -> UserError:
    """The refusal of a setting's value."""
    return UserError(f"{name} must be {bounds}, not {value}", name)


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Outer step and exchange; data_parallel uses none of it."""

    sync_every: int = field(default=30, metadata=trait(planned=True, column=True))
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int | tuple[int, ...] | None = field(
        default=None, metadata=trait(planned=True, own_with_rendezvous=True)
    )
    """τ: inner steps between sending a fragment and merging it, one number or one a replica; None is the method's
    own."""
    offsets: tuple[int, ...] | None = field(default=None, metadata=trait(planned=True))
    """t_p, one a fragment; None is floor(p·H/P)."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """First sync of a fragment: full_period is the first due step t ≥ H; early, the first due step t ≥ 1."""
    fragments: Literal["strided", "sequential", "whole"] | None = field(default=None, metadata=trait(planned=True))
    """Pattern by which blocks form fragments; None is the method's own."""
    layers_per_fragment: int = field(default=3, metadata=trait(planned=True))
    """Blocks in a strided or sequential fragment."""
    outer_learning_rate: float = field(default=0.4, metadata=trait(column=True))
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
        """Refuse outer and merge rules with which nothing is trained together; the engine checks the rest."""
        if not 0 < self.outer_learning_rate < math.inf:
            raise out_of_range("diloco.outer_learning_rate", "above 0 and finite", self.outer_learning_rate)
        if not 0 <= self.outer_momentum < 1:
            raise out_of_range("diloco.outer_momentum", "at least 0 and below 1", self.outer_momentum)
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise out_of_range("diloco.mixing", "at least 0 and below 1", self.mixing)


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Replicas that come and go: which of their payloads an outer step needs; only with a rendezvous."""

    quorum: Literal["majority", "all"] | None = None
    """majority: an outer step waits for all active replicas until t + τ, then for the majority until t + τ +
    patience, and then for nobody. all: it waits for all, as in a fixed group, and once the run has begun a replica
    comes back from its checkpoint only. None is the run's, or majority."""
    patience: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Inner steps after t + τ in which a decision still waits for the majority; None is sync_every."""
    weights: Literal["tokens", "tokens_squared_per_step"] | None = None
    """Weight of a replica's outer gradient in the average; None is the run's, or tokens."""
    max_stale: int | None = None
    """Rounds of a fragment after which a late payload is not counted any more; None is the run's, or 3."""
    num_shares: int | None = None
    """Shares into which reduce_scatter cuts a fragment, each averaged by one replica: about as many as there are
    replicas. None is the run's, or 16."""
    num_slots: int | None = None
    """Parts of the text, of which each replica reads one, and so the most replicas that are active at once; None
    is the run's, or 64."""
    max_local_steps: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Inner steps without the store, after which this replica stops; None is 50 · sync_every."""

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range."""
        bounds = {"patience": (0, 31), "max_stale": (0, 31), "num_slots": (1, 16), "max_local_steps": (1, 31)}
        for name, (least, bits) in bounds.items():
            if (value := getattr(self, name)) is not None and not least <= value < 1 << bits:
                raise out_of_range(f"elastic.{name}", f"at least {least} and below 2^{bits}", value)
        if self.num_shares is not None and not 2 <= self.num_shares <= MOST_SHARES:
            raise out_of_range("elastic.num_shares", f"from 2 to {MOST_SHARES}", self.num_shares)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints for a resume, on each replica's own disk."""

    every_steps: int = field(default=200, metadata=trait(may_change_on_resume=True))
    """Steps between two checkpoints; 0 saves none."""
    keep: int | None = field(default=None, metadata=trait(may_change_on_resume=True, filled_in=True))
    """Number of the newest checkpoints to keep; None is as many as replicas that are apart need, at least 3."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss of the outer parameters."""

    every_steps: int = field(default=0, metadata=trait(own_with_rendezvous=True))
    """Steps between two evaluations while training, each replica on its share of the text; 0 is the end only."""
    num_tokens: int = field(default=262_144, metadata=trait(own_with_rendezvous=True))
    """Largest number of held-out tokens to evaluate on."""
    batch: int = field(default=16, metadata=trait(may_change_on_resume=True))
    """Sequences a forward pass."""

    def __post_init__(self) -> None:
        """Refuse values with which nothing can be evaluated."""
        for name, least in (("every_steps", 0), ("num_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise out_of_range(f"evaluation.{name}", f"at least {least}", getattr(self, name))
