"""From the settings asked for to the settings that run: values that follow from others are filled in."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.files import expanded
from diloco.presets import PRESETS, Preset
from diloco.training.config import TrainConfig
from diloco.training.sections import AdamWConfig
from diloco.training.sizes import check_sizes
from diloco.training.traits import differences_from_defaults, fields_with, to_json, with_value


def with_method_values(config: TrainConfig) -> TrainConfig:
    """The same config with the values of its method's preset in the fields that were left out."""
    if config.method == "data_parallel":
        return config
    preset = vars(PRESETS[config.method])
    left_out = {name: value for name, value in preset.items() if getattr(config.diloco, name) is None}
    return replace(config, diloco=replace(config.diloco, **left_out))


def resolve(config: TrainConfig, *, vocab_size: int, prepared: Path) -> TrainConfig:
    """The config with every value filled in that follows from the method, the tokenizer or the length of the run.

    Args:
        config: as asked for.
        vocab_size: of the tokenizer.
        prepared: directory of the prepared data.

    Raises:
        UserError: if the model's vocabulary is smaller than the tokenizer's, or much larger, if the warm-up does
            not end before the run or the decay, if there would be nothing to freeze, or for sizes beyond the
            memory.
    """
    model = config.model.fitted(vocab_size=vocab_size, sequence_length=config.sequence_length)
    config = with_method_values(config)
    optimizer, num_steps = with_warmup(config.optimizer, config.num_steps), config.num_steps
    if config.diloco.freeze and config.diloco.fragments == "whole":
        raise UserError(
            "diloco.freeze with diloco.fragments=whole freezes nothing: take strided or sequential",
            *("diloco.freeze", "diloco.fragments"),
        )
    resolved = replace(
        config,
        model=model,
        data=replace(config.data, prepared=prepared),
        checkpoint=replace(
            config.checkpoint,
            keep=config.default_keep if config.checkpoint.keep is None else config.checkpoint.keep,
        ),
        shards_per_replica=config.num_shards,
        micro_batch=config.micro_batch or config.process_batch,
        optimizer=replace(
            optimizer,
            weight_decay=1 / num_steps if optimizer.weight_decay is None else optimizer.weight_decay,
        ),
    )
    check_sizes(resolved, here=False)
    return resolved


def with_warmup(optimizer: AdamWConfig, num_steps: int) -> AdamWConfig:
    """The optimizer's settings with the warm-up that a schedule of so many steps has where none is given.

    Raises:
        UserError: if the warm-up does not end before the schedule or the decay.
    """
    if optimizer.warmup_steps is None:
        optimizer = replace(optimizer, warmup_steps=min(1000, num_steps // 10))
    warmup_steps = optimizer.warmup_steps
    assert warmup_steps is not None, "it was filled in"
    if warmup_steps >= num_steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps} leaves nothing of the run's {num_steps} steps: take fewer, or "
            "a larger num_tokens",
            *("optimizer.warmup_steps", "num_tokens"),
        )
    if optimizer.schedule == "wsd" and warmup_steps > (1 - optimizer.decay_fraction) * num_steps:
        raise UserError(
            f"optimizer.decay_fraction={optimizer.decay_fraction} of {num_steps} steps begins before the warm-up "
            f"of {warmup_steps} steps has ended: take a smaller one of the two",
            *("optimizer.decay_fraction", "optimizer.warmup_steps"),
        )
    return optimizer


def asked_again(config: TrainConfig, *, vocab_size: int) -> TrainConfig:
    """A resolved config without the values that `resolve` would fill in, so that they follow from a change again.

    Args:
        config: as `resolve` gives it.
        vocab_size: of its tokenizer.
    """
    resolved, prepared = config, config.data.prepared
    assert prepared is not None, "the config is resolved"
    for name, left_out in _FILLED_IN.items():
        without = with_value(config, name, left_out)
        try:
            is_the_same = resolve(without, vocab_size=vocab_size, prepared=prepared) == resolved
        except UserError:
            continue
        config = without if is_the_same else config
    if prepared.parent == expanded(config.data.cache).absolute():
        return with_value(config, "data.prepared", None)
    return config


_FILLED_IN = {
    "model.vocab_size": 0,
    **dict.fromkeys(f"diloco.{field.name}" for field in fields(Preset)),
    **dict.fromkeys(fields_with(TrainConfig, "filled_in")),
}
"""The fields that `resolve` fills in, and their values where they are left out."""


def identity(config: TrainConfig) -> dict[str, Any]:
    """The fields that identify a run: those that differ from their defaults, by dotted name, as JSON values.

    A value that is the method's own counts as the default. Incidental fields, such as the run's name, are left
    out, and so are those of `data`: text is known by its content, not by the place where it lies.
    """
    incidental = fields_with(TrainConfig, "incidental")
    preset = {} if config.method == "data_parallel" else vars(PRESETS[config.method])
    left_out = {name: None for name, value in preset.items() if getattr(config.diloco, name) == value}
    config = replace(config, diloco=replace(config.diloco, **left_out))
    return {
        name: value
        for name, value in differences_from_defaults(config).items()
        if name not in incidental and not name.startswith("data.")
    }


def shared_facts(config: TrainConfig) -> dict[str, Any]:
    """The settings that all replicas of a run must share, by dotted name, as JSON; text is known by its digest."""
    own = fields_with(TrainConfig, "own_to_a_replica")
    return dict(_flat(to_json(config), without=own))


def facts_with_rendezvous(config: TrainConfig) -> dict[str, Any]:
    """The settings that replicas which come and go must share, by dotted name, as JSON."""
    own = {
        name
        for kind in ("incidental", "own_to_a_replica", "own_with_rendezvous", "may_change_on_resume")
        for name in fields_with(TrainConfig, kind)
    }
    own -= {f"model.{name}" for name in config.model.replayed_fields}
    return dict(_flat(to_json(config), without=own))


def _flat(values: Mapping[str, Any], *, without: Collection[str], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if where + name in without:
            continue
        if isinstance(value, dict):
            yield from _flat(value, without=without, where=f"{where}{name}.")
        else:
            yield where + name, value
