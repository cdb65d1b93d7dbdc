"""Duration of a run's inner step on every replica, and the speed at which this machine trains."""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError
from diloco.exchange.transport import share
from diloco.measure.link import measure_link
from diloco.measure.timing import shortest_seconds, torch_threads
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import check
from diloco.training.config.resolve import resolve
from diloco.training.state import initial_state
from diloco.training.step import inner_step
from diloco.training.world import World, join, use_autocast


@dataclass(frozen=True)
class Machines:
    """Step time and link of each replica, in replica order."""

    step_seconds: tuple[float, ...]
    """Median duration of an inner step while all replicas compute."""
    link_gbit_s: tuple[float, ...]
    """Payload bits that a replica sends to all others together, while it receives as many."""
    latency_seconds: tuple[float, ...]
    """Duration of an exchange of a few bytes."""


def measurable(config: TrainConfig) -> TrainConfig:
    """A resolved config whose inner step can be timed, without data.

    Raises:
        UserError: if there is only one replica, or settings contradict each other.
    """
    if config.num_replicas < 2:
        raise UserError(
            f"num_replicas={config.num_replicas}, but a link has two ends: take 2 or more", "num_replicas"
        )
    tokenizer = config.data.prepared or config.data.tokenizer
    kind, _, size = str(tokenizer).partition(":")
    vocab_size = int(size) if kind == "bpe" else load_tokenizer(tokenizer).vocab_size
    resolved = resolve(config, vocab_size=vocab_size, prepared=Path())
    check(resolved)
    return resolved


def measure_machines(config: TrainConfig) -> Machines:
    """Time a run's inner step on random tokens, and the links between its replicas; each replica must call it.

    Args:
        config: the result of `measurable`.

    Raises:
        ExchangeError: if another replica is gone.
    """
    with join(config) as world:
        gbit_s, latency_seconds = measure_link(world.exchange, beside=world.everyone)
        gbit_s = world.over_ranks(gbit_s)
        rows = share(world.exchange, [_step_seconds(config, world), gbit_s, latency_seconds], list[float])
    return Machines(*map(tuple, zip(*rows, strict=True)))


def _step_seconds(config: TrainConfig, world: World) -> float:
    state = initial_state(config, world)
    shape = config.process_batch, config.sequence_length + 1
    batch = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    seconds: list[float] = []
    # All must stop alike: the next step may need every process.
    while len(seconds) < 5 or (len(seconds) < 50 and max(share(world.everyone, sum(seconds), float)) < 5):
        start = time.perf_counter()
        inner_step(state, batch, config, world, 0.0)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def flops_per_second(config: TrainConfig, *, num_cores: int) -> float:
    """Floating-point operations a second, at 6·N a token, of `num_cores` processes that train without exchange.

    One process is measured, on one CPU thread; several are assumed not to slow each other down.
    """
    with torch_threads(1):
        model = replace(config.model, vocab_size=config.model.vocab_size or 257).build(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens_BxT1 = torch.zeros(config.process_batch, config.sequence_length + 1, dtype=torch.int64)
        autocast = use_autocast(config, torch.device("cpu"))

        def step() -> None:
            for window_BxT1 in tokens_BxT1.split(config.micro_batch or config.process_batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits_BxTxV = model(window_BxT1[:, :-1])
                model.loss(logits_BxTxV, window_BxT1[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = shortest_seconds(step, torch.device("cpu"))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return num_cores * 6.0 * num_params * tokens_BxT1[:, 1:].numel() / seconds
