"""Names of runs that are shown beside each other: their own, and the settings in which they differ."""

from collections.abc import Sequence

from diloco.training.config import TrainConfig
from diloco.training.traits import fields_with, flat_json

Setting = str | int | float | bool
_MOST = 4


def differing_settings(configs: Sequence[TrainConfig]) -> dict[str, list[Setting]]:
    """The settings on which results depend and in which configs differ: their values, by dotted name."""
    hidden = (*fields_with(TrainConfig, "incidental"), *fields_with(TrainConfig, "own_to_a_replica"))
    flat = [flat_json(config) for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    return {
        name: [one.get(name, "") for one in flat]
        for name in names
        if len({one.get(name) for one in flat}) > 1
        and not any(f"{name}.".startswith(f"{other}.") for other in hidden)
    }


def labels(names: Sequence[str], configs: Sequence[TrainConfig | None]) -> list[str]:
    """A label for each run: its name, with the settings in which the runs differ where those are few."""
    known = [config for config in configs if config is not None]
    settings = differing_settings(known)
    if len(settings) > _MOST:
        return list(names)
    values = (dict(zip(settings, row, strict=True)) for row in zip(*settings.values(), strict=True))
    return [
        name if config is None or not settings else ", ".join([name, *_texts(next(values))])
        for name, config in zip(names, configs, strict=True)
    ]


def _texts(values: dict[str, Setting]) -> list[str]:
    return [f"{name.rpartition('.')[2]}={value}" for name, value in values.items() if value != ""]
