"""Pictures of scaling laws: a sweep's, or the published ones'."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diloco.experiments.experiment import Panel, Point
from diloco.report.experiments import draw_panel
from diloco.report.pictures import new_figure, save, viridis
from diloco.scaling.batches import loss_of_batches
from diloco.scaling.prediction import Laws
from diloco.scaling.published import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.table import Point as Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_over_params(laws: Laws) -> "Figure":
    """Loss over N with its laws, and a decade beyond (Figure 13 of arXiv 2503.09799).

    Of the published losses with those that were measured later, at 4B and 10B, as circles.
    """
    curves = {_name(m): [_point(p.params, p.eval_loss) for p in _of(laws.best, m)] for m in laws.replicas}
    figure, axes = _panel(Panel(title="lines are laws", x_label="parameters", x_log=True, curves=curves))
    for line in axes.get_lines():
        line.set_linestyle("")
    sizes = [point.params for point in laws.best]
    x = np.geomspace(min(sizes), 10 * max(sizes), 50)
    for index, replicas in enumerate(laws.replicas):
        if len(_of(laws.best, replicas)) > 1:
            law = laws.fit("loss", replicas, "independent").law
            shade = viridis(0.6 * index / max(1, len(laws.replicas) - 1))
            axes.plot(x, [law(n) for n in x], color=shade, lw=0.9)
    if laws.points is None:
        for (_, replicas), losses in EXTRAPOLATED.items():
            shade = viridis(0.6 * laws.replicas.index(replicas) / max(1, len(laws.replicas) - 1))
            axes.plot(EXTRAPOLATED_PARAMS, losses, ls="", marker="o", mfc="none", color=shade)
    _set_log_losses(axes)
    return figure


def _set_log_losses(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=[1, 1.5, 2, 2.5, 3, 4, 5, 7]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(LogLocator(subs=[]))


def difference_to_data_parallel(laws: Laws) -> "Figure":
    """How far each M's loss lies above Data-Parallel's (Figure 2)."""
    baseline = {point.params: point.eval_loss for point in _of(laws.best, 0)}
    curves = {
        _name(m): [
            _point(p.params, 100 * (p.eval_loss / baseline[p.params] - 1))
            for p in _of(laws.best, m)
            if p.params in baseline
        ]
        for m in laws.replicas
        if m > 0
    }
    label = "loss over Data-Parallel's, %"
    return _panel(Panel(title="", x_label="parameters", x_log=True, y_label=label, curves=curves))[0]


def loss_over_batch(laws: Laws) -> "Figure":
    """The best loss at each batch, a panel a size (Figure 4)."""
    runs = [run for run in laws.points or () if "batch_tokens" in run.settings]
    return _panels(runs, loss_of_batches, "global batch, tokens", x_log=True)


def loss_over_outer_learning_rate(laws: Laws) -> "Figure":
    """The best loss at each outer learning rate, a panel a size; its minima are those of Figure 7."""
    runs = [run for run in laws.points or () if "outer_learning_rate" in run.settings]
    return _panels(runs, _loss_of_rates, "outer learning rate η", x_log=False)


def _loss_of_rates(runs: Sequence[Run]) -> dict[float, float]:
    lowest: dict[float, float] = {}
    for run in runs:
        rate = run.settings["outer_learning_rate"]
        lowest[rate] = min(run.eval_loss, lowest.get(rate, math.inf))
    return dict(sorted(lowest.items()))


def best_outer_learning_rate(laws: Laws) -> "Figure":
    """Of those tried, over N (Figure 7)."""
    runs = [run for run in laws.points or () if "outer_learning_rate" in run.settings]
    curves = {}
    for replicas in sorted({run.replicas for run in runs}):
        sizes = sorted({run.params for run in runs if run.replicas == replicas})
        best = {n: min(_where(runs, n, replicas), key=lambda run: run.eval_loss) for n in sizes}
        curves[_name(replicas)] = [_point(n, run.settings["outer_learning_rate"]) for n, run in best.items()]
    label = "best outer learning rate"
    return _panel(Panel(title="", x_label="parameters", x_log=True, y_label=label, curves=curves))[0]


FIGURES: dict[str, Callable[[Laws], "Figure"]] = {
    figure.__name__: figure
    for figure in (
        loss_over_params,
        difference_to_data_parallel,
        loss_over_batch,
        loss_over_outer_learning_rate,
        best_outer_learning_rate,
    )
}


def draw_laws(laws: Laws, directory: Path) -> list[Path]:
    """Write every figure that the table has the columns for."""
    names = [name for name in FIGURES if _can_draw(name, laws)]
    return [path for name in names for path in save(FIGURES[name](laws), directory, name)]


def _can_draw(name: str, laws: Laws) -> bool:
    if name == "loss_over_params":
        return True
    if name == "difference_to_data_parallel":
        return 0 in laws.replicas
    column = "batch_tokens" if name == "loss_over_batch" else "outer_learning_rate"
    return any(column in run.settings for run in laws.points or ())


def _of(runs: Iterable[Run], replicas: int) -> list[Run]:
    return sorted((run for run in runs if run.replicas == replicas), key=lambda run: run.params)


def _where(runs: Iterable[Run], params: float, replicas: int) -> list[Run]:
    return [run for run in runs if (run.params, run.replicas) == (params, replicas)]


def _name(replicas: int) -> str:
    return f"DiLoCo, M = {replicas}" if replicas else "Data-Parallel"


def _point(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _panel(panel: Panel) -> "tuple[Figure, Axes]":
    figure = new_figure(4.8, 3.9)
    axes = figure.subplots()
    draw_panel(panel, axes)
    return figure, axes


def _panels(
    runs: Sequence[Run], losses: Callable[[Sequence[Run]], dict[float, float]], label: str, *, x_log: bool
) -> "Figure":
    sizes = sorted({run.params for run in runs})
    figure = new_figure(4.2 * len(sizes) + 0.4, 3.9)
    for params, axes in zip(sizes, figure.subplots(1, len(sizes), squeeze=False)[0], strict=True):
        curves = {
            _name(m): [_point(x, y) for x, y in losses(_where(runs, params, m)).items()]
            for m in sorted({run.replicas for run in runs if run.params == params})
        }
        draw_panel(Panel(title="", x_label=label, x_log=x_log, curves=curves), axes)
        axes.set_title(f"{params:.3g} parameters", fontsize=9)
    return figure
