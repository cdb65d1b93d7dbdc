"""Figures of scaling laws: those of a sweep, or the published ones."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.experiments.papers.experiment import Panel, Point
from diloco.report.figures.drawing import draw_panel, new_figure, save, viridis
from diloco.scaling.judgement import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.laws import Laws, losses_beside
from diloco.scaling.table import Point as Run
from diloco.scaling.table import best_points, method_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_over_params(laws: Laws) -> "Figure":
    """Loss over N with its laws, to ten times the largest N (Figure 13 of arXiv 2503.09799).

    Beside the published losses, circles are those that were measured later, at 4B and 10B.
    """
    curves = _curves(laws, lambda m: [_point(p.params, p.eval_loss) for p in _of(laws.best, m)])
    figure = _panel(Panel(title="lines are laws", x_label="parameters", x_log=True, curves=curves))
    (axes,) = figure.axes
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
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def difference_to_data_parallel(laws: Laws) -> "Figure":
    """Loss of each M over Data-Parallel's, in percent (Figure 2)."""
    baseline = {point.params: point.eval_loss for point in _of(laws.best, 0)}

    def points(replicas: int) -> list[Point]:
        comparable = [point for point in _of(laws.best, replicas) if replicas and point.params in baseline]
        return [_point(p.params, 100 * (p.eval_loss / baseline[p.params] - 1)) for p in comparable]

    label = "loss over Data-Parallel's, %"
    return _panel(Panel(title="", x_label="parameters", x_log=True, y_label=label, curves=_curves(laws, points)))


def loss_over_batch(laws: Laws) -> "Figure":
    """The best loss at each batch, a panel for each size (Figure 4)."""
    figure = _panels(laws, "batch_tokens", _loss_of_batches, "global batch, tokens")
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    return figure


def _loss_of_batches(runs: Sequence[Run]) -> dict[float, float]:
    return losses_beside(runs, best_points(list(runs))[0], "batch_tokens")


def loss_over_outer_learning_rate(laws: Laws) -> "Figure":
    """The best loss at each outer learning rate, a panel for each size; Figure 7 shows the minima."""
    return _panels(laws, "outer_learning_rate", _loss_of_rates, "outer learning rate η")


def _loss_of_rates(runs: Sequence[Run]) -> dict[float, float]:
    lowest: dict[float, float] = {}
    for run in runs:
        rate = run.settings["outer_learning_rate"]
        lowest[rate] = min(run.eval_loss, lowest.get(rate, math.inf))
    return dict(sorted(lowest.items()))


def best_outer_learning_rate(laws: Laws) -> "Figure":
    """The best outer learning rate that was tried, over N (Figure 7)."""
    runs = _with(laws, "outer_learning_rate")

    def points(replicas: int) -> list[Point]:
        losses = {n: _loss_of_rates(_where(runs, n, replicas)) for n in sorted({run.params for run in runs})}
        return [_point(n, min(at_n, key=at_n.__getitem__)) for n, at_n in losses.items() if at_n]

    label = "best outer learning rate"
    return _panel(Panel(title="", x_label="parameters", x_log=True, y_label=label, curves=_curves(laws, points)))


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
    """Write every figure for which the table has the columns, and return the paths."""
    names = [name for name in FIGURES if _can_draw(name, laws)]
    return [path for name in names for path in save(FIGURES[name](laws), directory, name)]


def _can_draw(name: str, laws: Laws) -> bool:
    if name == "loss_over_params":
        return True
    if name == "difference_to_data_parallel":
        baseline = {point.params for point in _of(laws.best, 0)}
        return any(point.replicas and point.params in baseline for point in laws.best)
    column = "batch_tokens" if name == "loss_over_batch" else "outer_learning_rate"
    return any(column in run.settings for run in laws.points or ())


def _of(runs: Iterable[Run], replicas: int) -> list[Run]:
    return sorted((run for run in runs if run.replicas == replicas), key=lambda run: run.params)


def _where(runs: Iterable[Run], params: float, replicas: int) -> list[Run]:
    return [run for run in runs if (run.params, run.replicas) == (params, replicas)]


def _point(x: float, y: float) -> Point:
    return Point(x, y, y, y)


def _panel(panel: Panel) -> "Figure":
    figure = new_figure(4.8, 3.9)
    draw_panel(panel, figure.subplots())
    return figure


def _panels(
    laws: Laws, quantity: str, losses: Callable[[Sequence[Run]], dict[float, float]], label: str
) -> "Figure":
    """A panel per model size, of the losses over a quantity, with a curve per number of replicas."""
    runs = _with(laws, quantity)
    sizes = sorted({run.params for run in runs})
    figure = new_figure(4.2 * len(sizes) + 0.4, 4.2)
    handles: dict[str, Any] = {}
    for params, axes in zip(sizes, figure.subplots(1, len(sizes), squeeze=False)[0], strict=True):

        def points(replicas: int, params: float = params) -> list[Point]:
            chosen = _where(runs, params, replicas)
            return [_point(x, y) for x, y in losses(chosen).items()] if chosen else []

        draw_panel(Panel(title="", x_label=label, curves=_curves(laws, points)), axes)
        axes.set_title(f"{params / 1e6:.3g} million parameters", fontsize=9)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend_.remove()
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    return figure


def _curves(laws: Laws, points: Callable[[int], list[Point]]) -> dict[str, list[Point]]:
    """A curve for each M, even an empty one, so that each M looks the same in every figure."""
    return {method_name(m): points(m) for m in laws.replicas}


def _with(laws: Laws, quantity: str) -> list[Run]:
    return [run for run in laws.points or () if quantity in run.settings]
