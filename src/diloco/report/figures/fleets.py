"""The picture of `diloco plan` for a fleet: loss over dollars and over hours, of the plans that nothing beats."""

from collections.abc import Sequence
from pathlib import Path

from diloco.fleets.planner import FleetPlan
from diloco.report.figures.drawing import MARKERS, new_figure, save, set_log_ticks, viridis


def draw_pareto(plans: Sequence[FleetPlan], directory: Path) -> list[Path]:
    """Write pareto.svg and pareto.png, and return their paths.

    The line is the least loss for at most so many dollars or hours, whatever the other costs; the band is its 95 %
    interval by the laws.

    Raises:
        UserError: if matplotlib is not installed, or the directory can't be written.
    """
    figure = new_figure(9.0, 3.9)
    pair = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(pair, ("dollars", "hours"), strict=True):
        least: list[FleetPlan] = []
        for plan in sorted(plans, key=lambda plan: (getattr(plan, name), plan.loss.value)):
            if not least or plan.loss.value < least[-1].loss.value:
                least.append(plan)
        end = max(getattr(plan, name) for plan in plans)
        x = [*(getattr(plan, name) for plan in least), end]
        loss, low, high = (
            [value(plan) for plan in [*least, least[-1]]]
            for value in (lambda p: p.loss.value, lambda p: p.loss.low, lambda p: p.loss.high)
        )
        axes.step(x, loss, where="post", color=viridis(0.0), lw=1.2)
        axes.fill_between(x, low, high, step="post", color=viridis(0.0), alpha=0.12, lw=0)
        for index, where in enumerate(("a store", "a fixed group", "alone")):
            chosen = [plan for plan in plans if _where(plan) == where]
            axes.plot(
                [getattr(plan, name) for plan in chosen],
                [plan.loss.value for plan in chosen],
                ls="none",
                marker=MARKERS[index],
                ms=4,
                color=viridis(0.25 * index),
                label=where,
            )
        set_log_ticks(axes)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set(xlabel=name)
        axes.grid(visible=True, which="major", color="0.9")
    pair[0].set(ylabel="expected loss, nats per token")
    pair[1].legend(fontsize=8, frameon=False)
    return save(figure, directory, "pareto")


def _where(plan: FleetPlan) -> str:
    if plan.store is not None:
        return "a store"
    return "alone" if plan.num_replicas == 1 else "a fixed group"
