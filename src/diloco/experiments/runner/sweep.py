"""Sweeps: grids over hyperparameters, extended while the best run lies on an edge; scaling/ reads the table."""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.experiments.runner.grid import GridProgress, LabelledRun, base_name, run_grid
from diloco.experiments.runner.machines import Machines
from diloco.outer.rules import rules_of
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import outer_rate
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import with_method_values
from diloco.training.prepare import refuse_what_means_nothing

Setting = tuple[tuple[str, float], ...]
"""A value for each axis, by the axis's name."""

EXTENDED = {"learning_rate": math.sqrt(2), "batch_tokens": 2.0}
"""The axes along which a grid is extended, and by what factor."""
_OF_DILOCO = ("sync_every", "outer_learning_rate", "outer_momentum")
_AXES = ("width", "num_replicas", *_OF_DILOCO, "seed", *EXTENDED)
_MAY_BE_0 = ("num_replicas", "seed", "outer_momentum")
_INTEGERS = ("width", "num_replicas", "sync_every", "seed", "batch_tokens")
_MOST_EXTENSIONS = 20


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The axes that are varied around a base config.

    Raises:
        UserError: for an unknown axis, an axis without values, or a setting that can't be run.
    """

    base: TrainConfig
    """The config of everything that is not varied; a run's token budget follows from its size."""
    axes: Mapping[str, Sequence[float]]
    """The values of width, num_replicas (0 is Data-Parallel), sync_every, outer_learning_rate, outer_momentum,
    seed, learning_rate and batch_tokens, of which all combinations are run."""
    then: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Axes that are varied one at a time, afterwards, at the best setting of each group: of the runs that differ
    only in extended axes and the seed, the setting with the lowest mean loss over the seeds."""
    tokens_per_param: float = 20.0
    """Token budget of a run, in tokens per parameter."""
    vocab_size: int
    """The tokenizer's, on which the number of parameters depends."""

    def __post_init__(self) -> None:
        if self.base.method == "data_parallel":
            message = "method=data_parallel is no base of a sweep: leave it out, and take axis num_replicas=0"
            raise UserError(message, "method", "axis")
        if not 0 < self.tokens_per_param < math.inf:
            message = f"tokens_per_param={self.tokens_per_param:g} must be above 0 and finite"
            raise UserError(message, "tokens_per_param")
        for name, values in self.axes.items():
            _check_axis("axis", name, values)
        for name, values in self.then.items():
            _check_axis("then", name, values)
        for setting in (*self.settings(), *self.later(self.settings())):
            self.run(setting)

    def settings(self) -> list[Setting]:
        """All combinations of the axes; Data-Parallel once, since it has neither H nor an outer step."""
        products = itertools.product(*self.axes.values())
        return _different_settings(tuple(zip(self.axes, values, strict=True)) for values in products)

    @cached_property
    def name_of_base(self) -> str:
        """The value of the column `base`: runs with the same value belong in one table."""
        return base_name(self.base)

    def with_seeds(self, setting: Setting) -> list[Setting]:
        """The setting with each value of the axis seed, if there is one."""
        if "seed" not in self.axes:
            return [setting]
        return [tuple((dict(setting) | {"seed": seed}).items()) for seed in self.axes["seed"]]

    def later(self, settings: Iterable[Setting]) -> list[Setting]:
        """Each setting with each value of `then`; Data-Parallel as in `settings`."""
        return _different_settings(
            tuple((dict(setting) | {name: value}).items())
            for setting in settings
            for name, values in self.then.items()
            for value in values
        )

    def run(self, setting: Setting) -> LabelledRun:
        """The run of a setting, labelled with the columns that `diloco.scaling.table` reads.

        Raises:
            UserError: if its batch can't be cut into whole sequences for each replica.
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
        outer = rules_of(with_method_values(base).diloco)[0].facts()
        own = dict(zip(_OF_DILOCO[1:], map(outer.get, ("lr", "momentum")), strict=True))
        diloco: dict[str, Any] = {
            name: values[name] for name in own if name in values and values[name] != own[name]
        }
        diloco["sync_every"] = int(values.get("sync_every", base.diloco.sync_every))
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
        if not is_baseline:
            labels |= {"sync_every": config.diloco.sync_every, "outer_learning_rate": outer_rate(config)}
            if "outer_momentum" in {*self.axes, *self.then}:  # a column only where it is varied
                labels["outer_momentum"] = rules_of(with_method_values(config).diloco)[0].facts()["momentum"]
        return LabelledRun(labels=labels, config=config)


def _check_axis(field: str, name: str, values: Sequence[float]) -> None:
    """Refuse an unknown axis, and values that it can't take; `field` is where it stands."""
    if name not in _AXES:
        raise UserError(f"{field} {name!r} is unknown: choose from {', '.join(_AXES)}", field)
    least = 0.0 if name in _MAY_BE_0 else math.ulp(0.0)
    given = ", ".join(f"{value:g}" for value in values) or "none"
    if not values or not all(least <= value < math.inf for value in values):
        bound = "of 0 or more" if name in _MAY_BE_0 else "above 0"
        raise UserError(f"{field} {name} takes finite numbers {bound}, not {given}", field)
    if name in _INTEGERS and any(value != int(value) for value in values):
        raise UserError(f"{field} {name} takes whole numbers, not {given}", field)


def run_sweep(
    sweep: Sweep,
    directory: Path,
    machines: Machines,
    *,
    on_progress: Callable[[GridProgress], None] = lambda _: None,
) -> Iterator[list[dict[str, Any]]]:
    """Run the grid, extend it while a group's best run lacks a neighbour, then vary `then`; yields as `run_grid`.

    Raises:
        UserError: if a best run still lies on an edge after 20 extensions.
    """
    settings, rows = _different_runs(sweep, sweep.settings()), []
    for _ in range(_MOST_EXTENSIONS):
        for rows in run_grid(list(map(sweep.run, settings)), directory, machines, on_progress=on_progress):
            yield rows
        extended = _different_runs(sweep, [*settings, *_beyond_edges(sweep, settings, rows)])
        if len(extended) == len(settings):
            break
        settings = extended
    else:
        raise UserError(f"after {_MOST_EXTENSIONS} extensions a best run lies on an edge: look at the table")
    if sweep.then:
        groups = [losses for losses in _groups(settings, rows) if min(losses.values()) < math.inf]
        best = [min(losses, key=losses.__getitem__) for losses in groups]
        later = sweep.later(setting for one in best for setting in sweep.with_seeds(one))
        settings = _different_runs(sweep, [*settings, *later])
        yield from run_grid(list(map(sweep.run, settings)), directory, machines, on_progress=on_progress)


def _different_settings(settings: Iterable[Setting]) -> list[Setting]:
    return list(dict.fromkeys(map(_without_unused_values, settings)))


def _without_unused_values(setting: Setting) -> Setting:
    is_baseline = dict(setting).get("num_replicas") == 0
    return tuple((name, value) for name, value in setting if not (is_baseline and name in _OF_DILOCO))


def _different_runs(sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
    """The settings without those that make the same run as an earlier one."""
    return list({sweep.run(setting).config: setting for setting in reversed(settings)}.values())[::-1]


def _groups(settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[Setting, float]]:
    """Groups of settings that differ only in extended axes: mean losses over the seeds, by setting."""
    groups: dict[Setting, dict[Setting, list[float]]] = {}
    for setting, row in zip(settings, rows, strict=True):
        seedless = tuple((name, value) for name, value in setting if name != "seed")
        group = tuple((name, value) for name, value in seedless if name not in EXTENDED)
        loss = float(row["eval_loss"]) if not row.get("failed") else math.inf
        groups.setdefault(group, {}).setdefault(seedless, []).append(loss)
    for losses_of in groups.values():
        yield {setting: statistics.mean(losses) for setting, losses in losses_of.items()}


def _beyond_edges(
    sweep: Sweep, settings: Sequence[Setting], rows: Sequence[Mapping[str, Any]]
) -> Iterator[Setting]:
    """The untried neighbours along the extended axes, diagonals included, of each group's best setting."""
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
    """The next smaller value that was tried, or else value / step; the value; the next larger, or value · step."""
    below, above = (other for other in tried if other < value), (other for other in tried if other > value)
    return max(below, default=value / step), value, min(above, default=value * step)


def _can_run(sweep: Sweep, setting: Setting) -> bool:
    """True if the batch can be cut into sequences, which halving may have made impossible."""
    try:
        sweep.run(setting)
    except UserError:
        return False
    return True
