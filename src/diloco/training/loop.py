"""The training loop of one process of a replica.

`begin_step` queues a step; `end_step` reads its metrics, while a GPU may run the next one.

Shapes: B sequences, T tokens, V vocabulary.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from diloco.data.sampling import Batches, Sampler, SlotSampler
from diloco.data.shards import TokenShards, open_training_text
from diloco.engine.parameters import gathered
from diloco.engine.streaming import StreamingDiLoCo, begin_logs
from diloco.errors import ExchangeError, FileError, TrainingError
from diloco.exchange.transport import agree, fail_together, share
from diloco.integrations.trackers import tracker
from diloco.outer.step import OuterStep
from diloco.training.config.config import TrainConfig, hyperparameters
from diloco.training.config.joined import check_run_is_there
from diloco.training.config.resolve import resolved, shared_facts, text_facts
from diloco.training.hardware import model_flops_utilization, peak_memory_bytes
from diloco.training.optimizer import learning_rate
from diloco.training.records.checkpoints import Checkpoints, finished_steps
from diloco.training.records.metrics import MetricsLog, StepMetrics, describe, metrics_file
from diloco.training.records.runs import check_text, claim_together, continued, newest_common_step
from diloco.training.records.summary import (
    OUTER_FILE,
    SUMMARY_FILE,
    HeldOut,
    Outcome,
    conclude,
    evaluate,
    open_held_out,
)
from diloco.training.records.tail import ReplicaSteps, ReplicaTail
from diloco.training.state import Synchronizer, TrainState, initial_state
from diloco.training.stopping import Stop, stoppable
from diloco.training.world import World, join
from diloco.wire.kernels.memory import begin_to_host, to_device, widest

if TYPE_CHECKING:
    from diloco.rendezvous.store_rendezvous import StoreRendezvous
    from diloco.training.records.versions import RunPublisher

_LOG = logging.getLogger("diloco")


@contextmanager
def lack_of_memory_explained(config: TrainConfig, world: World) -> Iterator[None]:
    """Name the settings that take memory, where torch names a number of bytes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class for this on a GPU; on a CPU it has none, but names its allocator.
        lacks_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (lacks_memory or "DefaultCPUAllocator" in str(error)):
            raise
        raise TrainingError(
            f"replica {world.replica} has not enough memory on its {world.device.type}: take a smaller "
            f"micro_batch (now {config.micro_batch}) or evaluation.batch (now {config.evaluation.batch}), or more "
            f"shards_per_replica (now {config.shards_per_replica}), and start again, or resume {config.directory} "
            f"({(str(error) or 'MemoryError').splitlines()[0]})",
            *("micro_batch", "evaluation.batch", "shards_per_replica"),
        ) from error


@contextmanager
def lost_processes_named(state: TrainState) -> Iterator[None]:
    """Say that another process is gone where a collective of Data-Parallel, or inside a replica, fails."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own, but name its source.
        is_lost = "gloo" in str(error) or isinstance(error, dist.DistError)
        if isinstance(error, ExchangeError) or not is_lost:
            raise
        reason = str(error).splitlines()[0]
        raise ExchangeError(f"step {state.step + 1}: another process of the run is gone: {reason}") from error


def train(
    asked: TrainConfig,
    *,
    resume: bool = False,
    on_start: Callable[[int, "StoreRendezvous | None"], None] | None = None,
    on_step: Callable[[StepMetrics], None] | None = None,
) -> Outcome | None:
    """Train as one process of the world that the environment describes (RANK, WORLD_SIZE, …).

    Args:
        asked: of a run whose text is prepared, and the same on all replicas.
        resume: go on from the newest step that every replica holds.
        on_start: called with the step that this replica goes on from, 0 for a new run, and the rendezvous that it
            has joined.
        on_step: called with the metrics of each step of this replica.

    Returns:
        The outcome in the first process of each replica, None in the others.

    Raises:
        TrainingError: if the loss is no longer finite, or memory does not suffice.
        UserError: for settings that contradict each other, the data, or the other replicas' settings.
        ExchangeError: if other replicas are gone.
        Stopped: by a signal to one of the processes; where checkpoints are asked for, all save one step first.
    """
    with stoppable() as stop, _set_up(asked, resume=resume, on_step=on_step) as run:
        evaluation, checkpoint = run.config.evaluation.every_steps, run.config.checkpoint.every_steps
        if on_start is not None:
            on_start(run.state.step, run.world.rendezvous)
        if run.state.is_over and run.world.rendezvous is not None:
            # It was saved after its last step, and may have died before the end.
            run.state.synchronizer.finish(close=True)
        run.since = time.perf_counter()
        if checkpoint:
            stop.save_first(run.world, run.state.step)
        else:
            stop.end_at_once("checkpoint.every_steps=0 saves nothing")
        while not run.state.is_over:
            step = run.state.step + 1
            if stop.is_before(step):
                run.stop(stop)
            is_evaluated, is_saved = _is_due(step, evaluation), _is_due(step, checkpoint)
            if is_evaluated or is_saved:
                run.end_steps(0)  # so that each of the two steps has its own time
            run.begin_step(step)
            is_saved = is_saved or bool(checkpoint and run.state.is_over)
            # Read the previous step's metrics while the GPU runs this one, except at a checkpoint or the end.
            is_read_now = is_evaluated or is_saved or run.state.is_over
            run.end_steps(0 if is_read_now else run.steps_ahead, is_evaluated=is_evaluated)
            if is_saved:
                run.save()
        stop.end_at_once(f"the last step is taken{' and saved' * bool(checkpoint)}")
        return run.conclude()


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


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
    synchronizer, step, tokens_before = state.synchronizer, state.step + 1, state.standing.tokens
    # Where replicas come and go, the others have trained while this one had no process.
    is_known = world.rendezvous is None or state.step > state.resumed_step
    blocked_before = synchronizer.blocked_seconds
    sent_before, received_before = synchronizer.bytes_sent, synchronizer.bytes_received
    loss_and_norm = begin_inner_step(state, batch, world, rate)
    read_loss_and_norm = begin_to_host(loss_and_norm)
    outer_steps = [*synchronizer.step(tokens=batch[:, 1:].size * world.num_readers, loss=loss_and_norm[0])]
    sends = synchronizer.bytes_sent > sent_before
    state.took(step)
    if state.is_over:
        outer_steps += synchronizer.finish(close=True)
        state.took(step)  # with what was counted since
    for outer_step in outer_steps:
        outer_step.begin(layer_cosine=log_layer_cosine)
    blocked = torch.tensor(synchronizer.blocked_seconds - blocked_before, dtype=torch.float64, device="cpu")
    if world.num_ranks > 1:
        blocked = world.group.reduce(to_device(blocked, world.device), largest=True)
    return BegunStep(
        step=step,
        tokens=state.standing.tokens,
        new_tokens=state.standing.tokens - tokens_before if is_known else None,
        learning_rate=rate,
        read_loss_and_norm=read_loss_and_norm,
        read_blocked=begin_to_host(blocked),
        bytes_sent=synchronizer.bytes_sent - sent_before,
        bytes_received=synchronizer.bytes_received - received_before,
        sends=sends,
        outer_steps=outer_steps,
        log_layer_cosine=log_layer_cosine,
        read_logs=_begin_logs(synchronizer, outer_steps),
    )


def _begin_logs(synchronizer: Synchronizer, outer_steps: Sequence[OuterStep]) -> Callable[[], dict[str, float]]:
    """The logs after an outer step of fragment 0, and else none."""
    if not any(outer_step.sync.fragment == 0 for outer_step in outer_steps):
        return dict
    return begin_logs(cast(StreamingDiLoCo, synchronizer))  # nothing else takes outer steps


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


@dataclass
class _Run:
    """One process's part in a run."""

    config: TrainConfig
    """The run's, resolved; a step, an evaluation and a checkpoint take sections and values of it."""
    world: World
    batches: Batches
    held_out: HeldOut
    state: TrainState
    checkpoints: Checkpoints
    log: MetricsLog | None
    """The replica's metrics, written by its first process."""
    publisher: "RunPublisher | None"
    """The run's publisher, if its config asks for that."""
    on_step: Callable[[StepMetrics], None] | None
    """Called with the metrics of each step."""
    begun: deque[BegunStep] = field(default_factory=deque)
    """The steps that were begun and have not ended, in their order."""
    since: float = 0.0
    """`time.perf_counter()` when the last step had ended; in a fixed group, with the evaluation after it."""
    saved_step: int = 0
    """The newest step of which there is a checkpoint, or which all replicas know without one: 0."""

    @property
    def steps_ahead(self) -> int:
        """Steps that are begun before the host reads of an earlier one; a CPU has done a step that was begun."""
        return 0 if self.world.device.type == "cpu" else 1

    def begin_step(self, step: int) -> None:
        """Begin a step, at the learning rate of the tokens that all replicas will have read after it."""
        config, state = self.config, self.state
        reached = state.standing.next_tokens / config.tokens_per_step
        rate = learning_rate(state.inner, reached, num_steps=config.num_steps)
        batch, layers = self.batches.batch(step), config.log_layer_cosine
        self.begun.append(begin_step(state, batch, self.world, rate=rate, log_layer_cosine=layers))
        if self.publisher is not None:
            self.publisher.after(step, self.begun[-1].outer_steps)

    def end_steps(self, num_left: int, *, is_evaluated: bool = False) -> None:
        """Read and write down the steps that were begun, but for the last ones, and evaluate after the last."""
        while len(self.begun) > num_left:
            metrics = end_step(self.begun.popleft(), self.state, self.world, since=self.since)
            self.since = time.perf_counter()
            flops, device = self.config.step_flops, self.world.device
            utilization = model_flops_utilization(flops, device, metrics.step_seconds)
            metrics = replace(metrics, model_flops_utilization=utilization)
            if is_evaluated and not self.begun:
                metrics = replace(metrics, eval_loss=self.held_out_loss())
                if self.world.rendezvous is None:  # else the others go on meanwhile, and the next step counts both
                    self.since = time.perf_counter()
            if self.log is not None:
                self.log.write(metrics)
            if self.on_step is not None:
                self.on_step(metrics)

    def held_out_loss(self) -> float:
        """Mean loss of the outer parameters on this replica's share of the held-out text, nats per token."""
        measured = evaluate(self.state, self.world, self.held_out, together=False)
        total, count = (
            self.world.over_ranks(value) for value in (measured.loss * measured.num_tokens, measured.num_tokens)
        )
        return total / count

    def save(self, *, drops_old: bool = True) -> None:
        """Start to write a checkpoint; the metrics up to it are on disk before."""
        if self.log is not None:
            self.log.sync()
        self.state.save(self.checkpoints, drops_old=drops_old)
        self.saved_step = self.state.step

    def stop(self, stop: Stop) -> NoReturn:
        """Save the step that every process has taken last, and end.

        Raises:
            Stopped: once each process has saved it.
        """
        self.end_steps(0)
        step, is_alone = self.state.step, self.world.num_replicas == 1
        if step != self.saved_step:
            self.save(drops_old=False)  # if another replica can't save the step, all still share an earlier one
        self.checkpoints.wait()
        if self.log is not None:
            self.log.close()
        stop.wait_until_saved(step, seconds=self.config.timeout_seconds)
        saved = f"step {step} is saved" if is_alone else f"every replica has saved step {step}"
        raise stop.stopped(saved if step else "there is no step to save yet")

    def conclude(self) -> Outcome | None:
        """Wait for the last checkpoint, leave the run, evaluate, and sum up in the first process."""
        self.checkpoints.wait()
        if self.world.rendezvous is not None:
            self.world.rendezvous.leave()
        publish_last = None if self.publisher is None else self.publisher.finish()
        loss = evaluate(self.state, self.world, self.held_out, together=True)
        outcome = conclude(self.state, self.config, self.world, loss, self._means())
        if self.log is not None:
            self.log.close()  # when nobody waits for this process: a tracker may wait for its server
        if outcome is not None and outcome.summary.get("closed") is False:
            raise ExchangeError(
                f"the run was not closed within {self.config.timeout_seconds:g} s: {SUMMARY_FILE} and "
                f"{OUTER_FILE} in {self.config.directory} are those after entry {outcome.summary['entry']} of the "
                f"log, which may not be its last: see with diloco store status {self.config.rendezvous}"
            )
        if publish_last is not None:
            publish_last()
        return outcome

    def _means(self) -> dict[str, float]:
        """Training loss and compute utilization, the means over the replicas, by their metrics of all steps.

        Where replicas come and go, also the tokens per second of all of them, while this one trained.
        """
        steps = self._own_steps()
        own = [] if steps is None else [steps.loss, steps.compute_utilization]
        of_replicas = [values for values in share(self.world.everyone, own, list[float]) if values]
        means = map(fmean, zip(*of_replicas, strict=True))
        results: dict[str, float] = dict(zip(("training_loss", "compute_utilization"), means, strict=False))
        if self.world.rendezvous is not None and steps is not None and steps.tokens_per_second is not None:
            results["tokens_per_second"] = steps.tokens_per_second
        return results

    def _own_steps(self) -> ReplicaSteps | None:
        """The replica's metrics of all steps, in its first process; None if their file is damaged."""
        if self.log is None:
            return None
        try:
            steps = ReplicaTail(metrics_file(self.config.directory, self.world.replica)).read()
        except FileError as error:
            _LOG.warning("%s; the run is finished, and %s leaves out this replica's metrics", error, SUMMARY_FILE)
            return None
        return steps if steps.last else None


@contextmanager
def _set_up(asked: TrainConfig, *, resume: bool, on_step: Callable[[StepMetrics], None] | None) -> Iterator[_Run]:
    """Join the other processes, open the text, and make the state or take it up again."""
    config = resolved(asked)
    if resume and config.rendezvous is not None and finished_steps(config.checkpoints, 0):
        check_run_is_there(config)
    with ExitStack() as stack:
        world = stack.enter_context(join(config))
        stack.enter_context(fail_together(world.exchange))
        stack.enter_context(lack_of_memory_explained(config, world))
        corpus, held_out = _open_corpus(config, world)
        state = initial_state(config, world)
        if not resume:
            claim_together(asked, world)
        assert config.checkpoint.keep is not None, "the config is resolved"
        checkpoints = stack.enter_context(
            Checkpoints(config.checkpoints, world.replica, world.host_group, keep=config.checkpoint.keep)
        )
        stack.enter_context(lost_processes_named(state))
        if resume:
            check_text(config.directory, config.data, field="data.prepared")
            held, apart = checkpoints.steps(), config.steps_apart
            if step := newest_common_step(config.checkpoints, world, held, steps_apart=apart):
                state.load(checkpoints, step)
            checkpoints.drop_after(step)
            config = continued(asked, world, step)
            state.inner = config.optimizer  # of a phase that may begin here
        log = None
        if world.rank == 0:
            log = _open_log(config, world, state)
            _serve_metrics(config, state, world.replica, stack)
        batches = open_batches(config, world, corpus, after_step=state.step)
        publisher = _publisher(config, world, state, stack)
        yield _Run(
            config, world, batches, held_out, state, checkpoints, log, publisher, on_step, saved_step=state.step
        )


def _publisher(config: TrainConfig, world: World, state: TrainState, stack: ExitStack) -> "RunPublisher | None":
    """The run's publisher until the run ends, if its config asks for one."""
    if config.publish is None:
        return None
    from diloco.training.records.versions import RunPublisher  # it imports the store's library

    publisher = RunPublisher(config, world, state)
    stack.callback(publisher.close)
    return publisher


def _open_log(config: TrainConfig, world: World, state: TrainState) -> MetricsLog:
    """The file of a replica's metrics, and its trackers."""
    run, hparams, directory = config.name, hyperparameters(config), config.directory
    replica, after_step = world.replica, state.step
    trackers = [
        tracker(name, run=run, replica=replica, hparams=hparams, directory=directory, after_step=after_step)
        for name in config.trackers
    ]
    return MetricsLog(directory, replica, after_step=after_step, trackers=trackers)


def _serve_metrics(config: TrainConfig, state: TrainState, replica: int, stack: ExitStack) -> None:
    """Serve the counters of a replica to Prometheus until the run ends, if its config asks for that."""
    if config.prometheus_port is None:
        return
    from diloco.integrations.prometheus import MetricsServer

    index_on_machine = int(os.environ.get("LOCAL_RANK", "0")) // config.processes_per_replica
    server = MetricsServer(state.synchronizer, config.prometheus_port + index_on_machine, replica=replica)
    stack.callback(server.close)


def _open_corpus(config: TrainConfig, world: World) -> tuple[TokenShards, HeldOut]:
    """Both splits, once all replicas are known to read the same text with the same settings."""
    corpus = open_training_text(config.data)
    member = "replica" if world.num_ranks == 1 else "process"
    agree(world.everyone, shared_facts(config) | text_facts(config.data).shared, member=member)
    return corpus, open_held_out(config)


def open_batches(config: TrainConfig, world: World, corpus: TokenShards, *, after_step: int = 0) -> Batches:
    """This process's share of every batch; with a rendezvous, those of its slot after a step."""
    num_windows, seed = corpus.num_windows(config.sequence_length), config.seed
    ranks = {"rank": world.reader, "num_ranks": world.num_readers}
    if (rendezvous := world.rendezvous) is not None:
        has_joined = world.group.index == 0
        slot, start = world.group.broadcast_numbers((rendezvous.slot, rendezvous.start) if has_joined else (0, 0))
        windows = partial(
            SlotSampler(num_windows=num_windows, seed=seed).of_step,
            slot=slot,
            first=start // config.sequence_length,
            size=config.process_batch * world.num_readers,
            after_step=after_step,
            **ranks,
        )
    else:
        sampler = Sampler(num_windows=num_windows, global_batch=config.global_batch, seed=seed)
        windows = partial(sampler.windows, replica=world.replica, num_replicas=world.num_replicas, **ranks)
    return Batches(shards=corpus, sequence_length=config.sequence_length, windows=windows)
