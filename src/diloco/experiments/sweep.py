"""Grids over hyperparameters, extended while the best lies on their edge; their CSV is what scaling/ reads."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.experiments.grid import LabelledRun, Machines, run_grid
from diloco.models.ladder import num_matrix_params
from diloco.training.config import DilocoConfig, TrainConfig

Setting = tuple[tuple[str, float], ...]
"""A value of each axis, by name."""

_STEPS = {"learning_rate": math.sqrt(2), "batch_tokens": 2.0}
"""Axes along which a grid is extended, and by what factor."""
_AXES = ("width", "num_replicas", "sync_every", "outer_learning_rate", "seed", *_STEPS)
_MOST_EXTENSIONS = 8


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied around a config.

    Raises:
        ValueError: for an axis that is none, or has no value.
    """

    base: TrainConfig
    """Everything that is not varied; its budget follows from the size."""
    axes: Mapping[str, Sequence[float]]
    """Of width, num_replicas (0 is Data-Parallel), sync_every, outer_learning_rate, seed, learning_rate and
    batch_tokens: all combinations."""
    then: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Varied alone, afterwards, at the best of each combination of the axes that are not extended."""
    tokens_per_param: float = 20.0
    """Budget of a run."""
    vocab_size: int
    """Of the tokenizer, of which the number of parameters depends."""

    def __post_init__(self) -> None:
        """Refuse axes that are none."""
        for name, values in {**self.axes, **self.then}.items():
            if name not in _AXES:
                raise ValueError(f"{name!r} is not an axis: choose from {', '.join(_AXES)}")
            if not values:
                raise ValueError(f"the axis {name} has no value")

    def settings(self) -> list[Setting]:
        """All combinations of the axes, without those that differ in what Data-Parallel does not have."""
        found = [tuple(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        return list(dict.fromkeys(map(_without_what_is_unused, found)))

    def run(self, setting: Setting) -> LabelledRun:
        """The run of a setting, labelled with the columns that `diloco.scaling.table` reads."""
        values = dict(setting)
        replicas = int(values.get("num_replicas", self.base.num_replicas))
        base, is_baseline = self.base, replicas == 0
        model = replace(base.model, width=int(values.get("width", base.model.width)))
        num_params = num_matrix_params(replace(model, vocab_size=self.vocab_size))
        batch = values.get("batch_tokens", base.tokens_per_step) / base.sequence_length
        global_batch = max(1, replicas) * max(1, round(batch / max(1, replicas)))
        step_tokens = global_batch * base.sequence_length
        diloco = {
            "sync_every": int(values.get("sync_every", base.diloco.sync_every)),
            "outer_learning_rate": values.get("outer_learning_rate", base.diloco.outer_learning_rate),
        }
        rate = values.get("learning_rate", base.optimizer.learning_rate)
        config = replace(
            base,
            method="data_parallel" if is_baseline else base.method,
            num_replicas=max(1, replicas),
            seed=int(values.get("seed", base.seed)),
            model=model,
            global_batch=global_batch,
            num_tokens=max(1, round(self.tokens_per_param * num_params / step_tokens)) * step_tokens,
            optimizer=replace(base.optimizer, learning_rate=rate),
            diloco=DilocoConfig() if is_baseline else replace(base.diloco, **diloco),
        )
        labels: dict[str, Any] = {"params": num_params, "replicas": replicas, "learning_rate": rate}
        labels |= {"batch_tokens": step_tokens, "tokens": config.num_tokens, "seed": config.seed}
        return LabelledRun(labels=labels | ({} if is_baseline else diloco), config=config)


def run_sweep(
    sweep: Sweep, directory: Path, machines: Machines, *, on_finished: Any = None
) -> Iterator[list[dict[str, Any]]]:
    """Run the grid, extend it while a best run lies on its edge, then vary `then`; yields as `run_grid` does."""
    settings, rows = sweep.settings(), []
    for extension in itertools.count():
        for rows in run_grid(list(map(sweep.run, settings)), directory, machines, on_finished=on_finished):
            yield rows
        more = [setting for setting in _beyond_edges(settings, rows) if setting not in settings]
        if not more or extension == _MOST_EXTENSIONS:
            break
        settings += more
    settings += [setting for setting in _afterwards(sweep, settings, rows) if setting not in settings]
    if sweep.then:
        yield from run_grid(list(map(sweep.run, settings)), directory, machines, on_finished=on_finished)


def _without_what_is_unused(setting: Setting) -> Setting:
    values = dict(setting)
    if values.get("num_replicas") == 0:
        values = {k: v for k, v in values.items() if k not in ("sync_every", "outer_learning_rate")}
    return tuple(values.items())


def _groups(settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[Setting, float]]:
    """Losses by setting, of the settings that differ in nothing but the axes that are extended."""
    found: dict[Setting, dict[Setting, float]] = {}
    for setting, row in zip(settings, rows, strict=True):
        rest = tuple((name, value) for name, value in setting if name not in _STEPS)
        loss = float(row["eval_loss"]) if not row.get("failed") else math.inf
        found.setdefault(rest, {})[setting] = loss
    yield from found.values()


def _beyond_edges(settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]) -> Iterator[Setting]:
    """For each group whose best lies at an end of an axis, one setting further."""
    for losses in _groups(settings, rows):
        best = dict(min(losses, key=losses.__getitem__))
        if min(losses.values()) == math.inf:
            continue
        for axis, factor in _STEPS.items():
            if axis not in best:
                continue
            tried = sorted({dict(setting)[axis] for setting in losses})
            if len(tried) > 1 and best[axis] in (tried[0], tried[-1]):
                further = best[axis] / factor if best[axis] == tried[0] else best[axis] * factor
                yield tuple((best | {axis: further}).items())


def _afterwards(sweep: Sweep, settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]) -> Iterator[Setting]:
    for losses in _groups(settings, rows):
        best = dict(min(losses, key=losses.__getitem__))
        for name, values in sweep.then.items():
            for value in values:
                yield _without_what_is_unused(tuple((best | {name: value}).items()))
