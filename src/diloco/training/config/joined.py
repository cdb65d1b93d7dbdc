"""The config of a store's run, from the facts of entry 0, which others wrote: checked as a file is. No torch."""

import asyncio
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.data.shards import read_index
from diloco.errors import FileError, UserError
from diloco.training.config.config import TrainConfig, from_json, is_within
from diloco.training.config.resolve import DATA_DIGEST, TOKENIZER_DIGEST, names_with_rendezvous

if TYPE_CHECKING:
    from diloco.rendezvous.log.entries import Create

_FIELDS = {field.name for field in fields(TrainConfig)}


def create_of(url: str) -> "Create":
    """A store's entry 0.

    Raises:
        UserError: if it holds no run.
        FileError: if the entry is damaged.
        StoreError: if the store can't be read.
    """
    from diloco.rendezvous.log.log import first_entry, open_run  # with its library, which no fixed group needs

    return asyncio.run(first_entry(open_run(url)))[0]


def check_run_is_there(config: TrainConfig) -> None:
    """Refuse a store without a run to a replica that comes back to one: it would create another, and go on alone.

    Raises:
        UserError: saying what to do.
        StoreError: if the store can't be read.
    """
    from diloco.rendezvous.log.log import open_run, stored_entry

    assert config.rendezvous is not None, "there is a store"
    reason, patience = f"{config.rendezvous} holds no run any more", config.timeout_seconds
    try:
        if asyncio.run(stored_entry(open_run(config.rendezvous), 0, patience_seconds=patience)) is not None:
            return
    except UserError as error:
        reason = str(error)
    raise UserError(
        f"{reason}, and {config.directory} has steps of a run there: bring the store back, or mount it; to begin "
        "another run, choose another name",
        *("name", "rendezvous"),
    )


def facts_of(url: str) -> Mapping[str, Any]:
    """The facts of a store's entry 0; errors as those of `create_of`."""
    return create_of(url).facts


def check_text(facts: Mapping[str, Any], prepared: Path) -> None:
    """Refuse a text that is not the run's.

    Raises:
        UserError: with both digests.
    """
    index, name = read_index(prepared), DATA_DIGEST
    own, kind = index.digest, "text"
    if name not in facts:  # the regions of an outer run have a text each, and one tokenizer
        name, own, kind = TOKENIZER_DIGEST, index.tokenizer_digest, "tokenizer"
    if (digest := str(facts.get(name))) != own:
        raise UserError(f"{prepared} holds another {kind} than the run's, digest {own:.16} and not {digest:.16}")


def config_of(facts: Mapping[str, Any]) -> TrainConfig | None:
    """The trainer's config that the facts of entry 0 hold by dotted names; None for the run of another program.

    Raises:
        FileError: if it is not a config.
    """
    values: dict[str, Any] = {}
    for dotted, value in facts.items():
        *sections, name = dotted.split(".")
        if (sections or [name])[0] in _FIELDS:
            if isinstance(value, dict):
                raise FileError(f"entry 0 of the log can't be read: {dotted:.80} is a section, and no value")
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


def known(url: str, config: TrainConfig | None) -> TrainConfig:
    """The config of a store's run.

    Raises:
        UserError: if it is None: the run is another program's.
    """
    if config is None:
        raise UserError(
            f"{url}: the run is a program's own, and does not describe its model: replay it in that program with "
            "diloco.rendezvous.replay.replayed(url, initial=…)",
            "run",
        )
    return config


def joined_config(url: str, *, names_model: bool) -> TrainConfig:
    """The config with which a replica joins a store's run; what is each replica's own has its default value.

    Nothing that the log says names a file of this machine, or one to download.

    Args:
        url: of the store.
        names_model: True if this replica names its model of transformers itself.

    Raises:
        UserError: if the URL is no store's, there is no run, it is another program's, or its model is to be named.
        FileError: if its entry 0 is damaged.
        StoreError: if the store can't be read.
    """
    from diloco.rendezvous.store import refuse_host

    refuse_host(url)
    try:
        facts = facts_of(url)
    except UserError as error:
        raise UserError(
            f"rendezvous={url}: {error}; to create a run there, name a recipe before the flags", "rendezvous"
        ) from None
    shared = {name: value for name, value in facts.items() if not is_within(name, names_with_rendezvous())}
    config = known(url, config_of(shared))
    if config.model.replayed_fields and not names_model:
        raise UserError(
            f"the run in rendezvous={url} trains a model of transformers: name the same by model.hf",
            *("model.hf", "rendezvous"),
        )
    share, rest = divmod(config.global_batch, config.num_replicas)
    return replace(config, rendezvous=url, replica_batch=max(share, 1) if rest else None)
