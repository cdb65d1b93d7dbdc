"""The style of all figures, readable in grey and the same file for the same picture; panels of experiments."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.files import make_directory, require, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from diloco.experiments.papers.comparison import Row
    from diloco.experiments.papers.experiment import Experiment, Panel

STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x")
"""Markers of the curves, which differ in style and darkness, too."""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure.

    Args:
        width: inches.
        height: inches.

    Raises:
        UserError: if matplotlib is not installed.
    """
    figure = require("matplotlib.figure", extra="pictures")
    return figure.Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png, and return their paths."""
    import matplotlib as mpl

    make_directory(directory)
    paths = [directory / f"{name}.svg", directory / f"{name}.png"]
    # Without these settings the ids and the date in the SVG would differ each time; its text stays text.
    with mpl.rc_context({"svg.hashsalt": "diloco", "svg.fonttype": "none"}), writing(paths[0]):
        figure.savefig(paths[0], metadata={"Date": None})
    with writing(paths[1]):
        figure.savefig(paths[1], dpi=150)
    return paths


def viridis(part: float) -> tuple[float, float, float, float]:
    """A colour whose darkness follows `part`, from 0 (dark) to 0.6 (light)."""
    import matplotlib as mpl

    return mpl.colormaps["viridis"](1.4 * part)


def draw_experiment(experiment: "Experiment", rows: "Sequence[Row]") -> "Figure":
    """All panels of an experiment, side by side, in rows of at most four."""
    panels = experiment.panels(rows)
    num_columns = min(_MOST_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = new_figure(4.2 * num_columns + 0.4, 3.9 * num_rows)
    all_axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for panel, axes in zip(panels, all_axes, strict=False):
        draw_panel(panel, axes)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    return figure


_MOST_COLUMNS = 4


def draw_panel(panel: "Panel", axes: "Axes") -> None:
    """Curves with the range over the seeds; where x is a name, unconnected points over the names."""
    ticks = {name: index for index, name in enumerate(panel.names)}
    shades = len(panel.curves) - 1 or 1
    for index, (label, points) in enumerate(panel.curves.items()):
        if not points:
            continue
        axes.errorbar(
            [ticks[p.x] if isinstance(p.x, str) else p.x for p in points],
            [p.mean for p in points],
            yerr=[[p.mean - p.low for p in points], [p.high - p.mean for p in points]],
            color=viridis(0.6 * index / shades),
            ls="none" if ticks else STYLES[index % len(STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            ms=4,
            capsize=3,
            label=label,
        )
    if ticks:
        axes.set_xticks(list(ticks.values()), [name.replace("_", " ") for name in ticks], rotation=30, ha="right")
        axes.margins(x=0.15)
    if panel.x_log:
        set_log_ticks(axes)
    axes.set_title("" if panel.legend else panel.title, fontsize=9)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(visible=True, which="major", color="0.9")
    if any(panel.curves):
        axes.legend(fontsize=8, frameon=False, title=panel.legend or None, title_fontsize=8)


def set_log_ticks(axes: "Axes") -> None:
    """Make the axis logarithmic, with few ticks over about a decade: the labels of matplotlib's would overlap."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 30 * low:
        is_short = high < 4 * low
        axes.xaxis.set_major_locator(MaxNLocator(4) if is_short else LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
        axes.xaxis.set_minor_locator(NullLocator())
