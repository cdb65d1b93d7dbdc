"""The published tables of bandwidth and wall-clock beside our simulation (arXiv 2501.18512, Tables 1 and 5)."""

import math
from dataclasses import dataclass

from diloco.presets import Method
from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.methods import MethodSettings
from diloco.simulator.paper import PaperModel

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
SIZES = {"1B": (1e9, 24, 0.1), "10B": (10e9, 48, 0.8)}
"""Parameters, layers, and seconds of compute a step, by name."""
BANDWIDTHS: dict[tuple[str, Method], tuple[float, ...]] = {
    ("1B", "data_parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming_overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming_overlapped_fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data_parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming_overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming_overlapped_fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
}
"""Table 5: the Gbit/s that reach each target, rounded; H = 100, strided fragments of 3 layers."""

WALL_CLOCK_STEPS = 186_250
WALL_CLOCK_GBIT_S = (1.0, 10.0, 100.0, 1000.0)
WALL_CLOCK_HOURS: dict[Method, tuple[float, ...]] = {
    "data_parallel": (21 * 24, 2 * 24, 10, 5),
    "diloco": (12, 6, 5, 5),
    "streaming_overlapped_fp4": (6, 5, 5, 5),
}
"""Table 1: hours of the 1B model, rounded to hours or days. The paper prints GiB/s, but the numbers are Gbit/s."""


@dataclass(frozen=True)
class Cell:
    """A published bandwidth beside ours, in Gbit/s."""

    published: float
    ours: float | None
    """None if no point of the grid is enough."""

    @property
    def distance(self) -> int:
        """The number of grid points by which ours is above the published."""
        published = round(49 / 4 * (math.log10(self.published) + 1))
        ours = len(GBIT_S) if self.ours is None else GBIT_S.tolist().index(self.ours)
        return ours - published


def bandwidth_table() -> dict[tuple[str, Method], tuple[Cell, ...]]:
    """Table 5, published and simulated, by size and method; a cell for each of `TARGETS`."""
    table: dict[tuple[str, Method], tuple[Cell, ...]] = {}
    for (size, method), cells in BANDWIDTHS.items():
        utilization = _model(size, method).compute_utilization(GBIT_S)
        ours = [needed_gbit_s(utilization, target) for target in TARGETS]
        table[size, method] = tuple(map(Cell, cells, ours))
    return table


def wall_clock_table() -> dict[Method, tuple[float, ...]]:
    """Table 1, simulated: hours at each of `WALL_CLOCK_GBIT_S`, by method."""
    table: dict[Method, tuple[float, ...]] = {}
    for method in WALL_CLOCK_HOURS:
        utilization = _model("1B", method).compute_utilization(WALL_CLOCK_GBIT_S)
        table[method] = tuple((WALL_CLOCK_STEPS * SIZES["1B"][2] / 3600 / utilization).tolist())
    return table


def _model(size: str, method: Method) -> PaperModel:
    num_params, num_layers, step_seconds = SIZES[size]
    settings = MethodSettings(method=method, sync_every=100)
    return PaperModel(settings=settings, num_params=num_params, num_layers=num_layers, step_seconds=step_seconds)
