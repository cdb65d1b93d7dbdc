"""A run of the trainer as it lies in a store: its config from entry 0, its initial parameters, and Θ."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.errors import FileError, UserError, setting
from diloco.models.language_model import LanguageModel
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import INITIAL, replayed
from diloco.training.config.config import TrainConfig
from diloco.training.config.joined import check_text, config_of, facts_of, known
from diloco.training.config.resolve import DATA_DIGEST, check_model, check_sizes, text_facts
from diloco.training.records.runs import newest_runs, read_asked


def store_config(url: str, prepared: Path | None) -> TrainConfig:
    """The config of a run in a store, with the place of its data; its name is the last part of the URL.

    Args:
        url: of the store.
        prepared: directory of the run's data on this machine.

    Raises:
        UserError: if there is no run, or it is not the trainer's, or the data is not the run's.
        FileError: if its entry 0 is damaged.
        StoreError: if the store can't be read.
    """
    facts = facts_of(url)
    config = known(url, config_of(facts))
    if prepared is None:
        raise UserError(f"{url} does not hold the run's text: {_place_of_text(facts)}", "prepared")
    with setting("prepared", prepared):
        check_text(facts, prepared)
    name = url.rstrip("/").rpartition("/")[2]
    return replace(config, name=name, data=replace(config.data, prepared=prepared))


def _place_of_text(facts: Mapping[str, Any]) -> str:
    """The sentence that says where the run's text is, by the runs of this directory."""
    for directory in newest_runs(TrainConfig.runs):
        with suppress(UserError):  # damaged, or its text was moved
            data = read_asked(directory).data
            if data.prepared is not None and text_facts(data).digest == facts.get(DATA_DIGEST):
                return f"{directory} has read it: set prepared={data.prepared}"
    return (
        "set prepared to its directory here, which diloco train names after 'data' as a replica begins, with the "
        f"digest {facts.get(DATA_DIGEST)!s:.16}"
    )


def store_parameters(url: str) -> tuple[LanguageModel, int]:
    """The model with Θ from the newest snapshots and what came after them, on the CPU, and its step.

    The step is that of a fixed group which has read as many tokens.

    Raises:
        FileError: if the log, or what it counts, was damaged or changed.
        UserError: if Θ can't be made.
        StoreError: if the store can't be read.
    """
    replay = replayed(url, initial=initial_parameters, from_snapshot=True)
    config = known(url, config_of(replay.facts))
    check_sizes(config, here=True)
    model = config.model.build(seed=config.seed)
    parameters, own = replay.parameters(), model.state_dict()
    for name, value in parameters.items():
        if name not in own or own[name].shape != value.shape:
            raise FileError(f"{url}: entry 0 of the log describes {name:.80}, which its model does not have so")
    model.load_state_dict(own | parameters)
    tokens = replay.state.tokens // len(replay.state.fragments)
    return model, min(config.num_steps, tokens // config.tokens_per_step)


def initial_parameters(facts: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The parameters with which a trainer's run began; None if this machine does not make the same.

    Raises:
        FileError: if the facts are no config.
        UserError: if this machine's memory can't hold the parameters.
    """
    config = config_of(facts)
    if config is None:
        return None
    check_model(config.model, here=True)
    model = config.model.initial(seed=config.seed)
    for dtype in (torch.float32, torch.bfloat16):  # the latter by precision=bf16-params, which no fact names
        parameters = {n: p.detach().to(dtype).float() for n, p in model.named_parameters() if p.requires_grad}
        if parameters_hash(parameters) == facts.get(INITIAL):
            return parameters
    return None
