"""Text for people: names of runs beside each other, times and sizes with units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from diloco.training.config.config import TrainConfig, fields_with, hyperparameters, is_within

if TYPE_CHECKING:
    from diloco.training.records.tail import RunTail

Setting = str | int | float | bool
_MOST = 4


def differing_settings(runs: "Sequence[RunTail]") -> dict[str, list[Setting]]:
    """The settings on which results depend and in which runs differ: their values, by dotted name.

    Text is known by its digest, too, since sources of the same name may hold other text. The values of a run that
    has not begun are empty.
    """
    hidden = (*fields_with(TrainConfig, "incidental"), *_OF_A_PLACE)
    flat = [{} if run.config is None else hyperparameters(run.config) for run in runs]
    for one, run in zip(flat, runs, strict=True):
        if run.text is not None:
            one["data.digest"] = run.text.digest[:16]
    names = dict.fromkeys(name for one in flat for name in one)
    return {
        name: [one.get(name, "") for one in flat]
        for name in names
        if len({one.get(name) for one in flat if one}) > 1 and not is_within(name, hidden)
    }


_OF_A_PLACE = ("data.prepared", "data.cache", "rendezvous", "elastic", "device")
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


def labels(names: Sequence[str], runs: "Sequence[RunTail]") -> list[Label]:
    """A label for each run."""
    settings = differing_settings(runs)
    if not 0 < len(settings) <= _MOST:
        return [Label(name, "") for name in names]
    shown = shown_names(settings)
    rows = [zip(shown, row, strict=True) for row in zip(*settings.values(), strict=True)]
    texts = [", ".join(f"{setting}={_exact(value)}" for setting, value in row if value != "") for row in rows]
    return list(map(Label, names, texts))


def _exact(value: Setting) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def shown_names(names: Iterable[str]) -> list[str]:
    """The last parts of dotted names; whole names where two have the same last part."""
    listed = [*names]
    last = [name.rpartition(".")[2] for name in listed]
    return [part if last.count(part) == 1 else name for part, name in zip(last, listed, strict=True)]


def short(labels: Sequence[Label]) -> list[str]:
    """Texts for legends: the settings alone where they tell the runs apart, and else the names."""
    settings = [label.settings for label in labels]
    return settings if all(settings) and len({*settings}) == len(settings) else [label.name for label in labels]


def rounded(count: float) -> str:
    """A count with three digits and a unit.

    >>> rounded(57_792), rounded(4_800_000), rounded(900)
    ('57.8k', '4.8M', '900')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{float(f'{count / size:.3g}'):g}{letter}"
    return f"{count:g}"


def factor(ratio: float) -> str:
    """A factor with two digits, and all of those before the point.

    >>> factor(87.4), factor(1.52), factor(0.5)
    ('87', '1.5', '0.5')
    """
    return f"{ratio:,.0f}" if ratio >= 9.5 else f"{ratio:.2g}"


def cell(value: Setting) -> str:
    """A setting for a table.

    >>> cell(0.016666666), cell(30720), cell("None"), cell(True)
    ('0.0167', '30,720', '–', 'True')
    """
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value == "None" else str(value)


def duration(seconds: float) -> str:
    """A time in minutes and seconds, from an hour on with the hours.

    >>> duration(9.6), duration(3723)
    ('0:09', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of at most 40 characters, between its first and its last value.

    >>> sparkline([4.0, 2.0, 1.0])
    '4.00 █▃▁ 1.00'
    """
    size = -(-len(values) // _MOST_MARKS)
    means = [fmean(values[start : start + size]) for start in range(0, len(values), size)]
    low, high = min(means), max(means)
    levels = [round((len(_MARKS) - 1) * (mean - low) / (high - low)) if high > low else 0 for mean in means]
    return f"{values[0]:.2f} {''.join(_MARKS[level] for level in levels)} {values[-1]:.2f}"


_MARKS, _MOST_MARKS = "▁▂▃▄▅▆▇█", 40


def megabytes(num_bytes: float) -> str:
    """A number of bytes in MB; in kB below a tenth of one, in GB from a thousand on.

    >>> megabytes(30_200), megabytes(2_540_000), megabytes(3.2e9)
    ('30.2 kB', '2.54 MB', '3.20 GB')
    """
    if num_bytes < 1e5:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def long_duration(seconds: float) -> str:
    """A time in its largest unit of which there are two or more.

    >>> long_duration(100), long_duration(82_700), long_duration(1.3e7), long_duration(1.9e9)
    ('2 minutes', '23 hours', '150 days', '60 years')
    """
    for unit, size in {"years": 365.25 * 86_400, "days": 86_400, "hours": 3600, "minutes": 60}.items():
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
