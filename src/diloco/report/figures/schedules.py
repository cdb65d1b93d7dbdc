"""Schedules in time: what replicas and links do in each step, and which layers each sync takes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.presets import Method
from diloco.report.figures.drawing import new_figure, viridis
from diloco.simulator.description import MethodSettings
from diloco.simulator.paper import PaperModel
from diloco.simulator.timeline import Interval, Kind, paper_timeline

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
    """The layers that each sync takes, a row a layer, with sequential and with strided fragments."""
    num_layers, num_rounds = 9, 2
    figure = new_figure(8.4, 3.4)
    patterns = replace(_STREAMING, fragments="sequential"), _STREAMING
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


_STREAMING = MethodSettings(method="streaming", sync_every=4)


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
