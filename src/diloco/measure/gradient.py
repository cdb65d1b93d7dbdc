"""Outer gradients to measure codecs on: one from a file, or one from a few steps of training."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.errors import UserError
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.loop import open_batches, open_split
from diloco.training.prepare import prepare_run
from diloco.training.state import initial_state
from diloco.training.step import inner_step, learning_rate
from diloco.training.world import alone


def load_gradient(path: Path) -> Tensor:
    """All tensors of a safetensors file as one flat FP32 vector, in the order of their names.

    Raises:
        UserError: if the file can't be read as safetensors.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no safetensors file with an outer gradient: {error}") from None
    return torch.cat([torch.zeros(0), *(tensors[name].reshape(-1).float() for name in sorted(tensors))])


def demo_gradient(recipe_name: str = "laptop") -> Tensor:
    """The first outer gradient of a recipe: all parameters, flat FP32, after H inner steps of one replica."""
    with TemporaryDirectory() as directory:
        default = recipe(recipe_name)
        data = replace(default.data, cache=Path(directory) / "data")
        settings = replace(default, runs=Path(directory), num_replicas=1, data=data)
        config = resolved(prepare_run(settings))
        world = alone(config)
        assert config.data.prepared is not None, "the config is resolved"
        batches = open_batches(config, world, open_split(config.data.prepared, "train"))
        state = initial_state(config, world)
        start_N = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().clone()
        for step in range(1, config.diloco.sync_every + 1):
            inner_step(state, batches.batch(step), config, world, learning_rate(config, step))
        return start_N - torch.nn.utils.parameters_to_vector(state.model.parameters()).detach()
