"""One training step of a replica: an inner step, and the sends and merges that are due after it.

A step is begun and ended: what the host reads of it, it reads at the end, when a GPU may have the next step to do.

Shapes: B sequences, T tokens, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from diloco.engine.parameters import gathered
from diloco.engine.streaming import StreamingDiLoCo, begin_logs
from diloco.errors import TrainingError
from diloco.outer.step import OuterStep
from diloco.training.hardware import peak_memory_bytes
from diloco.training.records.metrics import StepMetrics, describe
from diloco.training.state import Synchronizer, TrainState
from diloco.training.world import World
from diloco.wire.kernels.memory import begin_to_host, to_device, widest


@dataclass(frozen=True, kw_only=True)
class BegunStep:
    """A step that a GPU may not have done yet."""

    step: int
    tokens: int
    new_tokens: int | None
    learning_rate: float
    read_loss_and_norm: Callable[[], Tensor]
    """Waits for the replica's loss and gradient norm, FP64."""
    read_blocked: Callable[[], Tensor]
    """Reads for how many seconds training waited for other replicas; the longest of the replica's processes."""
    bytes_sent: int
    bytes_received: int
    sends: bool
    """True if something was sent."""
    outer_steps: Sequence[OuterStep]
    log_layer_cosine: bool
    """True if their cosines are measured for every block, too."""
    read_logs: Callable[[], Mapping[str, float]]
    """Reads the engine's logs, where fragment 0 was merged."""


def begin_step(
    state: TrainState, batch: np.ndarray, world: World, *, rate: float, log_layer_cosine: bool = False
) -> BegunStep:
    """An inner step, and the outer steps that are due after it; after the last one, all that are in flight.

    Args:
        state: changed in place.
        batch: the process's share, int64 (B, T+1).
        world: of this process.
        rate: the step's learning rate.
        log_layer_cosine: measure the outer gradients' cosine for every block, not only for every fragment.

    Raises:
        ExchangeError: if other replicas are gone.
    """
    sync, step, tokens_before = state.sync, state.step + 1, state.standing.tokens
    # Where replicas come and go, the others have trained while this one had no process.
    is_known = world.rendezvous is None or state.step > state.resumed_step
    blocked_before, sent_before, received_before = sync.blocked_seconds, sync.bytes_sent, sync.bytes_received
    loss_and_norm = begin_inner_step(state, batch, world, rate)
    read_loss_and_norm = begin_to_host(loss_and_norm)
    outer_steps = [*sync.step(tokens=batch[:, 1:].size * world.num_readers, loss=loss_and_norm[0])]
    sends = sync.bytes_sent > sent_before
    state.took(step)
    if state.is_over:
        outer_steps += sync.finish(close=True)
        state.took(step)  # with what was counted since
    for outer_step in outer_steps:
        outer_step.begin(layer_cosine=log_layer_cosine)
    blocked = torch.tensor(sync.blocked_seconds - blocked_before, dtype=torch.float64, device="cpu")
    if world.num_ranks > 1:
        blocked = world.group.reduce(to_device(blocked, world.device), largest=True)
    return BegunStep(
        step=step,
        tokens=state.standing.tokens,
        new_tokens=state.standing.tokens - tokens_before if is_known else None,
        learning_rate=rate,
        read_loss_and_norm=read_loss_and_norm,
        read_blocked=begin_to_host(blocked),
        bytes_sent=sync.bytes_sent - sent_before,
        bytes_received=sync.bytes_received - received_before,
        sends=sends,
        outer_steps=outer_steps,
        log_layer_cosine=log_layer_cosine,
        read_logs=_begin_logs(sync, outer_steps),
    )


def _begin_logs(sync: Synchronizer, outer_steps: Sequence[OuterStep]) -> Callable[[], dict[str, float]]:
    """The logs after an outer step of fragment 0, and else none."""
    if not any(outer_step.sync.fragment == 0 for outer_step in outer_steps):
        return dict
    return begin_logs(cast(StreamingDiLoCo, sync))  # nothing else takes outer steps


def end_step(begun: BegunStep, state: TrainState, world: World, *, since: float) -> StepMetrics:
    """Wait for a step, and measure it; steps end in the order in which they were begun.

    Args:
        begun: the step.
        state: the replica's, whose times are changed.
        world: of this process.
        since: `time.perf_counter()` when the step before had ended, so that what lies between, such as logging,
            counts for this step.

    Raises:
        TrainingError: if loss or gradient norm is not finite; the step has changed no parameter then.
        ExchangeError: if other replicas are gone.
    """
    loss, grad_norm = begun.read_loss_and_norm().tolist()
    _check_finite(loss, grad_norm, begun.step, state, world)
    mean_loss = None
    if state.mean_loss is not None:
        state.mean_loss.add(loss)
        if begun.sends:
            state.mean_loss.send(begun.step)
        if begun.outer_steps:
            mean_loss = state.mean_loss.receive(max(o.sync.step for o in begun.outer_steps))
    layers = begun.log_layer_cosine
    described = tuple(describe(o, log_layer_cosine=layers, names=world.name_of) for o in begun.outer_steps)
    blocked_seconds = begun.read_blocked().item()
    seconds = time.perf_counter() - since
    state.seconds += seconds
    state.blocked_seconds += blocked_seconds
    return StepMetrics(
        step=begun.step,
        tokens=begun.tokens,
        new_tokens=begun.new_tokens,
        loss=loss,
        learning_rate=begun.learning_rate,
        grad_norm=grad_norm,
        step_seconds=seconds,
        blocked_seconds=blocked_seconds,
        bytes_sent=begun.bytes_sent,
        bytes_received=begun.bytes_received,
        outer_steps=described,
        mean_loss=mean_loss,
        engine=begun.read_logs(),
        peak_memory_bytes=peak_memory_bytes(world.device),
    )


def inner_step(state: TrainState, batch: np.ndarray, world: World, rate: float) -> tuple[float, float]:
    """Train on a batch, int64 (B, T+1), at a learning rate, and wait for it.

    Returns:
        The replica's loss, nats per token, and its gradient norm before clipping.

    Raises:
        TrainingError: if one of them is not finite; no parameter has changed then.
    """
    loss, grad_norm = begin_inner_step(state, batch, world, rate).tolist()
    _check_finite(loss, grad_norm, state.step + 1, state, world)
    return loss, grad_norm


def begin_inner_step(state: TrainState, batch: np.ndarray, world: World, rate: float) -> Tensor:
    """Train on a batch, int64 (B, T+1), at a learning rate; nothing is read on the host.

    Returns:
        Loss and gradient norm, FP64 (2), on the device. If one is not finite, no parameter is changed.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    with state.optimizer.at_gradient_points():
        loss_and_norm = gradients(state, batch, world)
    state.optimizer.step(found_inf=(~loss_and_norm.isfinite().all()).float())
    state.optimizer.zero_grad()
    return loss_and_norm


def _check_finite(loss: float, grad_norm: float, step: int, state: TrainState, world: World) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingError(
            f"step {step}: the loss of replica {world.replica} is {loss:g} and its gradient norm "
            f"{grad_norm:g}: lower optimizer.learning_rate (now {state.inner.learning_rate:g}) and start again, "
            f"or look at metrics-{world.replica}.jsonl in the run's directory",
            "optimizer.learning_rate",
        )


def gradients(state: TrainState, batch: np.ndarray, world: World) -> Tensor:
    """Accumulate and clip the gradients of a batch; returns loss and norm as `begin_inner_step` does."""
    micro_batches = to_device(torch.from_numpy(batch), world.device).split(state.micro_batch)
    losses = []
    for index, window_BxT1 in enumerate(micro_batches):
        with state.passes(index == len(micro_batches) - 1):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=world.autocast):
                logits_BxTxV = state.forward(window_BxT1[:, :-1])
            loss, objective = state.model.loss(logits_BxTxV, window_BxT1[:, 1:], state.inner.z_loss)
            (objective / len(micro_batches)).backward()
        losses.append(loss.detach())
    for parameter in state.frozen(state.step + 1):
        parameter.grad = None
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), state.inner.clip_norm)
    dtype = widest(world.device)
    loss = world.group.reduce(torch.stack(losses).mean().to(dtype)) / world.num_ranks
    return torch.stack([loss, gathered(grad_norm).to(dtype)])
