"""Grids over hyperparameters, extended while the best lies on their edge; their CSV is what scaling/ reads."""

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.experiments.runner.grid import LabelledRun, Machines, digest_of, run_grid
from diloco.training.config import TrainConfig
from diloco.training.prepare import refuse_what_means_nothing
from diloco.training.recipes import recipe

Setting = tuple[tuple[str, float], ...]
"""A value of each axis, by name."""

EXTENDED = {"learning_rate": math.sqrt(2), "batch_tokens": 2.0}
"""Axes along which a grid is extended, and by what factor."""
_AXES = ("width", "num_replicas", "sync_every", "outer_learning_rate", "seed", *EXTENDED)
_MAY_BE_0 = ("num_replicas", "seed")
_WHOLE = ("width", "num_replicas", "sync_every", "seed", "batch_tokens")
_MOST_EXTENSIONS = 20
_WITH_A_COLUMN = (
    *("num_replicas", "seed", "global_batch", "num_tokens", "model.width", "optimizer.learning_rate"),
    *("diloco.sync_every", "diloco.outer_learning_rate"),
)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied around a config.

    Raises:
        UserError: for an axis that is none, or has no value.
    """

    base: TrainConfig
    """Everything that is not varied; its budget follows from the size."""
    axes: Mapping[str, Sequence[float]]
    """Of width, num_replicas (0 is Data-Parallel), sync_every, outer_learning_rate, seed, learning_rate and
    batch_tokens: all combinations."""
    then: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Varied alone, afterwards, at the best of each combination of the axes that are not extended; the best on
    average over the axis seed."""
    tokens_per_param: float = 20.0
    """Budget of a run."""
    vocab_size: int
    """Of the tokenizer, of which the number of parameters depends."""

    def __post_init__(self) -> None:
        """Refuse axes that are none."""
        if self.base.method == "data_parallel":
            raise UserError(
                "leave out --method data_parallel: in a sweep the axis num_replicas=0 is Data-Parallel"
            )
        if not 0 < self.tokens_per_param < math.inf:
            raise UserError(f"tokens_per_param={self.tokens_per_param:g} must be above 0 and finite")
        for name, values in {**self.axes, **self.then}.items():
            if name not in _AXES:
                raise UserError(f"{name!r} is not an axis: choose from {', '.join(_AXES)}")
            least = 0.0 if name in _MAY_BE_0 else math.ulp(0.0)
            told = ", ".join(f"{value:g}" for value in values)
            if not values or not all(least <= value < math.inf for value in values):
                bound = "of 0 or more" if name in _MAY_BE_0 else "above 0"
                raise UserError(f"the axis {name} takes finite numbers {bound}, not {told or 'none'}")
            if name in _WHOLE and any(value != int(value) for value in values):
                raise UserError(f"the axis {name} takes whole numbers, not {told}")
        for setting in (*self.settings(), *self.later(self.settings())):
            self.run(setting)

    def settings(self) -> list[Setting]:
        """All combinations of the axes, without those that differ in what Data-Parallel does not have."""
        found = [tuple(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        return list(dict.fromkeys(map(_without_what_is_unused, found)))

    @cached_property
    def name_of_base(self) -> str:
        """What everything that has no column is known by: runs of one name belong in one table."""
        return f"base-{digest_of(self.base, without=_WITH_A_COLUMN)}"

    def with_seeds(self, setting: Setting) -> list[Setting]:
        """The setting with each value of the axis seed, if there is one."""
        if "seed" not in self.axes:
            return [setting]
        return [tuple((dict(setting) | {"seed": seed}).items()) for seed in self.axes["seed"]]

    def later(self, settings: Iterable[Setting]) -> list[Setting]:
        """Settings with each value of `then`, without those that differ in what Data-Parallel does not have."""
        found = (
            tuple((dict(setting) | {name: value}).items())
            for setting in settings
            for name, values in self.then.items()
            for value in values
        )
        return list(dict.fromkeys(map(_without_what_is_unused, found)))

    def run(self, setting: Setting) -> LabelledRun:
        """The run of a setting, labelled with the columns that `diloco.scaling.table` reads.

        Raises:
            UserError: if it can't be run, as its batch can't be cut into sequences for each replica.
        """
        values = dict(setting)
        replicas = int(values.get("num_replicas", self.base.num_replicas))
        base, is_baseline = self.base, replicas == 0
        batch = values.get("batch_tokens", base.tokens_per_step)
        if batch % (max(1, replicas) * base.sequence_length):
            raise UserError(
                f"batch_tokens={batch:g} must be a multiple of num_replicas={max(1, replicas)} · "
                f"sequence_length={base.sequence_length}"
            )
        model = replace(base.model, width=int(values.get("width", base.model.width)))
        num_params = replace(model, vocab_size=self.vocab_size).num_matrix_params
        global_batch = int(batch) // base.sequence_length
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
            num_connections=base.num_connections if replicas > 1 else 1,
            seed=int(values.get("seed", base.seed)),
            model=model,
            global_batch=global_batch,
            num_tokens=max(1, round(self.tokens_per_param * num_params / step_tokens)) * step_tokens,
            optimizer=replace(base.optimizer, learning_rate=rate),
            diloco=recipe(base.recipe).diloco if is_baseline else replace(base.diloco, **diloco),
        )
        refuse_what_means_nothing(config)
        labels: dict[str, Any] = {"params": num_params, "replicas": replicas, "learning_rate": rate}
        labels |= {"batch_tokens": step_tokens, "tokens": config.num_tokens, "seed": config.seed}
        labels |= {"base": self.name_of_base}
        return LabelledRun(labels=labels | ({} if is_baseline else diloco), config=config)


def run_sweep(
    sweep: Sweep, directory: Path, machines: Machines, *, on_finished: Any = None
) -> Iterator[list[dict[str, Any]]]:
    """Run the grid, extend it while a best run lacks a neighbour, then vary `then`; yields as `run_grid` does.

    Raises:
        UserError: if a best run still lies on the edge after so many extensions that something else is wrong.
    """
    settings, rows = _different(sweep, sweep.settings()), []
    for _ in range(_MOST_EXTENSIONS):
        for rows in run_grid(list(map(sweep.run, settings)), directory, machines, on_finished=on_finished):
            yield rows
        extended = _different(sweep, [*settings, *_beyond_edges(sweep, settings, rows)])
        if len(extended) == len(settings):
            break
        settings = extended
    else:
        raise UserError(f"after {_MOST_EXTENSIONS} extensions a best run lies on the edge: look at the table")
    if sweep.then:
        groups = [losses for losses in _groups(settings, rows) if min(losses.values()) < math.inf]
        best = [min(losses, key=losses.__getitem__) for losses in groups]
        later = sweep.later(setting for one in best for setting in sweep.with_seeds(one))
        settings = _different(sweep, [*settings, *later])
        yield from run_grid(list(map(sweep.run, settings)), directory, machines, on_finished=on_finished)


def _different(sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
    """Without those that make the same run as an earlier one."""
    return list({sweep.run(setting).config: setting for setting in reversed(settings)}.values())[::-1]


def _without_what_is_unused(setting: Setting) -> Setting:
    values = dict(setting)
    if values.get("num_replicas") == 0:
        values = {k: v for k, v in values.items() if k not in ("sync_every", "outer_learning_rate")}
    return tuple(values.items())


def _groups(settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[Setting, float]]:
    """Mean losses over seeds by setting, of the settings that differ in nothing but the axes that are extended."""
    found: dict[Setting, dict[Setting, list[float]]] = {}
    for setting, row in zip(settings, rows, strict=True):
        seedless = tuple((name, value) for name, value in setting if name != "seed")
        rest = tuple((name, value) for name, value in seedless if name not in EXTENDED)
        loss = float(row["eval_loss"]) if not row.get("failed") else math.inf
        found.setdefault(rest, {}).setdefault(seedless, []).append(loss)
    for group in found.values():
        yield {setting: statistics.mean(losses) for setting, losses in group.items()}


def _beyond_edges(
    sweep: Sweep, settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]
) -> Iterator[Setting]:
    """Of the best of each group the neighbours along the extended axes, diagonal ones too, not tried yet."""
    axes = [axis for axis in EXTENDED if len(sweep.axes.get(axis, ())) > 1]
    for losses in _groups(settings, rows):
        best = dict(min(losses, key=losses.__getitem__))
        if min(losses.values()) == math.inf:
            continue
        around = [
            _around(best[axis], {dict(setting)[axis] for setting in losses}, EXTENDED[axis]) for axis in axes
        ]
        for values in itertools.product(*around):
            setting = tuple((best | dict(zip(axes, values, strict=True))).items())
            if setting not in losses and _can_run(sweep, setting):
                yield from sweep.with_seeds(setting)


def _around(value: float, tried: Collection[float], step: float) -> tuple[float, float, float]:
    """The values next to one, of those tried or a step beyond, and itself."""
    below, above = (other for other in tried if other < value), (other for other in tried if other > value)
    return max(below, default=value / step), value, min(above, default=value * step)


def _can_run(sweep: Sweep, setting: Setting) -> bool:
    """Whether its batch can still be cut into sequences."""
    try:
        sweep.run(setting)
    except ValueError:
        return False
    return True
