"""The trainer's parts as its tests use them: resolved configs, a world on gloo, batches and steps."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import resolve
from diloco.training.loop import BegunStep, begin_step
from diloco.training.optimizer import learning_rate
from diloco.training.state import TrainState
from diloco.training.world import World, world_of


def resolved(config: TrainConfig | None = None, **changes: Any) -> TrainConfig:
    """A config, by default the tiny recipe's, with changes, resolved for a text of bytes."""
    return resolve(replace(config or tiny(), **changes), vocab_size=257, prepared=Path())


def narrow(**changes: Any) -> TrainConfig:
    """The tiny recipe with a model of two blocks in FP32, and with changes."""
    model = DecoderConfig(num_layers=2, num_heads=2, width=32)
    return resolved(**{"model": model, "precision": "fp32"} | changes)


def world_on_cpu(config: TrainConfig, *, is_first_on_machine: bool = False) -> World:
    """The world of a process whose torch has joined the others."""
    return world_of(config, torch.device("cpu"), timedelta(seconds=20), is_first_on_machine=is_first_on_machine)


def tokens_of(config: TrainConfig, size: int, *seed: int) -> np.ndarray:
    """A batch of so many windows; its tokens are sorted, so that there is something to learn."""
    return np.sort(np.random.default_rng(seed).integers(0, 257, (size, config.sequence_length + 1)))


def share_of(config: TrainConfig, world: World, step: int) -> np.ndarray:
    """This process's share of the batch of a step."""
    shares = np.split(tokens_of(config, config.global_batch, step), world.num_replicas * world.num_readers)
    return shares[world.replica * world.num_readers + world.reader]


def rate(config: TrainConfig, step: float) -> float:
    """The learning rate of a run's step."""
    return learning_rate(config.optimizer, step, num_steps=config.num_steps)


def begin(state: TrainState, batch: np.ndarray, config: TrainConfig, world: World) -> BegunStep:
    """Begin the next step of replicas that take the same steps."""
    layers = config.log_layer_cosine
    return begin_step(state, batch, world, rate=rate(config, state.step + 1), log_layer_cosine=layers)
