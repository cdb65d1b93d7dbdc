"""The trainer's parts as its tests use them: a world on gloo, and steps with the values of a config."""

from datetime import timedelta

import numpy as np
import torch

from diloco.training.config.config import TrainConfig
from diloco.training.optimizer import learning_rate
from diloco.training.state import TrainState
from diloco.training.step import BegunStep, begin_step
from diloco.training.world import World, world_of


def world_on_cpu(config: TrainConfig, *, is_first_on_machine: bool = False) -> World:
    """The world of a process whose torch has joined the others."""
    return world_of(config, torch.device("cpu"), timedelta(seconds=20), is_first_on_machine=is_first_on_machine)


def rate(config: TrainConfig, step: float) -> float:
    """The learning rate of a run's step."""
    return learning_rate(config.optimizer, step, num_steps=config.num_steps)


def begin(state: TrainState, batch: np.ndarray, config: TrainConfig, world: World) -> BegunStep:
    """Begin the next step of replicas that take the same steps."""
    layers = config.log_layer_cosine
    return begin_step(state, batch, world, rate=rate(config, state.step + 1), log_layer_cosine=layers)
