"""From the settings asked for to a run that can start: one call, before any replica exists."""

import os
import secrets
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from diloco.data.config import DataConfig
from diloco.data.prepare import ProgressCallback
from diloco.data.prepare import resolve as resolve_data
from diloco.data.shards import open_training_text, read_index
from diloco.data.tokenizers import ByteTokenizer
from diloco.errors import UserError, setting
from diloco.files import expanded, require
from diloco.integrations.trackers import check_installed
from diloco.schedule import Schedule
from diloco.schema import checked_name
from diloco.training.config.config import TrainConfig, differences
from diloco.training.config.engine_settings import check_sends, checked_settings
from diloco.training.config.recipes import PAPER_RECIPES, recipe_of
from diloco.training.config.resolve import (
    TRAIN_TOKENS,
    Budget,
    check_model,
    resolve,
    resolved,
    text_facts,
    with_budget,
    with_method_values,
)
from diloco.training.hardware import check_there
from diloco.training.processes import under_a_launcher
from diloco.training.records.runs import check_text, check_unclaimed, resume_config
from diloco.training.records.summary import open_held_out
from diloco.training.world import name_for_all


def prepare_run(
    asked: TrainConfig,
    *,
    resume: Path | None = None,
    own: Path | None = None,
    budget: Budget | None = None,
    progress: ProgressCallback | None = None,
) -> TrainConfig:
    """The config of a run, as asked, whose data is prepared and whose settings were checked.

    Args:
        asked: a recipe's config with the user's changes; to resume, the config of `resumable` with them.
        resume: directory of the run to resume.
        own: directory of the store's replica that `asked` continues, as `own_run` gives it.
        budget: the amount of training in the place of `asked.num_tokens`, rounded to whole steps.
        progress: called with the state of the data's preparation.

    Raises:
        UserError: for anything that would stop the run later.
    """
    _check_libraries(asked)
    if resume is not None:
        _check_device(asked)
        if asked.data.prepared is not None:
            asked = replace(asked, data=replace(asked.data, prepared=expanded(asked.data.prepared).absolute()))
        if budget is not None:
            check_text(resume, asked.data, field="data.prepared")
            asked = _with_budget(asked, budget)
        asked = resume_config(resume, asked)
        _check_place_of_versions(asked, is_resume=True)
        return asked
    refuse_what_means_nothing(asked)
    _check_device(asked)
    for name in ("rendezvous", "publish"):
        if (url := getattr(asked, name)) is not None:
            from diloco.rendezvous.store import Store  # with its library, which no fixed group needs

            with setting(name, url):
                Store.open(url)
    if not asked.name:
        name = _name(asked)
        asked = replace(asked, name=name_for_all(name, asked) if under_a_launcher() else name)
    asked = replace(asked, name=checked_name(asked.name))
    if own is None and not under_a_launcher():
        check_unclaimed(asked)
    _check_place_of_versions(asked, is_resume=False)
    schedule = _checked_before_the_text(asked, budget)
    directory = resolve_data(asked.data, progress=progress)
    if asked.rendezvous is not None and not asked.recipe:
        _check_joined_text(asked.rendezvous, replace(asked.data, prepared=directory))
    asked = _with_budget(replace(asked, data=replace(asked.data, prepared=directory)), budget)
    config = resolved(asked)
    if schedule is not None:
        check_sends(schedule, config.num_steps)
    epoch_tokens(config)
    open_held_out(config)  # too little text is refused now, not after the last step
    return asked if own is None else resume_config(own, asked)


def _check_place_of_versions(asked: TrainConfig, *, is_resume: bool) -> None:
    """Refuse to publish behind another run's versions; replicas of a store know a run by its log."""
    if asked.publish is None or asked.rendezvous is not None or os.environ.get("RANK", "0") != "0":
        return
    from diloco.publishing.publisher import Publisher  # with its library, which no other run needs

    with (
        setting("publish", asked.publish),
        Publisher(asked.publish, timeout_seconds=asked.timeout_seconds) as publisher,
    ):
        newest = publisher.newest()
    if newest is not None and not (is_resume and newest.facts.get("run") == asked.name):
        raise UserError(
            f"publish={asked.publish} has version {newest.number} already, of step {newest.step} of "
            f"{newest.facts.get('run', 'other weights')}: set a place of its own"
            f"{'' if is_resume else ', or resume that run'}",
            "publish",
        )


def config_without_text(asked: TrainConfig, budget: Budget | None) -> TrainConfig | None:
    """The resolved config of a paper's recipe, for a forecast before there is text.

    None if the run has a text, or if only the text tells its length.

    Raises:
        UserError: as `prepare_run`.
    """
    if (
        asked.recipe not in PAPER_RECIPES
        or asked.data != recipe_of(asked).data
        or (budget is not None and budget.unit == "epochs")
    ):
        return None
    refuse_what_means_nothing(asked)
    _check_device(asked)
    asked = asked if budget is None else with_budget(asked, budget, epoch_tokens=1)
    return resolve(asked, vocab_size=asked.model.vocab_size, prepared=Path())


def _checked_before_the_text(asked: TrainConfig, budget: Budget | None) -> Schedule | None:
    """Refuse what can be refused before a text is tokenized, which may take hours; returns the schedule."""
    if budget is not None and budget.unit == "tokens":
        with_budget(asked, budget, epoch_tokens=1)
    if asked.data.prepared is None and asked.data.tokenizer == "bytes":
        length = asked.sequence_length
        model = asked.model.fitted(vocab_size=ByteTokenizer.vocab_size, sequence_length=length)
    else:  # the fragments are the same, whatever the vocabulary
        model = replace(asked.model, vocab_size=asked.model.vocab_size or ByteTokenizer.vocab_size)
    check_model(model, here=False)
    if asked.method == "data_parallel":
        return None
    return checked_settings(with_method_values(replace(asked, model=model))).schedule


def _check_joined_text(url: str, data: DataConfig) -> None:
    """Refuse a text that is not the one of the run in the store."""
    from diloco.training.config.joined import check_text as check_joined
    from diloco.training.config.joined import facts_of

    facts, own = facts_of(url), text_facts(data)
    assert data.prepared is not None, "the text is prepared"
    try:
        check_joined(facts, data.prepared)
    except UserError as error:
        raise UserError(
            f"{error}: name the sources and the tokenizer that the run was created with by data.train and "
            "data.tokenizer, or a copy of its prepared directory by data.prepared",
            *("data.train", "data.tokenizer", "data.prepared"),
        ) from None
    if (most := facts.get(TRAIN_TOKENS)) != own.num_tokens:
        raise UserError(
            f"the run in {url} reads the first {most} tokens of its training text, and this replica would read "
            f"{own.num_tokens}: set data.max_train_tokens={most}",
            "data.max_train_tokens",
        )


def _with_budget(asked: TrainConfig, budget: Budget | None) -> TrainConfig:
    """The config with a budget, of which its text and the tokenizer decide how many tokens it is."""
    if budget is None:
        return asked
    assert asked.data.prepared is not None, "the text is prepared"
    vocab_size = asked.model.vocab_size or read_index(asked.data.prepared).vocab_size
    sized = replace(asked, model=replace(asked.model, vocab_size=vocab_size))
    budgeted = with_budget(sized, budget, epoch_tokens=epoch_tokens(asked))
    return replace(asked, num_tokens=budgeted.num_tokens)


def epoch_tokens(config: TrainConfig) -> int:
    """The tokens of one pass over the training text, which all replicas together read.

    Raises:
        UserError: if the text is shorter than one sequence.
    """
    return open_training_text(config.data).num_windows(config.sequence_length) * config.sequence_length


def refuse_what_means_nothing(asked: TrainConfig) -> None:
    """Refuse a change of the recipe that has no effect on the run.

    Raises:
        UserError: naming the field.
    """
    changed = differences(recipe_of(asked), asked) if asked.recipe else {}  # of a run that is joined
    if asked.method == "data_parallel":
        unused = [name for name in changed if name.startswith("diloco.")]
        if unused:
            raise UserError(
                f"{unused[0]} means nothing to data_parallel, which has no outer step: leave it out", unused[0]
            )
    if asked.num_connections > 1 and asked.num_replicas == 1:
        raise UserError(
            f"num_connections={asked.num_connections} means nothing to one replica: leave it out",
            "num_connections",
        )
    if "publish_every" in changed and asked.publish is None:
        raise UserError(
            f"publish_every={asked.publish_every} means nothing without publish: set that to a directory or a URL",
            *("publish_every", "publish"),
        )
    if "log_layer_cosine" in changed and asked.diloco.combine != "gather":
        raise UserError(
            f"log_layer_cosine means nothing to diloco.combine={asked.diloco.combine}, where no replica sees the "
            "others' outer gradients whole: leave it out",
            *("log_layer_cosine", "diloco.combine"),
        )
    if "diloco.layers_per_fragment" in changed and with_method_values(asked).diloco.fragments == "whole":
        raise UserError(
            f"diloco.layers_per_fragment={asked.diloco.layers_per_fragment} means nothing to one whole fragment: "
            "leave it out, or set diloco.fragments to strided or sequential",
            *("diloco.layers_per_fragment", "diloco.fragments"),
        )


def _name(asked: TrainConfig) -> str:
    """The recipe's name and the time, which another replica of a rendezvous may have, too."""
    name = f"{asked.recipe or 'replica'}-{datetime.now():%Y%m%d-%H%M%S}"
    return name if asked.rendezvous is None else f"{name}-{secrets.token_hex(3)}"


def _check_libraries(asked: TrainConfig) -> None:
    """Refuse to begin without the libraries of the trackers."""
    for name in asked.trackers:
        check_installed(name)
    if asked.prometheus_port is not None:
        require("prometheus_client", extra="prometheus")


def _check_device(asked: TrainConfig) -> None:
    """Refuse settings that need a GPU, where replicas are processes of this machine and it has none."""
    if under_a_launcher() or torch.cuda.is_available():
        return
    check_there(asked.device)
    if asked.diloco.offload and asked.device != "mps":
        raise UserError(
            "diloco.offload spares a GPU's memory, and torch finds no GPU here: turn it off", "diloco.offload"
        )
