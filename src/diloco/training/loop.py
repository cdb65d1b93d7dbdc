"""The training loop of one replica, or of one of its shards."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from diloco.data.sampling import Batches, Sampler
from diloco.data.shards import TokenShards, open_split
from diloco.engine.sharded import gathered
from diloco.errors import ExchangeError, TrainingError, UserError
from diloco.exchange.control import agree, share
from diloco.training.checkpoints import Checkpoints, finished_steps
from diloco.training.config import TrainConfig
from diloco.training.metrics import MetricsLog, StepMetrics, describe
from diloco.training.resolve import shared_facts
from diloco.training.runs import claim_together, data_started_with
from diloco.training.state import TrainState, initial_state
from diloco.training.summary import Outcome, conclude, evaluate, held_out_windows
from diloco.training.world import World, join


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    on_start: Callable[[int], None] | None = None,
    on_step: Callable[[StepMetrics], None] | None = None,
) -> Outcome | None:
    """Train as one process of the world that the environment describes (RANK, WORLD_SIZE, …).

    Args:
        config: resolved, and the same on all replicas.
        resume: go on from the newest step that every replica holds.
        on_start: told of the step that this replica goes on from, 0 for a new run.
        on_step: told of each step on this replica.

    Returns:
        The outcome in the first process, None in the others.

    Raises:
        TrainingError: if the loss is no longer finite.
        UserError: for settings that contradict each other, the data, or the other replicas' settings.
        ExchangeError: if other replicas are gone.
    """
    with ExitStack() as stack:
        world = stack.enter_context(join(config))
        stack.enter_context(_lack_of_memory_explained(config, world))
        corpus, held_out = _open_corpus(config, world)
        if not resume:
            claim_together(config, world)
        batches = open_batches(config, world, corpus)
        state = initial_state(config, world)
        checkpoints = stack.enter_context(_checkpoints(config, world))
        stack.enter_context(_lost_processes_named(state))
        if resume:
            _check_digest(corpus, config)
            _resume(state, checkpoints, config, world)
        log = MetricsLog(config.directory, world.replica, after_step=state.step) if world.shard == 0 else None
        if on_start is not None:
            on_start(state.step)

        started = time.perf_counter()
        for step in range(state.step + 1, config.num_steps + 1):
            metrics = _step(state, batches, config, world, started)
            started = time.perf_counter()
            if config.evaluation.every_steps and step % config.evaluation.every_steps == 0:
                found = evaluate(state, config, world, held_out, together=False)
                total, count = (
                    world.over_shards(value, dist.ReduceOp.SUM)
                    for value in (found.loss * found.num_tokens, found.num_tokens)
                )
                metrics = replace(metrics, eval_loss=total / count)
                started = time.perf_counter()
            if log is not None:
                log.write(metrics)
            if on_step is not None:
                on_step(metrics)
            every = config.checkpoint.every_steps
            if every and (step % every == 0 or step == config.num_steps):
                if log is not None:
                    log.sync()
                state.save(checkpoints)

        checkpoints.wait()
        if log is not None:
            log.close()
        found = evaluate(state, config, world, held_out, together=True)
        return conclude(state, config, world, found) if world.replica == 0 else None


@contextmanager
def _lack_of_memory_explained(config: TrainConfig, world: World) -> Iterator[None]:
    """Say which settings take memory, where torch says how many bytes there are."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch's own class on a GPU; on a CPU it has none, but names its allocator.
        is_it = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
        if not is_it:
            raise
        may_shard = config.method != "data_parallel"
        more_shards = f", or more --shards-per-replica (now {config.num_shards})" if may_shard else ""
        raise TrainingError(
            f"replica {world.replica} has not enough memory on its {world.device.type}: take a smaller "
            f"--micro-batch (now {config.micro_batch}) or --evaluation.batch (now {config.evaluation.batch})"
            f"{more_shards}, and start again, or go on with --resume {config.directory} "
            f"({(str(error) or 'MemoryError').splitlines()[0]})"
        ) from error


@contextmanager
def _lost_processes_named(state: TrainState) -> Iterator[None]:
    """Say so where a collective fails, of Data-Parallel or inside a replica, because another process is gone."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own, but name its source.
        lost = "gloo" in str(error) or isinstance(error, dist.DistError)
        if isinstance(error, ExchangeError) or not lost:
            raise
        reason = str(error).splitlines()[0]
        raise ExchangeError(f"step {state.step + 1}: another process of the run is gone: {reason}") from error


def _checkpoints(config: TrainConfig, world: World) -> Checkpoints:
    assert config.checkpoint.keep is not None and world.own_group is not None, "the run has been joined"
    return Checkpoints(config.checkpoints, world.replica, world.own_group, keep=config.checkpoint.keep)


def _step(state: TrainState, batches: Batches, config: TrainConfig, world: World, started: float) -> StepMetrics:
    """One inner step, and the sends and merges that are due after it; after the last one, all that is in flight.

    `started` is when the step before had ended: what lies between, such as logging, is this step's time.
    """
    step = state.step + 1
    before = (state.sync.blocked_seconds, state.sync.bytes_sent, state.sync.bytes_received)
    rate = learning_rate(config, step)
    loss, grad_norm = inner_step(state, batches.batch(step), config, world, rate)
    outer_steps = state.sync.step()
    if step == config.num_steps:
        outer_steps += state.sync.finish()
    described = tuple(describe(o, log_layer_cosine=config.log_layer_cosine) for o in outer_steps)
    blocked_seconds = world.over_shards(state.sync.blocked_seconds - before[0], dist.ReduceOp.MAX)
    seconds = time.perf_counter() - started
    state.step, state.seconds = step, state.seconds + seconds
    state.blocked_seconds += blocked_seconds
    return StepMetrics(
        step=step,
        tokens=step * config.tokens_per_step,
        loss=loss,
        learning_rate=rate,
        grad_norm=grad_norm,
        step_seconds=seconds,
        blocked_seconds=blocked_seconds,
        bytes_sent=state.sync.bytes_sent - before[1],
        bytes_received=state.sync.bytes_received - before[2],
        outer_steps=described,
    )


def inner_step(
    state: TrainState, batch: np.ndarray, config: TrainConfig, world: World, rate: float
) -> tuple[float, float]:
    """Train on a batch; the replica's loss, nats a token, and its gradient norm before clipping.

    Raises:
        TrainingError: if one of them is not finite; no parameter has changed then.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    loss, grad_norm = gradients(state, batch, config, world)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise TrainingError(_not_finite(config, world, state.step + 1, loss, grad_norm))
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss, grad_norm


def gradients(state: TrainState, batch: np.ndarray, config: TrainConfig, world: World) -> tuple[float, float]:
    """Accumulate and clip the gradients of a batch; loss and norm as of `inner_step`."""
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
    return world.over_shards(loss, dist.ReduceOp.SUM) / world.num_shards, gathered(grad_norm).item()


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
    corpus, held_out = (open_split(config.data.prepared, split) for split in ("train", "held_out"))
    member = "replica" if world.num_shards == 1 else "process"
    read = {"digest of the data": corpus.digest, "tokens of training text": corpus.num_tokens}
    agree(world.everyone, shared_facts(config) | read, member=member)
    held_out_windows(held_out, config)  # too little text is refused now, not after the last step
    return corpus, held_out


def open_batches(config: TrainConfig, world: World, corpus: TokenShards) -> Batches:
    """This replica's share of every batch."""
    num_windows = corpus.num_windows(config.sequence_length)
    return Batches(
        shards=corpus,
        sampler=Sampler(num_windows=num_windows, global_batch=config.global_batch, seed=config.seed),
        sequence_length=config.sequence_length,
        replica=world.replica,
        num_replicas=world.num_replicas,
        rank=world.shard,
        num_ranks=world.num_shards,
    )


def _check_digest(corpus: TokenShards, config: TrainConfig) -> None:
    started_with = data_started_with(config.directory)
    if (corpus.digest, corpus.num_tokens) != started_with:
        raise UserError(
            f"the run was started on data with digest {started_with[0]} and {started_with[1]:,} tokens of "
            f"training text, and {config.data.prepared} has {corpus.digest} and {corpus.num_tokens:,}: name the "
            "directory with the same text by --data.prepared"
        )


def _resume(state: TrainState, checkpoints: Checkpoints, config: TrainConfig, world: World) -> None:
    """Load the newest step that every replica holds; the initial state is one, until all have saved another."""
    held = share(world.everyone, checkpoints.steps())
    for replica in range(world.num_replicas):
        if not set(finished_steps(config.checkpoints, replica)) <= set(held[replica * world.num_shards]):
            raise UserError(
                f"this machine holds checkpoints of replica {replica}, which now runs elsewhere: "
                "start each machine with the --node-rank it had"
            )
    common = set.intersection(*map(set, held))
    newest = max((max(steps, default=0) for steps in held), default=0)
    # Every replica has taken these steps, and should have saved what another has saved at them.
    taken = {step for steps in held for step in steps if step <= newest - config.steps_apart}
    if taken and not common:
        raise UserError(
            f"no step is held by every replica (they hold {', '.join(map(str, held[:: world.num_shards]))}): "
            f"bring the checkpoints that are missing back, or delete {config.checkpoints} to start over"
        )
    step = max(common, default=0)
    if step:
        state.load(checkpoints, step)
    checkpoints.drop_after(step)


def _not_finite(config: TrainConfig, world: World, step: int, loss: float, grad_norm: float) -> str:
    return (
        f"step {step}: the loss of replica {world.replica} is {loss:g} and its gradient norm {grad_norm:g}: "
        f"lower --optimizer.learning-rate (now {config.optimizer.learning_rate:g}) and start again, "
        f"or look at {config.directory / f'metrics-{world.replica}.jsonl'}"
    )
