"""Evaluate a run, and write its outer parameters and its summary."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from diloco.data.shards import TokenShards, open_split
from diloco.engine.parameters import gathered
from diloco.errors import UserError
from diloco.evaluation.likelihoods import HeldOutLoss, held_out_loss, sequence_losses
from diloco.exchange.transport import share
from diloco.files import write_atomically, write_json
from diloco.models.language_model import LanguageModel
from diloco.outer.digest import parameters_hash
from diloco.schema import Count, Seconds
from diloco.training.config.config import TrainConfig, to_json
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.hardware import machine_name, model_flops_utilization, peak_memory_bytes
from diloco.training.records.samples import Sample, write_samples
from diloco.training.state import TrainState
from diloco.training.world import World

if TYPE_CHECKING:
    from diloco.rendezvous.log.run import RunState
    from diloco.rendezvous.store_rendezvous import StoreRendezvous

OUTER_FILE = "outer.safetensors"
"""The file of the final outer parameters in a run's directory."""
SUMMARY_FILE = "summary.json"
"""The file of a finished run's results."""


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """The part of one name's replicas in a run, whole rounds of all fragments."""

    tokens: Count
    """Tokens whose work the outer steps have counted."""
    steps: Count
    """Inner steps that they took."""


def contributors(state: "RunState") -> dict[str, Contributor]:
    """The replicas whose work was counted, by name."""
    num_fragments = state.rules.num_fragments
    sums: dict[str, tuple[int, int]] = {}
    for member in state.members:
        if member.tokens:
            tokens, steps = sums.get(member.name, (0, 0))
            sums[member.name] = tokens + member.tokens, steps + member.steps
    return {
        name: Contributor(tokens=tokens // num_fragments, steps=steps // num_fragments)
        for name, (tokens, steps) in sums.items()
    }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The content of `summary.json`; times are those of replica 0, losses and utilization of all replicas."""

    num_params: Count
    """Parameters of the model."""
    num_tokens: Count
    """Tokens that all replicas together have trained on; once a log closes the run, those that it has counted,
    without the last ones of each replica."""
    num_steps: Annotated[int, msgspec.Meta(ge=1)]
    """T."""
    eval_loss: float
    """Held-out loss of the outer parameters, nats per token."""
    eval_standard_error: float | None
    """Standard error of that loss over sequences; None for a single one."""
    eval_bits_per_byte: float
    """The loss in bits a byte of text."""
    training_loss: float | None = None
    """Training loss: the mean of the last 5 % of steps, and of the replicas; None if no metrics are left."""
    bytes_sent_per_replica: Count
    """Payload bytes that replica 0 sent, each destination counted."""
    data_parallel_bytes_per_replica: Count
    """Bytes that Data-Parallel would have sent, as a ring all-reduce in FP32."""
    outer_hash: str
    """Hash of the final outer parameters."""
    num_trained_params: Count | None = None
    """The parameters that were trained, and so exchanged; None means all."""
    method: str = ""
    """The run's method."""
    num_replicas: Count = 1
    """M; with a rendezvous the number of contributors."""
    shards_per_replica: Count = 1
    """S."""
    tensor_parallel: Count = 1
    """Processes of a replica that compute on the same sequences."""
    ddp_per_replica: Count = 1
    """Copies of a replica's parameters, which share its batch."""
    eval_tokens: Count = 0
    """Held-out tokens that were evaluated."""
    wall_seconds: Seconds = 0.0
    """Time of all steps."""
    compute_utilization: float | None = None
    """The share of the time of all steps in which training did not wait for other replicas, their mean."""
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Tokens a second of all replicas, at the pace of replica 0; with a rendezvous, while this one trained."""
    replica_tokens_per_second: float | None = None
    """With a rendezvous, those of this replica's own."""
    model_flops_utilization: float | None = None
    """The model's operations over those that a GPU of replica 0 can do in that time, if it is known (MFU)."""
    peak_memory_bytes: Count | None = None
    """The most memory that tensors of a process took on its GPU."""
    device: str = ""
    """Device on which the replicas computed."""
    machine: str = ""
    """The name of replica 0's GPU or processor."""
    precision: str = ""
    """bf16, bf16-params or fp32."""
    contributors: Mapping[str, Contributor] = field(default_factory=dict)
    """With a rendezvous, the replicas whose work the outer steps have counted, by name."""
    entry: Count | None = None
    """With a rendezvous, the entry of the log after which these are the outer parameters."""
    closed: bool | None = None
    """With a rendezvous, true if that entry closes the run: no outer step follows it."""


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    summary: dict[str, Any]
    """The content of replica 0's `summary.json`; in another replica with its own times and bytes."""
    samples: Sequence[Sample]
    """The text that the model writes with the outer parameters; none in another replica."""


@dataclass(frozen=True)
class HeldOut:
    """The windows of the held-out text on which a run is evaluated."""

    text: TokenShards
    """The held-out split."""
    sequence_length: int
    """Tokens that are predicted in a window."""
    windows: Sequence[int]
    """Their numbers, spread evenly over the text; at least one per process."""
    batch: int
    """Windows a forward pass."""

    def losses(self, model: LanguageModel, windows: Sequence[int], device: torch.device) -> list[float]:
        """The mean loss of each window, nats per token."""
        batches = (
            np.stack(
                [self.text.window(window, self.sequence_length) for window in windows[start : start + self.batch]]
            )
            for start in range(0, len(windows), self.batch)
        )
        return sequence_losses(model, batches, device)

    def mean(self, losses: Sequence[float]) -> HeldOutLoss:
        """The held-out loss of windows whose losses are known."""
        bytes_per_token = self.text.num_bytes / self.text.num_tokens
        return held_out_loss(losses, sequence_length=self.sequence_length, bytes_per_token=bytes_per_token)


def open_held_out(config: TrainConfig) -> HeldOut:
    """The held-out text of a resolved config.

    Raises:
        UserError: if the text is gone, or has fewer windows than the run has processes.
    """
    assert config.data.prepared is not None, "the config is resolved"
    text, length, num_processes = (
        open_split(config.data.prepared, "held_out"),
        config.sequence_length,
        config.num_processes,
    )
    available = text.num_windows(length)
    if available < num_processes:
        raise UserError(
            f"the held-out text has {available} sequences of {length} tokens, fewer than the {num_processes} "
            "processes: raise data.held_out_fraction, or lower sequence_length",
            *("sequence_length", "data.held_out_fraction"),
        )
    count = min(available, max(num_processes, config.evaluation.num_tokens // length))
    return HeldOut(text, length, [k * available // count for k in range(count)], config.evaluation.batch)


def evaluate(state: TrainState, world: World, held_out: HeldOut, *, together: bool) -> HeldOutLoss:
    """Held-out loss of the outer parameters on this process's share of the text, or together on all of it."""
    # Processes that compute together read the same windows.
    each = world.num_ranks // world.num_readers
    windows, reader, num_readers = (
        held_out.windows,
        world.everyone.replica // each,
        world.everyone.num_replicas // each,
    )
    mine = [*windows[reader::num_readers]]
    # All processes of a replica must take the same number of passes: a shorter share repeats a window.
    padded = mine + mine[-1:] * (-(-len(windows) // num_readers) - len(mine))
    with state.synchronizer.outer_parameters_applied():
        losses = held_out.losses(state.model, padded, world.device)[: len(mine)]
    if together:
        losses = [loss for own in share(world.everyone, losses, list[float])[::each] for loss in own]
    return held_out.mean(losses)


def conclude(
    state: TrainState, config: TrainConfig, world: World, loss: HeldOutLoss, means: Mapping[str, float]
) -> Outcome | None:
    """The outcome of a run that is over, in the first process of each replica; all of its processes must call it.

    Replica 0 writes the outer parameters, the summary and the samples; the others' outcomes have no samples. The
    means over all replicas are a part of the summary.
    """
    num_tokens = state.progress.after(state.step).tokens
    if world.replica > 0:
        outer_hash = parameters_hash(state.synchronizer.outer_parameters(), gathered)
        summary = _summary(state, config, world, loss, num_tokens) | {**means, "outer_hash": outer_hash}
        return Outcome(summary, []) if world.rank == 0 else None
    outer: dict[str, Tensor] = {}
    for name, parameter in state.synchronizer.outer_parameters().items():
        value = gathered(parameter).contiguous().cpu()
        if world.rank == 0:
            outer[name] = value
    if world.rank > 0:
        return None
    exported = safetensors.torch.save(outer, metadata={"model": json.dumps(to_json(config.model))})
    write_atomically(config.directory / OUTER_FILE, [exported])
    summary = _summary(state, config, world, loss, num_tokens)
    summary |= {**means, "outer_hash": parameters_hash(outer)}
    write_json(config.directory / SUMMARY_FILE, summary)
    # A model that is sharded may fit on no device whole.
    model = state.model if world.mesh is None else config.model.build(seed=config.seed)
    model.load_state_dict(outer)
    return Outcome(summary, write_samples(model, config))


def _summary(
    state: TrainState, config: TrainConfig, world: World, loss: HeldOutLoss, num_tokens: int
) -> dict[str, Any]:
    """The numbers of the end, by the fields of `Summary`."""
    num_params = sum(parameter.numel() for parameter in state.model.parameters())
    num_trained = sum(parameter.numel() for parameter in state.model.parameters() if parameter.requires_grad)
    rendezvous = world.rendezvous
    counted = {} if rendezvous is None else contributors(rendezvous.state)
    num_replicas = len(counted) or config.num_replicas
    utilization = model_flops_utilization(config.step_flops, world.device, state.seconds / state.step)
    own_pace = config.replica_tokens * state.step / state.seconds
    return {
        "method": config.method,
        "num_replicas": num_replicas,
        "shards_per_replica": config.shards_per_replica,
        "tensor_parallel": config.tensor_parallel,
        "ddp_per_replica": config.ddp_per_replica,
        "num_params": num_params,
        "num_trained_params": num_trained,
        "num_tokens": num_tokens,
        "num_steps": state.step,
        "eval_loss": loss.loss,
        "eval_standard_error": loss.standard_error,
        "eval_bits_per_byte": loss.bits_per_byte,
        "eval_tokens": loss.num_tokens,
        "wall_seconds": state.seconds,
        "tokens_per_second": num_replicas * own_pace if rendezvous is None else 0.0,
        "model_flops_utilization": utilization,
        "peak_memory_bytes": peak_memory_bytes(world.device),
        "bytes_sent_per_replica": state.synchronizer.bytes_sent,
        "data_parallel_bytes_per_replica": ring_all_reduce_bytes(num_trained, num_replicas) * state.step,
        "device": world.device.type,
        "machine": machine_name(world.device),
        "precision": world.precision,
    } | ({} if rendezvous is None else {"replica_tokens_per_second": own_pace} | _of_the_log(rendezvous, counted))


def _of_the_log(rendezvous: "StoreRendezvous", counted: Mapping[str, Contributor]) -> dict[str, Any]:
    """The results of a run whose replicas come and go, which its log tells."""
    state = rendezvous.state
    # A replica can only estimate the others' tokens until the last entry has counted them.
    return ({"num_tokens": state.tokens // len(state.fragments)} if rendezvous.is_closed else {}) | {
        "contributors": {name: asdict(part) for name, part in counted.items()},
        "entry": rendezvous.entry,
        "closed": rendezvous.is_closed,
    }
