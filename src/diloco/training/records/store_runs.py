"""A run of the trainer as it lies in a store: its config from entry 0, its initial parameters, and Θ."""

import asyncio
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.errors import FileError, UserError
from diloco.models.language_model import LanguageModel
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.log.log import first_entry, open_run
from diloco.rendezvous.replay import INITIAL, replayed
from diloco.training.config.config import TrainConfig, from_json
from diloco.training.config.resolve import DATA_DIGEST, check_model, check_sizes, text_facts

_FIELDS = {field.name for field in fields(TrainConfig)}


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
    facts = asyncio.run(first_entry(open_run(url)))[0].facts
    config = _known(url, config_of(facts))
    if prepared is None:
        raise UserError(f"{url} does not hold the run's text: set prepared to its directory here", "prepared")
    digest, own = facts.get(DATA_DIGEST), text_facts(prepared).digest
    if digest != own:
        raise UserError(
            f"prepared={prepared} holds another text than the run's, {own:.16} and not {digest}", "prepared"
        )
    name = url.rstrip("/").rpartition("/")[2]
    return replace(config, name=name, data=replace(config.data, prepared=prepared))


def store_parameters(url: str) -> tuple[LanguageModel, int]:
    """The model with Θ from the newest snapshots and what came after them, on the CPU, and its step.

    The step is that of a fixed group which has read as many tokens.

    Raises:
        FileError: if the log, or what it counts, was damaged or changed.
        UserError: if Θ can't be made.
        StoreError: if the store can't be read.
    """
    replay = replayed(url, initial=initial_parameters, from_snapshot=True)
    config = _known(url, config_of(replay.facts))
    check_sizes(config, here=True)
    model = config.model.build(seed=config.seed)
    parameters, own = replay.parameters(), model.state_dict()
    for name, value in parameters.items():
        if name not in own or own[name].shape != value.shape:
            raise FileError(f"{url}: entry 0 of the log describes {name:.80}, which its model does not have so")
    model.load_state_dict(own | parameters)
    tokens = replay.state.tokens // len(replay.state.fragments)
    return model, min(config.num_steps, tokens // config.tokens_per_step)


def _known(url: str, config: TrainConfig | None) -> TrainConfig:
    if config is None:
        raise UserError(
            f"{url}: the run is a program's own, and does not describe its model: replay it in that program with "
            "diloco.rendezvous.replay.replayed(url, initial=…)",
            "run",
        )
    return config


def config_of(facts: Mapping[str, Any]) -> TrainConfig | None:
    """The trainer's config that the facts of entry 0 hold by dotted names; None for the run of another program.

    Raises:
        FileError: if it is not a config.
    """
    values: dict[str, Any] = {}
    for dotted, value in facts.items():
        *sections, name = dotted.split(".")
        if (sections or [name])[0] in _FIELDS:
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
                if not isinstance(inner, dict):
                    raise FileError(f"entry 0 of the log can't be read: {dotted:.80} is a field of what has none")
            inner[name] = value
    if "model" not in values:
        return None
    # Each replica has a batch of its own, which the log does not know: any share of the run's is sound.
    own = {"rendezvous": "the store", "replica_batch": 1}
    config = from_json(TrainConfig, own | values, source="entry 0 of the log")
    if not config.model.vocab_size:
        raise FileError("entry 0 of the log can't be read: its model has no vocab_size")
    return config


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
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return parameters if parameters_hash(parameters) == facts.get(INITIAL) else None
