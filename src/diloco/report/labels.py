"""Names of runs that are shown beside each other: their own, and the settings in which they differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.training.config.config import TrainConfig, fields_with, flat_json

Setting = str | int | float | bool
_MOST = 4


def differing_settings(configs: Sequence[TrainConfig]) -> dict[str, list[Setting]]:
    """The settings on which results depend and in which configs differ: their values, by dotted name.

    Text whose sources are the same by name, and which was prepared differently, is known by its directory's name.
    """
    hidden = (*fields_with(TrainConfig, "incidental"), *_OF_A_PLACE)
    flat = [flat_json(config) for config in configs]
    for one, config in zip(flat, configs, strict=True):
        one[_PREPARED] = "" if config.data.prepared is None else config.data.prepared.name
    names = dict.fromkeys(name for one in flat for name in one)
    differing = {
        name: [one.get(name, "") for one in flat]
        for name in names
        if len({one.get(name) for one in flat}) > 1
        and not any(f"{name}.".startswith(f"{other}.") for other in hidden)
    }
    if any(name.startswith("data.") and name != _PREPARED for name in differing):
        differing.pop(_PREPARED, None)
    return differing


_PREPARED = "data.prepared"
_OF_A_PLACE = ("data.cache", "rendezvous", "elastic", "device")
"""Settings that say where a replica is, and not what it learns."""


@dataclass(frozen=True)
class Label:
    """The name of a run among others."""

    name: str
    settings: str
    """The settings in which the runs differ, where they are few; else empty."""

    def __str__(self) -> str:
        """The name and the settings."""
        return ", ".join(part for part in (self.name, self.settings) if part)


def labels(names: Sequence[str], configs: Sequence[TrainConfig | None]) -> list[Label]:
    """A label for each run; a run without a config has not begun."""
    settings = differing_settings([config for config in configs if config is not None])
    if not 0 < len(settings) <= _MOST:
        return [Label(name, "") for name in names]
    values = zip(*settings.values(), strict=True)
    return [
        Label(name, "" if config is None else _text(settings, next(values)))
        for name, config in zip(names, configs, strict=True)
    ]


def shown_names(names: Iterable[str]) -> list[str]:
    """The last parts of dotted names; whole names where two have the same last part."""
    listed = [*names]
    last = [name.rpartition(".")[2] for name in listed]
    return [part if last.count(part) == 1 else name for part, name in zip(last, listed, strict=True)]


def _text(names: Iterable[str], values: Iterable[Setting]) -> str:
    return ", ".join(f"{n}={value}" for n, value in zip(shown_names(names), values, strict=True) if value != "")


def short(labels: Sequence[Label]) -> list[str]:
    """Texts for legends: the settings alone where they tell the runs apart, and else the names."""
    settings = [label.settings for label in labels]
    return settings if all(settings) and len({*settings}) == len(settings) else [label.name for label in labels]
