"""The training loop of one replica."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from diloco.data.sampling import Batches, Sampler
from diloco.data.shards import TokenShards, open_split
from diloco.data.tokenizers import load_tokenizer
from diloco.evaluation.held_out import HeldOutLoss, held_out_loss, sequence_losses
from diloco.exchange import agree, share
from diloco.models.decoder import generate, next_token_loss
from diloco.training.checkpoints import Checkpoints
from diloco.training.config import TrainConfig, to_json
from diloco.training.data_parallel import DataParallel, ring_all_reduce_bytes
from diloco.training.metrics import MetricsLog, StepMetrics, describe
from diloco.training.run_directory import data_digest, write_atomically
from diloco.training.state import TrainState, initial_state, outer_forward
from diloco.training.world import World, join

OnStep = Callable[[StepMetrics], None]


class TrainingError(ValueError):
    """Training can't go on; the message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    summary: dict[str, Any]
    """As in `summary.json`."""
    sample: str
    """Text that the outer parameters wrote."""


def train(config: TrainConfig, *, resume: bool = False, on_step: OnStep | None = None) -> Outcome | None:
    """Train one replica in the world that the environment describes (RANK, WORLD_SIZE, …).

    Args:
        config: resolved, and the same on all replicas; its directory exists.
        resume: go on from the newest step that every replica holds.
        on_step: told of each step on this replica.

    Returns:
        The outcome on replica 0, None on the others.

    Raises:
        TrainingError: if the loss is no longer finite.
        ValueError: for settings that contradict each other, the data, or the other replicas' settings.
        ExchangeError: if other replicas are gone.
    """
    with join(config) as world:
        corpus, held_out = _open_corpus(config, world)
        batches = _batches(config, world, corpus)
        state = initial_state(config, world)
        checkpoints = Checkpoints(
            config.directory / "checkpoints" / f"replica-{world.replica}", keep=config.checkpoint.keep
        )
        if resume and (step := _newest_common_step(checkpoints, world)):
            state.load_state_dict(checkpoints.load(step))
        log = MetricsLog(config.directory, world.replica, after_step=state.step)

        for step in range(state.step + 1, config.num_steps + 1):
            metrics = _step(state, batches.batch(step), config, world, step)
            if config.evaluation.every_steps and step % config.evaluation.every_steps == 0:
                found = _evaluate(state, config, world, held_out, together=False)
                metrics = replace(metrics, eval_loss=found.loss)
            log.write(metrics)
            if on_step is not None:
                on_step(metrics)
            if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
                checkpoints.save(step, state.state_dict())

        start = time.perf_counter()
        state.sync.finish()
        state.seconds += time.perf_counter() - start
        checkpoints.wait()
        log.close()
        found = _evaluate(state, config, world, held_out, together=True)
        return _conclude(state, config, found) if world.replica == 0 else None


def _step(state: TrainState, batch: np.ndarray, config: TrainConfig, world: World, step: int) -> StepMetrics:
    """One inner step, and the sends and merges that are due after it."""
    start = time.perf_counter()
    before = (state.sync.blocked_seconds, state.sync.bytes_sent, state.sync.bytes_received)
    rate = learning_rate(config, step)
    loss, grad_norm = _inner_step(state, batch, config, world, rate)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingError(_not_finite(config, world, step, loss, grad_norm))
    state.optimizer.step()
    state.optimizer.zero_grad()
    outer_steps = state.sync.step()
    state.step = step
    seconds = time.perf_counter() - start
    state.seconds += seconds
    return StepMetrics(
        step=step,
        tokens=step * config.tokens_per_step,
        loss=loss,
        learning_rate=rate,
        grad_norm=grad_norm,
        step_seconds=seconds,
        blocked_seconds=state.sync.blocked_seconds - before[0],
        bytes_sent=state.sync.bytes_sent - before[1],
        bytes_received=state.sync.bytes_received - before[2],
        outer_steps=tuple(describe(o, log_layer_cosine=config.log_layer_cosine) for o in outer_steps),
    )


def _inner_step(
    state: TrainState, batch: np.ndarray, config: TrainConfig, world: World, rate: float
) -> tuple[float, float]:
    """Accumulate the gradients of a batch; the loss in nats a token, and the gradient norm before clipping."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    assert config.micro_batch is not None, "the config is resolved"
    micro_batches = torch.from_numpy(batch).to(world.device).split(config.micro_batch)
    losses = []
    for index, window_BxT1 in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with state.sync.passes(is_last=is_last) if isinstance(state.sync, DataParallel) else nullcontext():
            with torch.autocast(world.device.type, torch.bfloat16, enabled=world.autocast):
                logits_BxTxV = state.forward(window_BxT1[:, :-1])
            loss, objective = next_token_loss(logits_BxTxV, window_BxT1[:, 1:], config.optimizer.z_loss)
            (objective / len(micro_batches)).backward()
        losses.append(loss.detach())
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.optimizer.clip_norm)
    return torch.stack(losses).mean().item(), grad_norm.item()


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine to `final_fraction` of it at the last step."""
    inner, num_steps = config.optimizer, config.num_steps
    assert inner.warmup_steps is not None, "the config is resolved"
    if step <= inner.warmup_steps:
        return inner.learning_rate * step / inner.warmup_steps
    progress = (step - inner.warmup_steps) / (num_steps - inner.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)


def _open_corpus(config: TrainConfig, world: World) -> tuple[TokenShards, TokenShards]:
    """Both splits, once every replica has been found to read the same text with the same settings."""
    assert config.data.prepared is not None, "the config is resolved"
    corpus = open_split(config.data.prepared, "train")
    if corpus.digest != (started_with := data_digest(config.directory)):
        raise ValueError(
            f"the run was started on data with digest {started_with}, and {config.data.prepared} has "
            f"{corpus.digest}: name the directory with the same text by --data.prepared"
        )
    facts = {name: value for name, value in to_json(config).items() if name not in _OWN_TO_A_REPLICA}
    agree(world.exchange, facts | {"digest of the data": corpus.digest}, round=1)
    held_out = open_split(config.data.prepared, "held_out")
    _windows(held_out, config)  # too little text is refused now, not after the last step
    return corpus, held_out


_OWN_TO_A_REPLICA = {"runs", "device", "data", "precision", "compile", "timeout_seconds"}


def _batches(config: TrainConfig, world: World, corpus: TokenShards) -> Batches:
    num_windows = corpus.num_windows(config.sequence_length)
    return Batches(
        shards=corpus,
        sampler=Sampler(num_windows=num_windows, global_batch=config.global_batch, seed=config.seed),
        seq_len=config.sequence_length,
        replica=world.replica,
        num_replicas=world.num_replicas,
    )


def _newest_common_step(checkpoints: Checkpoints, world: World) -> int:
    """The step to resume from; 0, the initial state, where no replica had saved anything yet."""
    held = share(world.exchange, checkpoints.steps())
    common = set.intersection(*map(set, held))
    if not common and any(held):
        raise ValueError(
            f"no step is held by every replica (they hold {', '.join(map(str, held))}): "
            "bring the checkpoints that are missing back, or start a new run"
        )
    return max(common, default=0)


def _not_finite(config: TrainConfig, world: World, step: int, loss: float, grad_norm: float) -> str:
    return (
        f"step {step}: the loss of replica {world.replica} is {loss:g} and its gradient norm {grad_norm:g}: "
        f"lower --optimizer.learning-rate (now {config.optimizer.learning_rate:g}) and start again, "
        f"or look at {config.directory / f'metrics-{world.replica}.jsonl'}"
    )


def _evaluate(
    state: TrainState, config: TrainConfig, world: World, held_out: TokenShards, *, together: bool
) -> HeldOutLoss:
    """Held-out loss of the outer parameters on this replica's share of the text, or together on all of it."""
    windows = _windows(held_out, config)[world.replica :: world.num_replicas]
    losses = sequence_losses(outer_forward(state), _batches_of(held_out, windows, config), world.device)
    if together:
        losses = [loss for share_of_one in share(world.exchange, losses, round=2) for loss in share_of_one]
    return held_out_loss(
        losses,
        sequence_length=config.sequence_length,
        bytes_per_token=held_out.num_bytes / held_out.num_tokens,
    )


def _windows(held_out: TokenShards, config: TrainConfig) -> list[int]:
    """The windows to evaluate on, spread evenly over the held-out text; at least one a replica."""
    available = held_out.num_windows(config.sequence_length)
    if available < config.num_replicas:
        raise ValueError(
            f"the held-out text has {available} sequences of {config.sequence_length} tokens, fewer than the "
            f"{config.num_replicas} replicas: hold out more, or choose shorter sequences"
        )
    wanted = min(available, max(config.num_replicas, config.evaluation.num_tokens // config.sequence_length))
    return [k * available // wanted for k in range(wanted)]


def _batches_of(held_out: TokenShards, windows: list[int], config: TrainConfig) -> Iterator[np.ndarray]:
    size = config.evaluation.batch
    for start in range(0, len(windows), size):
        yield np.stack([held_out.window(w, config.sequence_length) for w in windows[start : start + size]])


def _conclude(state: TrainState, config: TrainConfig, found: HeldOutLoss) -> Outcome:
    """Export and sum up; the other replicas are done."""
    outer = {name: value.contiguous().cpu() for name, value in state.sync.outer_parameters().items()}
    unfinished = config.directory / "outer.tmp"
    save_file(outer, unfinished, metadata={"model": json.dumps(to_json(config.model))})
    unfinished.replace(config.directory / "outer.safetensors")
    num_params = sum(parameter.numel() for parameter in state.model.parameters())
    summary = {
        "method": config.method,
        "num_replicas": config.num_replicas,
        "num_params": num_params,
        "num_tokens": config.num_tokens,
        "num_steps": config.num_steps,
        "eval_loss": found.loss,
        "eval_standard_error": found.standard_error,
        "eval_bits_per_byte": found.bits_per_byte,
        "eval_tokens": found.num_tokens,
        "wall_seconds": state.seconds,
        "compute_utilization": 1 - state.sync.blocked_seconds / state.seconds,
        "bytes_sent_per_replica": state.sync.bytes_sent,
        "data_parallel_bytes_per_replica": ring_all_reduce_bytes(num_params, config.num_replicas)
        * config.num_steps,
        "outer_hash": state.sync.outer_hash(),
    }
    write_atomically(config.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return Outcome(summary, _sample(state, outer, config))


def _sample(state: TrainState, outer: dict[str, Tensor], config: TrainConfig, num_tokens: int = 200) -> str:
    assert config.data.prepared is not None, "the config is resolved"
    tokenizer = load_tokenizer(config.data.prepared)
    state.model.load_state_dict(outer)
    written = generate(
        state.model, [tokenizer.bos_id], num_tokens, seed=config.seed, context=config.sequence_length
    )
    return tokenizer.decode(written)
