"""Figures of simulated runs: the papers' curves, and a registry of all by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from diloco.errors import UserError
from diloco.presets import METHODS, Method
from diloco.report.figures.drawing import MARKERS, STYLES, new_figure, save, viridis
from diloco.report.figures.schedules import fragment_patterns, schedules
from diloco.scaling.power_laws import SEQUENCE_LENGTH, batch_tokens
from diloco.scaling.table import method_name, published_table
from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.description import MethodSettings, Pattern
from diloco.simulator.paper import PaperModel
from diloco.simulator.published import SCALING_SIZES, SIZES, Size
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPERS = (SIZES["1B"], SIZES["10B"], SIZES["100B"])
_METHODS = {name: MethodSettings(method=name) for name in METHODS}
_STREAMING = MethodSettings(method="streaming_overlapped_fp4")


def methods() -> "Figure":
    """Every method at 1B, 10B, 100B (Figure 3 of arXiv 2501.18512)."""
    return _utilizations(_PAPERS, _METHODS)


def large_models() -> "Figure":
    """Every method at the sizes of Llama 405B and DeepSeek-V3 (arXiv 2501.18512)."""
    return _utilizations((SIZES["405B"], SIZES["671B"]), _METHODS)


def step_seconds() -> "Figure":
    """Every method at 100B with steps of 1, 5 and 10 seconds (arXiv 2501.18512)."""
    return _utilizations([SIZES["100B"]._replace(step_seconds=seconds) for seconds in (1.0, 5.0, 10.0)], _METHODS)


def sync_every() -> "Figure":
    """Streaming with overlap and 4 bits, H from 30 to 500."""
    return _utilizations(_PAPERS, {f"H = {h}": replace(_STREAMING, sync_every=h) for h in (30, 50, 100, 300, 500)})


def overlap_steps() -> "Figure":
    """Streaming with overlap and 4 bits, τ from 0 to 20."""
    return _utilizations(_PAPERS, {f"τ = {t}": replace(_STREAMING, overlap_steps=t) for t in (0, 1, 2, 5, 20)})


def layers_per_fragment() -> "Figure":
    """Streaming with overlap and 4 bits, fragments of 1 to 12 layers."""
    choices = {f"{n} layers a fragment": replace(_STREAMING, layers_per_fragment=n) for n in (1, 3, 6, 12)}
    return _utilizations(_PAPERS, choices)


def fragments() -> "Figure":
    """Strided and sequential fragments at 100B, without and with overlap (arXiv 2501.18512)."""
    methods: tuple[Method, ...] = ("streaming", "streaming_overlapped")
    panels = {
        f"100B, {method}": [
            _utilization(SIZES["100B"], pattern, MethodSettings(method=method, fragments=pattern))
            for pattern in get_args(Pattern)
        ]
        for method in methods
    }
    return _draw_utilization(panels)


def fragment_bandwidth() -> "Figure":
    """The largest payload, and the bandwidth for a utilization of 95 %, over the layers of a fragment.

    Both are relative to one fragment of all layers; the settings are streaming with overlap and 4 bits.
    """

    def line(size: Size, pattern: Pattern) -> Line:
        layers = [n for n in range(1, size.num_layers + 1) if size.num_layers % n == 0]
        settings = [replace(_STREAMING, fragments=pattern, layers_per_fragment=n) for n in layers]
        needed = [_interpolated_gbit_s(size.model(one), 0.95) for one in settings]
        return Line(f"Gbit/s for 95 %, {pattern}", layers, [gbit_s / needed[-1] for gbit_s in needed])

    panels = {
        size.name: [
            Line("largest payload", [1, size.num_layers], [1 / size.num_layers, 1]),
            line(size, "strided"),
            line(size, "sequential"),
        ]
        for size in _PAPERS
    }
    figure = draw_lines(
        panels, x_label="layers a fragment", y_label="relative to one fragment of all layers", markers=True
    )
    figure.axes[0].set_yscale("log")
    return figure


def _interpolated_gbit_s(model: PaperModel, target: float) -> float:
    utilization = model.compute_utilization(GBIT_S)
    return float(10 ** np.interp(target, utilization, np.log10(GBIT_S)))


def diloco_sync_every() -> "Figure":
    """DiLoCo with H from 1 to 300 at 10B, 405B, 671B (Figure 10 of arXiv 2503.09799)."""
    choices = {f"H = {h}": MethodSettings(method="diloco", sync_every=h) for h in (1, 10, 50, 100, 300)}
    return _utilizations(SCALING_SIZES.values(), choices)


def wall_clock() -> "Figure":
    """Published loss over idealized wall-clock time, on three networks (Figures 6 and 12 of arXiv 2503.09799).

    Each size is trained on 20·N tokens with the published best batch, on one chip for each of its sequences.
    """

    def line(num_replicas: int, network: NetworkName) -> Line:
        points = [point for point in published_table() if point.replicas == num_replicas]
        hours = [_run(point.params, num_replicas, network).seconds / 3600 for point in points]
        return Line(method_name(num_replicas), hours, [point.eval_loss for point in points])

    panels = {
        f"{name}: {network.gbit_s:g} Gbit/s between sites": [line(m, name) for m in (0, 1, 2, 4, 8)]
        for name, network in NETWORKS.items()
    }
    return draw_lines(panels, x_label="wall-clock, hours", y_label="held-out loss, nats a token", markers=True)


FIGURES: dict[str, Callable[[], "Figure"]] = {
    figure.__name__: figure
    for figure in (
        fragment_patterns,
        schedules,
        methods,
        large_models,
        step_seconds,
        sync_every,
        overlap_steps,
        fragments,
        layers_per_fragment,
        fragment_bandwidth,
        diloco_sync_every,
        wall_clock,
    )
}


def draw_figures(names: Iterable[str], directory: Path) -> list[Path]:
    """Write figures by name, and return the paths.

    Raises:
        UserError: for an unknown name; the message has the known ones.
    """
    names = list(names)
    for name in names:
        if name not in FIGURES:
            raise UserError(f"{name!r} is not a figure: choose from {', '.join(FIGURES)}")
    return [path for name in names for path in save(FIGURES[name](), directory, name)]


def _utilizations(sizes: Iterable[Size], choices: Mapping[str, MethodSettings]) -> "Figure":
    panels = {
        f"{size.name}, {size.step_seconds:g} s a step": [
            _utilization(size, label, settings) for label, settings in choices.items()
        ]
        for size in sizes
    }
    return _draw_utilization(panels)


def _utilization(size: Size, label: str, settings: MethodSettings) -> "Line":
    return Line(label, GBIT_S.tolist(), size.model(settings).compute_utilization(GBIT_S).tolist())


def _draw_utilization(panels: Mapping[str, Sequence["Line"]]) -> "Figure":
    return draw_lines(panels, x_label="bandwidth, Gbit/s", y_label="compute utilization", y_range=(0.0, 1.02))


def _run(num_params: float, num_replicas: int, network: NetworkName) -> IdealizedRun:
    batch = batch_tokens(num_params, num_replicas)
    return IdealizedRun(
        num_params=num_params,
        num_tokens=20 * num_params,
        batch_tokens=batch,
        num_chips=max(8, round(batch / SEQUENCE_LENGTH)),
        num_replicas=num_replicas,
        between=network,
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
