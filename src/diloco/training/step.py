"""One training step of a replica: an inner step, and the sends and merges that are due after it.

Shapes: B sequences, T tokens, V vocabulary.
"""

import math
import time

import numpy as np
import torch
import torch.distributed as dist

from diloco.engine.sharded import gathered
from diloco.errors import TrainingError
from diloco.training.config import TrainConfig
from diloco.training.metrics import StepMetrics, describe
from diloco.training.state import TrainState
from diloco.training.world import World


def train_step(
    state: TrainState, batch: np.ndarray, config: TrainConfig, world: World, *, since: float
) -> StepMetrics:
    """An inner step, and the outer steps that are due after it; after the last one, all that are in flight.

    Args:
        state: changed in place.
        batch: the process's share, int64 (B, T+1).
        config: of the run.
        world: of this process.
        since: `time.perf_counter()` when the step before had ended, so that what lies between, such as logging,
            counts for this step.

    Raises:
        TrainingError: as `inner_step`.
        ExchangeError: if other replicas are gone.
    """
    sync, step = state.sync, state.step + 1
    blocked_before, sent_before, received_before = sync.blocked_seconds, sync.bytes_sent, sync.bytes_received
    rate = learning_rate(config, state.progress.tokens(step) / config.tokens_per_step)
    loss, grad_norm = inner_step(state, batch, config, world, rate)
    outer_steps = [*sync.step(tokens=len(batch) * world.num_ranks * config.sequence_length)]
    if state.mean_loss is not None:
        state.mean_loss.add(loss)
        if sync.bytes_sent > sent_before:
            state.mean_loss.send(step)
    state.is_over = state.progress.is_over(step)
    if state.is_over:
        outer_steps += sync.finish()
    mean_loss = None
    if state.mean_loss is not None and outer_steps:
        mean_loss = state.mean_loss.receive(max(o.sync.step for o in outer_steps))
    layers = config.log_layer_cosine
    described = tuple(describe(o, log_layer_cosine=layers, names=world.name_of) for o in outer_steps)
    blocked_seconds = world.over_ranks(sync.blocked_seconds - blocked_before, dist.ReduceOp.MAX)
    seconds = time.perf_counter() - since
    state.step, state.seconds = step, state.seconds + seconds
    state.blocked_seconds += blocked_seconds
    return StepMetrics(
        step=step,
        tokens=state.progress.tokens(step),
        loss=loss,
        learning_rate=rate,
        grad_norm=grad_norm,
        step_seconds=seconds,
        blocked_seconds=blocked_seconds,
        bytes_sent=sync.bytes_sent - sent_before,
        bytes_received=sync.bytes_received - received_before,
        outer_steps=described,
        mean_loss=mean_loss,
        engine=sync.logs() if any(o.sync.fragment == 0 for o in outer_steps) else {},
    )


def inner_step(
    state: TrainState, batch: np.ndarray, config: TrainConfig, world: World, rate: float
) -> tuple[float, float]:
    """Train on a batch, int64 (B, T+1), at a learning rate.

    Returns:
        The replica's loss, nats a token, and its gradient norm before clipping.

    Raises:
        TrainingError: if one of them is not finite; no parameter has changed then.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    loss, grad_norm = gradients(state, batch, config, world)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingError(
            f"step {state.step + 1}: the loss of replica {world.replica} is {loss:g} and its gradient norm "
            f"{grad_norm:g}: lower optimizer.learning_rate (now {config.optimizer.learning_rate:g}) and start "
            f"again, or look at {config.directory / f'metrics-{world.replica}.jsonl'}",
            "optimizer.learning_rate",
        )
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss, grad_norm


def gradients(state: TrainState, batch: np.ndarray, config: TrainConfig, world: World) -> tuple[float, float]:
    """Accumulate and clip the gradients of a batch; returns loss and norm as `inner_step` does."""
    assert config.micro_batch is not None, "the config is resolved"
    micro_batches = torch.from_numpy(batch).to(world.device).split(config.micro_batch)
    losses = []
    for index, window_BxT1 in enumerate(micro_batches):
        with state.passes(index == len(micro_batches) - 1):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=world.autocast):
                logits_BxTxV = state.forward(window_BxT1[:, :-1])
            loss, objective = state.model.loss(logits_BxTxV, window_BxT1[:, 1:], config.optimizer.z_loss)
            (objective / len(micro_batches)).backward()
        losses.append(loss.detach())
    for parameter in state.frozen(state.step + 1):
        parameter.grad = None
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.optimizer.clip_norm)
    loss = torch.stack(losses).mean().item()
    return world.over_ranks(loss, dist.ReduceOp.SUM) / world.num_ranks, gathered(grad_norm).item()


def learning_rate(config: TrainConfig, step: float) -> float:
    """Linear warm-up to the peak, then the schedule down to `final_fraction` of it, where it stays.

    With x from 0 to 1 on the way down, the height above that end is (1 + cos π x) / 2 for the cosine, and 1 − √x
    for wsd (arXiv 2405.18392), which begins at the last `decay_fraction` of the steps after `start_step`.
    Between two steps it is defined, too: where replicas come and go, the run need not stand at a whole step.
    """
    inner, first, last = config.optimizer, config.optimizer.start_step, config.num_steps
    assert inner.warmup_steps is not None, "the config is resolved"
    warm = first + inner.warmup_steps
    if step <= warm:
        if step <= first:
            return inner.start_rate
        return inner.start_rate + (inner.learning_rate - inner.start_rate) * (step - first) / inner.warmup_steps
    if inner.schedule == "cosine":
        progress = (min(step, last) - warm) / (last - warm)
        height = (1 + math.cos(math.pi * progress)) / 2
    else:
        begin = first + (1 - inner.decay_fraction) * (last - first)
        height = 1 - math.sqrt(max(0.0, min(step, last) - begin) / (last - begin))
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * height)
