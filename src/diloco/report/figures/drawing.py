"""The style of all figures: readable in grey, and the same file for the same picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diloco.files import make_directory, require, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def new_axes(x_label: str, y_label: str) -> "tuple[Figure, Axes]":
    """A figure so small that its text is legible on a phone."""
    figure = new_figure(4.4, 3.1)
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def binned_means(values: Sequence[float], most: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Cut into `most` equal parts at the most: the last step and the mean of each."""
    parts = np.array_split(np.arange(len(values)), min(most, len(values)))
    return np.array([part[-1] + 1 for part in parts]), np.array([np.mean(np.take(values, part)) for part in parts])
