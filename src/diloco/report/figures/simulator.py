"""Figures of simulated runs: what replicas and links do in each step, the papers' curves, and all by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from diloco.errors import UserError
from diloco.presets import METHODS, Method
from diloco.report.figures.drawing import MARKERS, STYLES, new_figure, save, viridis
from diloco.scaling.judgement import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.power_laws import SEQUENCE_LENGTH, batch_tokens
from diloco.scaling.table import method_name, published_table
from diloco.simulator.churn import Glance
from diloco.simulator.description import GBIT_S, MethodSettings, Pattern
from diloco.simulator.fleet import FleetRun
from diloco.simulator.paper import PaperModel
from diloco.simulator.published import SCALING_SIZES, SIZES, Size
from diloco.simulator.timeline import Interval, Kind, paper_timeline
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def schedules() -> "Figure":
    """The schedule of each method: two layers, a fragment of one layer, H = 2, τ = 1 where it overlaps."""
    methods: tuple[Method, ...] = ("data_parallel", "diloco", "streaming", "streaming_overlapped")

    def intervals(method: Method) -> list[Interval]:
        settings = MethodSettings(method=method, sync_every=2, layers_per_fragment=1)
        model = PaperModel(settings=settings, num_params=1e9, num_layers=2, step_seconds=0.1)
        return paper_timeline(model, gbit_s=200, num_steps=4)

    return draw_timelines({method: intervals(method) for method in methods})


def fragment_patterns() -> "Figure":
    """The layers that each sync takes, a row per layer, with sequential and with strided fragments."""
    num_layers, num_rounds = 9, 2
    figure = new_figure(8.4, 3.4)
    strided = MethodSettings(method="streaming", sync_every=4)
    patterns = replace(strided, fragments="sequential"), strided
    for settings, axes in zip(patterns, figure.subplots(1, 2, sharey=True), strict=True):
        fragments = [*settings.layers(num_layers), range(num_layers, num_layers + 1)]
        schedule = settings.schedule(len(fragments))
        last_step = schedule.send_step(len(fragments) - 1, num_rounds)
        syncs = [sync for step in range(1, last_step + 1) for sync in schedule.sent(step)]
        for layer in range(num_layers + 1):
            axes.axhline(layer, color="0.9", zorder=0)
        for index, sync in enumerate(syncs):
            color = viridis(0.6 * sync.fragment / (len(fragments) - 1))
            for layer in fragments[sync.fragment]:
                axes.barh(layer, 1, left=index, height=0.85, color=color, edgecolor="white")
        axes.set(title=f"{settings.fragments} fragments", xlabel="syncs, in the order of time", xticks=[])
        axes.set_yticks(range(num_layers + 1), [*map(str, range(1, num_layers + 1)), "embeddings"])
        axes.set_xlim(0, len(syncs))
    figure.axes[0].invert_yaxis()
    figure.axes[0].set_ylabel("layer")
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


_NUM_COLUMNS, _MOST_ROWS = 600, 200


def draw_fleet(run: FleetRun, glances: Sequence[Glance]) -> "Figure":
    """A fleet over time: goodput, replicas per outer step, and which replicas are up.

    Args:
        run: the fleet.
        glances: after each outer step; of a larger fleet some replicas of each kind are drawn.
    """
    hours = np.array([glance.seconds for glance in glances]) / 3600
    figure = new_figure(9, 7)
    goodput, counted, up = figure.subplots(3, sharex=True, height_ratios=(2, 2, 3))
    possible = 3600 * run.ideal_tokens_per_second
    tokens = np.array([glance.tokens for glance in glances])
    width = max(1, len(glances) // 30)
    recent = (tokens[width:] - tokens[:-width]) / (possible * np.maximum(hours[width:] - hours[:-width], 1e-9))
    goodput.plot(hours[width:], recent, color=viridis(0.4), label=f"last {width} outer steps")
    goodput.plot(hours, tokens / (possible * hours), color="black", ls="--", label="since the beginning")
    goodput.set(ylabel="goodput", ylim=(0, 1.05))
    goodput.legend(fontsize=8, frameon=False, loc="lower right")
    num_up = [int(glance.is_up_M.sum()) for glance in glances]
    counted.plot(hours, num_up, color="black", lw=1, label="up")
    counted.plot(
        hours, [glance.contributors for glance in glances], ".", ms=3, color=viridis(0.4), label="counted"
    )
    counted.set(ylabel="replicas", ylim=(0, 1.05 * run.num_replicas))
    counted.legend(fontsize=8, frameon=False, loc="lower right")
    _draw_up(up, run, glances)
    up.set_xlabel("time, hours")
    for axes in (goodput, counted):
        axes.grid(visible=True, color="0.9")
    return figure


def _draw_up(axes: "Axes", run: FleetRun, glances: Sequence[Glance]) -> None:
    """A row per replica, dark where it is up."""
    end = glances[-1].seconds
    edges = np.linspace(0, end, min(_NUM_COLUMNS, len(glances)) + 1)
    columns = np.searchsorted([glance.seconds for glance in glances], edges[1:])
    rows = np.unique(np.linspace(0, run.num_replicas - 1, min(_MOST_ROWS, run.num_replicas)).astype(int))
    up_RxC = np.array([glances[column].is_up_M[rows] for column in columns]).T
    axes.pcolormesh(
        edges / 3600, np.arange(len(rows) + 1), up_RxC, cmap="Greys", vmin=0, vmax=1.6, rasterized=True
    )
    places = [(place.start + place.stop - 1) / 2 for place in run.places]
    axes.set_yticks(np.searchsorted(rows, places) + 0.5, [kind.name for kind in run.machines])
    for place in run.places[1:]:
        axes.axhline(np.searchsorted(rows, place.start), color="black", lw=0.8)
    axes.set(ylabel="who is up", ylim=(len(rows), 0))


_PAPERS = (SIZES["1B"], SIZES["10B"], SIZES["100B"])
_METHODS: dict[str, MethodSettings] = {name: MethodSettings(method=name) for name in METHODS}
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
    choices = {f"{n} layers per fragment": replace(_STREAMING, layers_per_fragment=n) for n in (1, 3, 6, 12)}
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
        panels, x_label="layers per fragment", y_label="relative to one fragment of all layers", markers=True
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

    Each size is trained on 20·N tokens with the batch of the published laws of each M, as 4B and 10B were in the
    paper, on one chip for each of its sequences.
    """

    def line(num_replicas: int, network: NetworkName) -> Line:
        losses = {point.params: point.eval_loss for point in published_table() if point.replicas == num_replicas}
        losses |= zip(EXTRAPOLATED_PARAMS, EXTRAPOLATED.get(("independent", num_replicas), ()), strict=False)
        hours = [_run(params, num_replicas, network).seconds / 3600 for params in losses]
        return Line(method_name(num_replicas), hours, list(losses.values()))

    panels = {
        f"{name}: {network.gbit_s:g} Gbit/s between sites": [line(m, name) for m in (0, 1, 2, 4, 8)]
        for name, network in NETWORKS.items()
    }
    return draw_lines(panels, x_label="wall-clock, hours", y_label="held-out loss, nats per token", markers=True)


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
    y_range: tuple[float, float] | None = None,
    markers: bool = False,
) -> "Figure":
    """Panels side by side, with a common y axis, and logarithmic x axes."""
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
        axes.set_xscale("log")
        if y_range is not None:
            axes.set_ylim(*y_range)
    all_axes[0].set_ylabel(y_label)
    handles, labels = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    return figure
