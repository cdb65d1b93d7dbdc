"""A resume that changes the learning-rate schedule: from its step on, a new phase of the schedule begins.

With it a finished run is extended, or a run goes on with another learning rate. The rate rises (or falls) from
where it is to the peak, and then follows the schedule to the end (arXiv 2403.08763). Under wsd, before its decay,
it is at the peak, and stays there.
"""

from dataclasses import replace
from typing import Any

from diloco.errors import UserError
from diloco.exchange.control import share
from diloco.files import write_json
from diloco.training.config import TrainConfig
from diloco.training.resolve import with_warmup
from diloco.training.runs import CONFIG_FILE, read_config
from diloco.training.step import learning_rate
from diloco.training.summary import OUTER_FILE, SUMMARY_FILE
from diloco.training.traits import differences, fields_with, to_json
from diloco.training.world import World


def schedule_changes(saved: TrainConfig, asked: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields of the schedule in which a resume differs from its run, with both values."""
    of_the_schedule = fields_with(TrainConfig, "begins_a_phase")
    return {name: values for name, values in differences(saved, asked).items() if name in of_the_schedule}


def with_phase(saved: TrainConfig, asked: TrainConfig, step: int) -> TrainConfig:
    """The config that a run goes on with from a step, at which a new phase of its schedule begins.

    Args:
        saved: the run's own.
        asked: the resume's; without a warm-up, it is that of a schedule of the steps that are left.
        step: the last that was taken; 0 begins anew.

    Raises:
        UserError: if the run is to end before, or its warm-up does not end.
    """
    steps_left = asked.num_steps - step
    if steps_left < 1:
        raise UserError(
            f"num_tokens={asked.num_tokens} are {asked.num_steps} steps, and the run has taken {step}: take more "
            f"than {step * asked.tokens_per_step}",
            "num_tokens",
        )
    rate = learning_rate(saved, step) if step else 0.0
    optimizer = replace(with_warmup(asked.optimizer, steps_left), start_step=step, start_rate=rate)
    return replace(asked, optimizer=optimizer)


def continued(config: TrainConfig, world: World, step: int) -> TrainConfig:
    """The config of a resume from a step, which is also written down where it changes the schedule.

    The results of a run that was finished are removed then: they are those of fewer steps.

    Raises:
        UserError: as `with_phase`.
    """
    saved = read_config(config.directory)
    if not schedule_changes(saved, config):
        return config
    share(world.everyone, "the run's config was read")
    config = with_phase(saved, config, step)
    if world.is_first_on_machine:
        for name in (OUTER_FILE, SUMMARY_FILE):
            (config.directory / name).unlink(missing_ok=True)
        write_json(config.directory / CONFIG_FILE, to_json(config))
    return config
