"""The picture of `diloco plan` for a fleet: loss over dollars and over hours, of the plans that nothing beats."""

from collections.abc import Sequence
from pathlib import Path

from diloco.experiments.papers.experiment import Panel, Point
from diloco.fleets.planner import FleetPlan
from diloco.report.figures.drawing import draw_panel, new_figure, save


def draw_pareto(plans: Sequence[FleetPlan], directory: Path) -> list[Path]:
    """Write pareto.svg and pareto.png, and return their paths.

    Raises:
        UserError: if matplotlib is not installed, or the directory can't be written.
    """
    figure = new_figure(9.0, 3.9)
    pair = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(pair, ("dollars", "hours"), strict=True):
        curves: dict[str, list[Point]] = {}
        for plan in sorted(plans, key=lambda plan: getattr(plan, name)):
            where = "a store" if plan.store is not None else "a fixed group" if plan.num_replicas > 1 else "alone"
            low, high = plan.loss.low or plan.loss.value, plan.loss.high or plan.loss.value
            curves.setdefault(where, []).append(Point(getattr(plan, name), plan.loss.value, low, high))
        label = "expected loss, nats per token"
        draw_panel(Panel(title="", x_label=name, y_label=label, x_log=True, curves=curves), axes)
    return save(figure, directory, "pareto")
