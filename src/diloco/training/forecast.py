"""The facts of a run before it starts: parameters, memory, steps, and the bytes of every sync, counted exactly."""

from dataclasses import dataclass

import torch

from diloco.reduction import reduction_of
from diloco.schedule import Schedule
from diloco.training.config import TrainConfig
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.engine_settings import engine_settings
from diloco.training.sizes import logit_bytes

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A run that was not started. All bytes are of one replica, and each destination counts."""

    num_params: int
    """Parameters of the model."""
    num_trained_params: int
    """Parameters that are trained, and so exchanged."""
    state_bytes: int
    """A process's share of parameters, gradients, Adam's two moments, Θ and its momentum, all FP32."""
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
    schedule, sync_bytes, num_syncs = None, (a_step,), (num_steps,)
    if config.method != "data_parallel":
        settings = engine_settings(config, model)
        schedule, reduction = settings.schedule, reduction_of(config.diloco.combine, settings.wire)
        fragments = [sum(sizes[name] for name in fragment.parameters) for fragment in settings.fragments]
        sync_bytes = tuple(reduction.bytes_sent(size, num_replicas) for size in fragments)
        num_syncs = tuple(schedule.num_sent(p, num_steps) for p in range(len(fragments)))
    num_copies = 4 if schedule is None or config.diloco.offload else 6
    assert config.micro_batch is not None, "the config is resolved"
    num_logits = config.micro_batch * config.sequence_length * config.model.vocab_size
    return Forecast(
        num_params=num_params,
        num_trained_params=num_trained,
        state_bytes=_FP32_BYTES * (num_params + (num_copies - 1) * num_trained) // config.num_shards,
        logits_bytes=2 * logit_bytes(config) * num_logits,
        schedule=schedule,
        sync_bytes=sync_bytes,
        bytes_sent=sum(num * size for num, size in zip(num_syncs, sync_bytes, strict=True)),
        data_parallel_bytes=a_step * num_steps,
    )
