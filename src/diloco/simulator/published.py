"""The papers' tables of bandwidth, wall-clock and payloads beside our simulation.

The settings of the simulation come from three places. From the papers: parameters, layers, H, fragments, τ, and
the step times of 1B, 10B, 100B, 405B and 671B as arXiv 2501.18512 prints them; arXiv 2503.09799 prints 26 and 20
for the last two, 26.9 and 20.1 cut off. From the meaning of the tables: the first shows the steady state. Fitted
here: the bits of a parameter, `BITS_PER_PARAM`, for all cells; 0.895 seconds for 10B in the second table, which
prints 0.8; and that its runs have H + 10 steps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from diloco.presets import Method
from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.description import MethodSettings
from diloco.simulator.paper import PaperModel


class Size(NamedTuple):
    """A model, and the machines that train it."""

    name: str
    num_params: float
    num_layers: int
    step_seconds: float

    def model(self, settings: MethodSettings) -> PaperModel:
        """A run of this size in the paper's simulator."""
        return PaperModel(
            settings=settings,
            num_params=self.num_params,
            num_layers=self.num_layers,
            step_seconds=self.step_seconds,
        )


SIZES = {
    size.name: size
    for size in (
        Size("1B", 1e9, 24, 0.1),
        Size("10B", 10e9, 48, 0.8),
        Size("100B", 100e9, 108, 4.9),
        Size("405B", 405e9, 126, 26.9),
        Size("671B", 671e9, 61, 20.1),
    )
}
"""The sizes of arXiv 2501.18512; the last two are Llama 405B and DeepSeek-V3."""
SCALING_SIZES = {"10B": SIZES["10B"]._replace(step_seconds=0.895), "405B": SIZES["405B"], "671B": SIZES["671B"]}
"""The sizes of arXiv 2503.09799."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
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
    ("100B", "data_parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming_overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming_overlapped_fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""arXiv 2501.18512, Table 5: the Gbit/s that reach each target; H = 100, strided fragments of 3 layers."""
SCALING_BANDWIDTHS: dict[tuple[str, int], tuple[float, ...]] = {
    ("10B", 0): (104.8, 184.2, 222.3, 222.3, 390.7),
    ("10B", 1): (104.8, 184.2, 222.3, 222.3, 390.7),
    ("10B", 10): (16.0, 49.4, 86.8, 152.6, 222.3),
    ("10B", 50): (3.0, 11.0, 23.3, 41.0, 126.5),
    ("10B", 100): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("10B", 300): (0.5, 2.0, 4.3, 9.1, 41.0),
    ("405B", 0): (126.5, 222.3, 268.3, 323.8, 323.8),
    ("405B", 1): (126.5, 222.3, 268.3, 323.8, 323.8),
    ("405B", 10): (19.3, 72.0, 126.5, 184.2, 268.3),
    ("405B", 50): (3.6, 13.3, 28.1, 59.6, 184.2),
    ("405B", 100): (2.0, 7.5, 16.0, 33.9, 126.5),
    ("405B", 300): (0.7, 3.0, 6.2, 13.3, 59.6),
    ("671B", 0): (323.8, 569.0, 686.6, 686.6, math.inf),
    ("671B", 1): (323.8, 569.0, 686.6, 686.6, math.inf),
    ("671B", 10): (49.4, 152.6, 268.3, 390.7, 686.6),
    ("671B", 50): (7.5, 33.9, 72.0, 126.5, 390.7),
    ("671B", 100): (4.3, 16.0, 41.0, 72.0, 268.3),
    ("671B", 300): (1.7, 6.2, 13.3, 28.1, 126.5),
}
"""arXiv 2503.09799, Table 6: Data-Parallel (0) and DiLoCo by H; infinite is more than the grid's largest."""

WALL_CLOCK_STEPS = 186_250
WALL_CLOCK_GBIT_S = (1.0, 10.0, 100.0, 1000.0)
WALL_CLOCK_HOURS: dict[Method, tuple[float, ...]] = {
    "data_parallel": (21 * 24, 2 * 24, 10, 5),
    "diloco": (12, 6, 5, 5),
    "streaming_overlapped_fp4": (6, 5, 5, 5),
}
"""Table 1: hours of the 1B model, rounded to hours or days. The paper prints GiB/s, but the numbers are Gbit/s."""


class Cost(NamedTuple):
    """Time and traffic of a replica in a run of the 1B model."""

    hours: float
    """Wall-clock time on a link of infinite bandwidth."""
    hours_1_gbit_s: float
    """Wall-clock time on a link of 1 Gbit/s."""
    tebibits: float
    """Payload, at 16 bits a gradient and 4 bits an outer gradient, in 2⁴⁰ bits."""


OVERTRAINING_COSTS: dict[tuple[Method, int], Cost] = {
    ("data_parallel", 25): Cost(0.67, 109, 441),
    ("data_parallel", 100): Cost(2.7, 438, 1767),
    ("data_parallel", 250): Cost(6.75, 1097, 4418),
    ("streaming_overlapped_fp4", 25): Cost(0.67, 0.88, 1.10),
    ("streaming_overlapped_fp4", 100): Cost(2.7, 3.5, 4.42),
    ("streaming_overlapped_fp4", 250): Cost(6.75, 8.75, 11.05),
}
"""arXiv 2501.18512, Table 2, by method and 10⁹ tokens: M = 2, H = 100. The paper prints TB for the last column."""
_OVERTRAINING_STEP_TOKENS = 512 * 2048
_OVERTRAINED = SIZES["1B"]._replace(num_params=32_000 * 2048 + 24 * 12 * 2048**2)
"""All parameters of the 1B model of Table 3, embeddings included: they give the column of payloads."""


@dataclass(frozen=True)
class Cell:
    """A published bandwidth beside ours, in Gbit/s."""

    published: float
    """The published bandwidth; infinite if no point of the grid is enough."""
    ours: float | None
    """Our bandwidth; None if no point of the grid is enough."""

    @property
    def distance(self) -> int:
        """The number of grid points by which ours is above the published."""
        beyond = len(GBIT_S)
        published = beyond if math.isinf(self.published) else round(49 / 4 * (math.log10(self.published) + 1))
        return (beyond if self.ours is None else GBIT_S.tolist().index(self.ours)) - published


Table = dict[tuple[str, str], tuple[Cell, ...]]
"""Rows by size and method; a cell for each of `TARGETS`."""


def bandwidth_tables() -> dict[str, Table]:
    """The published tables of bandwidth, each cell beside ours, by source."""
    first: Table = {
        (size, method): _row(published, SIZES[size].model(MethodSettings(method=method)), num_steps=None)
        for (size, method), published in BANDWIDTHS.items()
    }
    second: Table = {}
    for (size, sync_every), published in SCALING_BANDWIDTHS.items():
        if sync_every:
            name, settings = f"diloco, H = {sync_every}", MethodSettings(method="diloco", sync_every=sync_every)
        else:
            name, settings = "data_parallel", MethodSettings(method="data_parallel")
        model = SCALING_SIZES[size].model(settings)
        second[size, name] = _row(published, model, num_steps=sync_every + 10)
    return {"arXiv 2501.18512, Table 5": first, "arXiv 2503.09799, Table 6": second}


def _row(published: tuple[float, ...], model: PaperModel, *, num_steps: int | None) -> tuple[Cell, ...]:
    utilization = model.compute_utilization(GBIT_S, num_steps=num_steps)
    return tuple(Cell(cell, needed_gbit_s(utilization, at)) for cell, at in zip(published, TARGETS, strict=True))


def wall_clock_table() -> dict[Method, tuple[float, ...]]:
    """Table 1, simulated: hours at each of `WALL_CLOCK_GBIT_S`, by method."""
    table: dict[Method, tuple[float, ...]] = {}
    for method in WALL_CLOCK_HOURS:
        model = SIZES["1B"].model(MethodSettings(method=method))
        utilization = model.compute_utilization(WALL_CLOCK_GBIT_S)
        table[method] = tuple((WALL_CLOCK_STEPS * model.step_seconds / 3600 / utilization).tolist())
    return table


def overtraining_table() -> dict[tuple[Method, int], Cost]:
    """Table 2, simulated, by method and 10⁹ tokens."""
    table: dict[tuple[Method, int], Cost] = {}
    for method, billions in OVERTRAINING_COSTS:
        settings = MethodSettings(method=method, sync_every=100)
        (utilization,) = _OVERTRAINED.model(settings).compute_utilization((1.0,))
        num_steps = billions * 1e9 / _OVERTRAINING_STEP_TOKENS
        hours = num_steps * _OVERTRAINED.step_seconds / 3600
        bits_per_step = 16.0 if method == "data_parallel" else 4 / settings.sync_every
        tebibits = _OVERTRAINED.num_params * bits_per_step * num_steps / 2**40
        table[method, billions] = Cost(hours, hours / float(utilization), tebibits)
    return table
