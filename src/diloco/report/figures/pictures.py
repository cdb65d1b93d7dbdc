"""Figures of the simulator, as SVG and PNG: readable in grey, with units on the axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diloco.errors import UserError
from diloco.simulator.timeline import Interval, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by how dark they are, too.
_COLORS: dict[Kind, str] = {
    "forward": "#2b5c9e",
    "backward_activations": "#b8e0b0",
    "backward_parameters": "#4f9a5c",
    "exchange": "#b48fd0",
}
_NAMES: dict[Kind, str] = {
    "forward": "forward",
    "backward_activations": "backward, activations",
    "backward_parameters": "backward, parameters",
    "exchange": "exchange",
}
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x")
"""Curves differ in style, marker and darkness."""


class Line(NamedTuple):
    """A curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches.

    Raises:
        UserError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install '.[pictures]' in diloco's clone") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png."""
    import matplotlib as mpl

    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.svg", directory / f"{name}.png"]
    # The same picture is the same file; its text stays text.
    with mpl.rc_context({"svg.hashsalt": "diloco", "svg.fonttype": "none"}):
        figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150)
    return paths


def draw_timelines(panels: Mapping[str, Sequence[Interval]]) -> "Figure":
    """A panel each: a lane a replica and a link, a bar for whatever it does, with the layers that it is about."""
    lanes = {title: sorted({bar.lane for bar in bars}, key=_order) for title, bars in panels.items()}
    figure = new_figure(13, 0.6 + 0.55 * sum(len(found) + 1 for found in lanes.values()))
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=[len(found) for found in lanes.values()])
    end = max(bar.end_seconds for bars in panels.values() for bar in bars)
    for (title, bars), axes in zip(panels.items(), all_axes[:, 0], strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        for bar in bars:
            _draw_bar(axes, bar, lanes[title].index(bar.lane), end)
        axes.set_yticks(range(len(lanes[title])), lanes[title])
        axes.invert_yaxis()
        axes.set_xlim(0, end)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("time, seconds")
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=_NAMES[kind]) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    return figure


def _order(lane: str) -> tuple[int, str]:
    name, _, number = lane.partition(" ")
    return int(number), "replica" if name == "replica" else "~"


def _draw_bar(axes: "Axes", bar: Interval, row: int, end: float) -> None:
    width, color = bar.end_seconds - bar.start_seconds, _COLORS[bar.kind]
    edge = 0.4 if width > 0.002 * end else 0.0  # or it would cover the bar
    axes.barh(row, width, left=bar.start_seconds, height=0.8, color=color, edgecolor="white", linewidth=edge)
    if width > 0.008 * end * len(bar.layers):
        text = " ".join(str(layer + 1) for layer in bar.layers)
        dark = bar.kind in ("forward", "backward_parameters")
        middle, ink = bar.start_seconds + width / 2, "white" if dark else "black"
        axes.text(middle, row, text, ha="center", va="center", fontsize=7, color=ink)


def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    *,
    x_label: str,
    y_label: str,
    x_log: bool = True,
    y_range: tuple[float, float] | None = None,
    markers: bool = False,
) -> "Figure":
    """A panel each, side by side with a common y axis; curves differ in style, and not in colour alone."""
    figure = new_figure(4.2 * len(panels) + 0.4, 3.9)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    greys = np.linspace(0.0, 0.6, max(map(len, panels.values())))
    for (title, lines), axes in zip(panels.items(), all_axes, strict=True):
        for line, style, marker, grey in zip(lines, STYLES, MARKERS, greys, strict=False):
            color = viridis(grey)
            axes.plot(
                line.x, line.y, ls=style, color=color, label=line.label, marker=marker if markers else None, ms=4
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x_label)
        axes.grid(visible=True, which="major", color="0.9")
        if x_log:
            axes.set_xscale("log")
        if y_range is not None:
            axes.set_ylim(*y_range)
    all_axes[0].set_ylabel(y_label)
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    return figure


def viridis(part: float) -> tuple[float, float, float, float]:
    """A colour that tells apart in grey, from 0, dark, to 0.6, light."""
    import matplotlib as mpl

    return mpl.colormaps["viridis"](1.4 * part)
