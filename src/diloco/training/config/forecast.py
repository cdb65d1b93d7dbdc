"""A forecast of a run before it starts: memory and speed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from diloco.errors import UserError
from diloco.outer.averages import reduction_of
from diloco.schedule import Schedule
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import engine_settings
from diloco.training.config.resolve import logit_bytes, with_method_values
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.optimizer import inner_optimizer
from diloco.wire.formats import parse


def device_bytes(config: TrainConfig) -> int:
    """The largest sum of what a process holds on its device at once, in bytes.

        4N/S for θ + 8N/S for AdamW's moments + 8N/S for Θ and v + pass + sync

    With τ = 0 a pass and a sync do not meet, and the larger one counts: gradients and activations are gone when
    the outer gradients are computed. With τ > 0 a sync goes on beside the next pass.

    Args:
        config: with its model's vocabulary; a decoder of `diloco.models`, or one with blocks like its.
    """
    config = with_method_values(config)
    num_params, num_shards = config.model.num_matrix_params, config.shards_per_replica
    state = (4 * num_params + _optimizer_bytes(config)) / num_shards
    if config.method != "data_parallel":
        state += 8 * (_largest_fragment(config) if config.diloco.offload else num_params) / num_shards
    pass_bytes, sync_bytes = _pass_bytes(config), _sync_bytes(config)
    together = max(pass_bytes, sync_bytes) if config.diloco.max_overlap == 0 else pass_bytes + sync_bytes
    return round(state + max(together, _evaluation_bytes(config)))


def _optimizer_bytes(config: TrainConfig) -> float:
    """The inner optimizer's state of all shards, FP32: m and v; b; b of matrices and m, v; or v, u and x aside."""
    num_params, rest = config.model.num_matrix_params, config.model.vocab_size * config.model.width
    num_copies = {"adamw": 2 * num_params, "muon": num_params + rest, "sgd": num_params}
    return 4 * num_copies.get(config.optimizer.name, 3 * num_params)


def _pass_bytes(config: TrainConfig) -> float:
    """4N/S gradients, activations, logits, and what is gathered of the shards."""
    model, is_half = config.model, config.precision != "fp32"
    num_tokens = (config.micro_batch or config.process_batch) * config.sequence_length
    gradients = 4 * model.num_matrix_params / config.shards_per_replica
    # Autocast keeps a bfloat16 copy of each weight for the backward pass, of gathered weights, too.
    copies = 2 * model.num_matrix_params if is_half else 0
    # The logits and their gradient; the loss has a few rows of them at a time in FP32.
    logits = 2 * logit_bytes(config) * num_tokens * model.vocab_size
    return gradients + copies + _gathered_bytes(config) + activation_bytes(config) + logits


def activation_bytes(config: TrainConfig) -> float:
    """The tensors that a forward pass of n tokens keeps for the backward pass, but for weights and logits.

    In units of n·D a block keeps, in FP32 (under autocast): the inputs of both norms, 8 (8), and of both first
    matrices, 8 (4); queries, keys and values, 12 (6), before their norms in FP32, 0 (8), and after RoPE, 8 (4);
    the attention, before and after a copy, 8 (4); the MLP before and after its GELU, 32 (16); the statistics of
    norms and attention, less than 1.
    """
    model = config.model
    num_tokens = (config.micro_batch or config.process_batch) * config.sequence_length
    per_block = 77 if config.precision == "fp32" else 51
    return num_tokens * model.width * (model.num_layers * per_block + 8)


def _gathered_bytes(config: TrainConfig) -> float:
    """FSDP2 gathers one block while another computes, and has the gradients of two: all in FP32; and the rest."""
    if config.shards_per_replica == 1:
        return 0.0
    model = config.model
    rest = model.vocab_size * model.width
    block = (model.num_matrix_params - rest) / model.num_layers
    return 4 * (4 * block + 2 * rest)


def _evaluation_bytes(config: TrainConfig) -> float:
    """Logits of a batch without gradients, and those of one sequence in FP32, and their exponentials."""
    per_sequence = config.sequence_length * config.model.vocab_size
    return (logit_bytes(config) * config.evaluation.batch + 8) * per_sequence + _gathered_bytes(config)


def _sync_bytes(config: TrainConfig) -> float:
    """2.5 FP32 vectors of the largest fragment (docs/results/speed.md, Memory), and a payload of every replica."""
    if config.method == "data_parallel":
        return 0.0
    num_params = _largest_fragment(config) / config.shards_per_replica
    assert config.diloco.wire is not None, "the method's values are filled in"
    payload = parse(config.diloco.wire).payload_bytes(round(num_params))
    return 10 * num_params + config.num_replicas * payload


def _largest_fragment(config: TrainConfig) -> float:
    model, diloco = config.model, config.diloco
    if diloco.fragments == "whole":
        return model.num_matrix_params
    rest = model.vocab_size * model.width
    return max(rest, diloco.layers_per_fragment * (model.num_matrix_params - rest) / model.num_layers)


def fitted(config: TrainConfig, memory_bytes: float) -> TrainConfig:
    """The same run on as few shards, and in passes of as many sequences, as fit into the memory of a GPU.

    Args:
        config: as of `device_bytes`.
        memory_bytes: of each GPU; a tenth of it is left to CUDA, nccl and gaps between tensors.

    Raises:
        UserError: if it fits on no number of shards that divides the batch.
    """
    for trial in _trials(config):
        if device_bytes(trial) <= 0.9 * memory_bytes:
            return trial
    raise UserError(
        f"global_batch={config.global_batch} with num_replicas={config.num_replicas} can't be cut into shares "
        f"that fit into {memory_bytes / 1e9:g} GB: take a larger batch, or shorter sequences",
        *("global_batch", "num_replicas", "sequence_length"),
    )


def _trials(config: TrainConfig) -> Iterator[TrainConfig]:
    """Numbers of shards, powers of two from 1, and for each the micro-batches, the largest first."""
    num_shards, num_readers = config.tensor_parallel, 1
    while config.global_batch % (config.num_replicas * num_readers) == 0:
        share = config.global_batch // (config.num_replicas * num_readers)
        sharded = replace(config, micro_batch=None, shards_per_replica=num_shards)
        yield sharded
        for micro_batch in (size for size in range(share - 1, 0, -1) if share % size == 0):
            yield replace(sharded, micro_batch=micro_batch)
        num_shards, num_readers = 2 * num_shards, 2 * num_readers


_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A run that was not started. All bytes are of one replica, and each destination counts."""

    num_params: int
    """Parameters of the model."""
    num_trained_params: int
    """Parameters that are trained, and so exchanged."""
    state_bytes: int
    """A process's share of parameters, gradients, the optimizer's state, Θ and the vectors beside it."""
    logits_bytes: int
    """Logits of a pass, and their gradient; where a device decides on autocast, with it."""
    schedule: Schedule | None
    """The steps at which fragments are sent; None for Data-Parallel, which reduces gradients at every step."""
    sync_bytes: tuple[int, ...]
    """Bytes of one sync of each fragment; for Data-Parallel those of a step."""
    bytes_sent: int
    """Bytes of the whole run."""
    data_parallel_bytes: int
    """Bytes that Data-Parallel sends in as many steps."""


def forecast(config: TrainConfig) -> Forecast:
    """The forecast of a resolved config's run in a fixed group.

    Raises:
        UserError: for settings that the engine refuses.
    """
    with torch.device("meta"):
        model = config.model.build(seed=config.seed)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    num_params = sum(parameter.numel() for parameter in model.parameters())
    num_trained, num_steps, num_replicas = sum(sizes.values()), config.num_steps, config.num_replicas
    a_step = ring_all_reduce_bytes(num_trained, num_replicas)
    schedule, sync_bytes, num_syncs, num_vectors = None, (a_step,), (num_steps,), 0
    if config.method != "data_parallel":
        settings = engine_settings(config.diloco, model, seed=config.seed)
        schedule, reduction = settings.schedule, reduction_of(config.diloco.combine, settings.wire)
        fragments = [sum(sizes[name] for name in fragment.parameters) for fragment in settings.fragments]
        sync_bytes = tuple(reduction.bytes_sent(size, num_replicas) for size in fragments)
        num_syncs = tuple(schedule.num_sent(p, num_steps) for p in range(len(fragments)))
        if not config.diloco.offload:
            # Θ, and what is kept beside it.
            num_vectors = 1 + len(settings.slots) + (settings.error_feedback is not None)
    states = inner_optimizer(model, config.optimizer).state.values()
    num_elements = num_params + num_trained  # gradients
    num_elements += sum(tensor.numel() for state in states for tensor in state.values() if tensor.ndim)
    if config.optimizer.name == "schedule_free":
        num_elements += num_trained  # x, which is put aside in a pass
    element_bytes = 2 if config.precision == "bf16-params" else _FP32_BYTES
    state_bytes = element_bytes * num_elements + _FP32_BYTES * num_vectors * num_trained
    assert config.micro_batch is not None, "the config is resolved"
    num_logits = config.micro_batch * config.sequence_length * config.model.vocab_size
    return Forecast(
        num_params=num_params,
        num_trained_params=num_trained,
        state_bytes=state_bytes // config.shards_per_replica,
        logits_bytes=2 * logit_bytes(config) * num_logits,
        schedule=schedule,
        sync_bytes=sync_bytes,
        bytes_sent=sum(num * size for num, size in zip(num_syncs, sync_bytes, strict=True)),
        data_parallel_bytes=a_step * num_steps,
    )
