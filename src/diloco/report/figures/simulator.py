"""Figures of simulated runs: the papers' curves, and timelines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diloco.errors import UserError
from diloco.presets import METHODS
from diloco.report.figures.drawing import MARKERS, STYLES, new_figure, save, viridis
from diloco.scaling.published import LOSS, NUM_PARAMS, SEQUENCE_LENGTH, batch_tokens, method_name
from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.methods import MethodSettings
from diloco.simulator.paper import PaperModel
from diloco.simulator.timeline import Interval, Kind
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Parameters, layers, seconds of compute a step, as the papers simulate them.
_SIZES = {
    "1B": (1e9, 24, 0.1),
    "10B": (10e9, 48, 0.8),
    "100B": (100e9, 108, 4.9),
    "405B": (405e9, 126, 26.0),
    "671B": (671e9, 61, 20.0),
}
_STREAMING = MethodSettings(method="streaming_overlapped_fp4")


def methods() -> "Figure":
    """Every method at 1B, 10B, 100B (Figure 3 of arXiv 2501.18512)."""
    return _utilization(("1B", "10B", "100B"), {name: MethodSettings(method=name) for name in METHODS})


def large_models() -> "Figure":
    """Every method at the sizes of Llama 405B and DeepSeek-V3 (arXiv 2501.18512)."""
    return _utilization(("405B", "671B"), {name: MethodSettings(method=name) for name in METHODS})


def sync_every() -> "Figure":
    """Streaming with overlap and 4 bits, H from 30 to 500."""
    return _utilization(
        ("1B", "10B", "100B"), {f"H = {h}": replace(_STREAMING, sync_every=h) for h in (30, 50, 100, 300, 500)}
    )


def overlap_steps() -> "Figure":
    """Streaming with overlap and 4 bits, τ from 0 to 20."""
    return _utilization(
        ("1B", "10B", "100B"), {f"τ = {tau}": replace(_STREAMING, overlap_steps=tau) for tau in (0, 1, 2, 5, 20)}
    )


def layers_per_fragment() -> "Figure":
    """Streaming with overlap and 4 bits, fragments of 1 to 12 layers."""
    choices = {f"{n} layers a fragment": replace(_STREAMING, layers_per_fragment=n) for n in (1, 3, 6, 12)}
    return _utilization(("1B", "10B", "100B"), choices)


def diloco_sync_every() -> "Figure":
    """DiLoCo with H from 1 to 300 at 10B, 405B, 671B (Figure 10 of arXiv 2503.09799)."""
    choices = {f"H = {h}": MethodSettings(method="diloco", sync_every=h) for h in (1, 10, 50, 100, 300)}
    return _utilization(("10B", "405B", "671B"), choices)


def wall_clock() -> "Figure":
    """Published loss over idealized wall-clock time, on three networks (Figures 6 and 12 of arXiv 2503.09799).

    Each size is trained on 20·N tokens with the published best batch, on one chip for each of its sequences.
    """

    def line(num_replicas: int, network: NetworkName) -> Line:
        hours = [_run(num_params, num_replicas, network).seconds / 3600 for num_params in NUM_PARAMS]
        return Line(method_name(num_replicas), hours, LOSS[num_replicas])

    panels = {
        f"{name}: {network.gbit_s:g} Gbit/s between sites": [line(m, name) for m in (0, 1, 2, 4, 8)]
        for name, network in NETWORKS.items()
    }
    return draw_lines(panels, x_label="wall-clock, hours", y_label="held-out loss, nats a token", markers=True)


FIGURES: dict[str, Callable[[], "Figure"]] = {
    figure.__name__: figure
    for figure in (
        methods,
        large_models,
        sync_every,
        overlap_steps,
        layers_per_fragment,
        diloco_sync_every,
        wall_clock,
    )
}


def draw_curves(names: Iterable[str], directory: Path) -> list[Path]:
    """Write figures by name, and return the paths.

    Raises:
        UserError: for an unknown name; the message has the known ones.
    """
    names = list(names)
    for name in names:
        if name not in FIGURES:
            raise UserError(f"{name!r} is not a figure: choose from {', '.join(FIGURES)}")
    return [path for name in names for path in save(FIGURES[name](), directory, name)]


def _utilization(sizes: Sequence[str], choices: dict[str, MethodSettings]) -> "Figure":
    def line(label: str, settings: MethodSettings, size: str) -> Line:
        num_params, num_layers, step_seconds = _SIZES[size]
        model = PaperModel(
            settings=settings, num_params=num_params, num_layers=num_layers, step_seconds=step_seconds
        )
        return Line(label, GBIT_S.tolist(), model.compute_utilization(GBIT_S).tolist())

    panels = {
        f"{size}, {_SIZES[size][2]:g} s a step": [line(label, chosen, size) for label, chosen in choices.items()]
        for size in sizes
    }
    return draw_lines(panels, x_label="bandwidth, Gbit/s", y_label="compute utilization", y_range=(0.0, 1.02))


def _run(num_params: float, num_replicas: int, network: NetworkName) -> IdealizedRun:
    batch = batch_tokens(num_params, num_replicas)
    return IdealizedRun(
        num_params=num_params,
        num_tokens=20 * num_params,
        batch_tokens=batch,
        num_chips=max(8, round(batch / SEQUENCE_LENGTH)),
        num_replicas=num_replicas,
        between=NETWORKS[network],
    )


class Line(NamedTuple):
    """A curve with its label in the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    *,
    x_label: str,
    y_label: str,
    x_log: bool = True,
    y_range: tuple[float, float] | None = None,
    markers: bool = False,
) -> "Figure":
    """Panels side by side, with a common y axis."""
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


# They differ in darkness, too.
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


def draw_timelines(panels: Mapping[str, Sequence[Interval]]) -> "Figure":
    """Panels of lanes, one for each replica and link; a bar is one activity, with the numbers of its layers."""
    lanes = {title: sorted({bar.lane for bar in bars}, key=_order) for title, bars in panels.items()}
    figure = new_figure(13, 0.6 + 0.55 * sum(len(names) + 1 for names in lanes.values()))
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=[len(names) for names in lanes.values()])
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
    edge = 0.4 if width > 0.002 * end else 0.0  # an edge would cover a narrower bar
    axes.barh(row, width, left=bar.start_seconds, height=0.8, color=color, edgecolor="white", linewidth=edge)
    if width > 0.008 * end * len(bar.layers):
        text = " ".join(str(layer + 1) for layer in bar.layers)
        dark = bar.kind in ("forward", "backward_parameters")
        middle, ink = bar.start_seconds + width / 2, "white" if dark else "black"
        axes.text(middle, row, text, ha="center", va="center", fontsize=7, color=ink)
