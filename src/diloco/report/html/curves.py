"""Figures of the two papers that a simulation gives: compute utilization over bandwidth, loss over wall-clock."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.presets import METHODS
from diloco.report.figures.pictures import Line, draw_lines, save
from diloco.scaling.published import LOSS, NUM_PARAMS, SEQUENCE_LENGTH, batch_tokens, method_name
from diloco.simulator.bandwidth import GBIT_S
from diloco.simulator.methods import MethodSettings
from diloco.simulator.paper import PaperModel
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Parameters, layers, seconds of compute a step: what the papers simulate.
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
    """Every method at the sizes of Llama 405B and DeepSeek-V3 (of the same paper)."""
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
    """Published loss over idealized wall-clock, on the three networks (Figures 6 and 12 of arXiv 2503.09799).

    Each size is trained on 20·N tokens with the published best batch, on one chip a sequence of it.
    """

    def line(num_replicas: int, network: str) -> Line:
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
    """Write figures by name.

    Raises:
        UserError: naming the figures that there are.
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


def _run(num_params: float, num_replicas: int, network: str) -> IdealizedRun:
    batch = batch_tokens(num_params, num_replicas)
    return IdealizedRun(
        num_params=num_params,
        num_tokens=20 * num_params,
        batch_tokens=batch,
        num_chips=max(8, round(batch / SEQUENCE_LENGTH)),
        num_replicas=num_replicas,
        between=NETWORKS[network],
    )
