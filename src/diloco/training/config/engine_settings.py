"""The engine's settings that a config asks for, and their check before anything is started."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from diloco.engine.settings import Settings
from diloco.errors import UserError, setting
from diloco.fragments import Fragments, sequential, strided, whole
from diloco.outer.averages import reduction_of
from diloco.outer.rules import rules_of
from diloco.schedule import Schedule
from diloco.training.config.config import DilocoConfig, TrainConfig
from diloco.training.config.resolve import with_method_values
from diloco.wire import codec


def engine_settings(diloco: DilocoConfig, model: nn.Module, *, seed: int) -> Settings:
    """The settings of the engine around a run's model.

    Args:
        diloco: with the method's own values.
        model: of the run.
        seed: of the codec.

    Raises:
        UserError: if the schedule, the codec or the model refuses them.
    """
    assert diloco.wire is not None, "the config is resolved"
    outer, mixing = rules_of(diloco)
    with setting("diloco.wire", diloco.wire):
        wire = codec(diloco.wire)
    with setting("diloco.combine", diloco.combine):
        reduction_of(diloco.combine, wire)
    fragments = _fragments(diloco, model)
    return Settings(
        fragments=fragments,
        schedule=diloco.schedule(len(fragments)),
        outer=outer,
        mixing=mixing,
        wire=wire,
        combine=diloco.combine,
        error_feedback=diloco.error_feedback,
        seed=seed,
        buffers="own",
    )


def outer_rate(config: TrainConfig) -> float:
    """η, the learning rate of the outer rule."""
    rate = rules_of(with_method_values(config).diloco)[0].facts()["lr"]
    assert isinstance(rate, float), "every rule has one"
    return rate


def _fragments(diloco: DilocoConfig, model: nn.Module) -> Fragments:
    if diloco.fragments == "whole":
        return whole(model)
    cut: Callable[..., Fragments] = strided if diloco.fragments == "strided" else sequential
    try:
        return cut(model, layers_per_fragment=diloco.layers_per_fragment)
    except UserError as error:
        if error.fields:
            raise
        raise UserError(
            f"diloco.fragments={diloco.fragments} can't be made of this model ({error}): set it to whole",
            "diloco.fragments",
        ) from error


def frozen_parameters(settings: Settings, model: nn.Module) -> Callable[[int], Iterable[nn.Parameter]]:
    """A function of the step: the parameters outside the fragment that is sent next."""

    def frozen(step: int) -> Iterable[nn.Parameter]:
        trained = settings.schedule.next_sent(step)
        for index, fragment in enumerate(settings.fragments):
            if index not in trained:
                yield from (model.get_parameter(name) for name in fragment.parameters)

    return frozen


def check(config: TrainConfig) -> None:
    """Refuse settings that the engine would refuse, or with which a fragment is never sent.

    Raises:
        UserError: naming both values of a contradiction.
    """
    if config.method == "data_parallel":
        return
    check_sends(checked_settings(config).schedule, config.num_steps)


def check_sends(schedule: Schedule, num_steps: int) -> None:
    """Refuse a run in which a fragment is never sent.

    Raises:
        UserError: naming the fragment.
    """
    last = max(range(schedule.num_fragments), key=schedule.send_step)
    if (step := schedule.send_step(last)) > num_steps:
        raise UserError(
            f"fragment {last} is first sent at step {step}, and the run has {num_steps}: its outer "
            "parameters would stay the initial ones; lower diloco.sync_every, or raise num_tokens",
            *("diloco.sync_every", "num_tokens"),
        )


def checked_settings(config: TrainConfig) -> Settings:
    """The engine's settings for a config with its method's values, whatever the length of the run.

    Raises:
        UserError: for settings that the engine would refuse.
    """
    with torch.device("meta"):
        model = config.model.build(seed=config.seed)
    settings = engine_settings(config.diloco, model, seed=config.seed)
    settings.check(model, config.num_replicas if config.rendezvous is None else None)
    return settings
