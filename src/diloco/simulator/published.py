"""The papers' tables of bandwidth, wall-clock and payloads beside our simulation.

The settings of the simulation come from three places. From the papers: parameters, layers, H, fragments, τ, and
the step times of 1B, 10B, 100B, 405B and 671B as arXiv 2501.18512 prints them; arXiv 2503.09799 prints 26 and 20
for the last two, 26.9 and 20.1 cut off. From the meaning of the tables: the first shows the steady state. Fitted
here: the bits of a parameter, `BITS_PER_PARAM`, for all cells; 0.895 seconds for 10B in the second table, which
prints 0.8; and that its runs have H + 10 steps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco.paper_tables import rows
from diloco.presets import Method
from diloco.simulator.description import GBIT_S, MethodSettings, needed_gbit_s
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


def _sizes(table: str) -> dict[str, Size]:
    return {row["name"]: Size(**row) for row in rows(table)}


SIZES = _sizes("streaming_sizes")
"""The sizes of arXiv 2501.18512; the last two are Llama 405B and DeepSeek-V3."""
SCALING_SIZES = _sizes("scaling_sizes")
"""The sizes of arXiv 2503.09799."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
WALL_CLOCK_STEPS = 186_250
WALL_CLOCK_GBIT_S = (1.0, 10.0, 100.0, 1000.0)
WALL_CLOCK_HOURS: dict[Method, tuple[float, ...]] = {
    row["method"]: tuple(row[f"{gbit_s:g}"] for gbit_s in WALL_CLOCK_GBIT_S)
    for row in rows("streaming_wall_clock")
}
"""Table 1: hours of the 1B model, rounded to hours or days. The paper prints GiB/s, but the numbers are Gbit/s."""


class Cost(NamedTuple):
    """Time and traffic of a replica in a run of the 1B model."""

    hours: float | None
    """Wall-clock time on a link of infinite bandwidth; None where the paper prints none."""
    hours_1_gbit_s: float | None
    """Wall-clock time on a link of 1 Gbit/s; None likewise."""
    tebibits: float
    """Payload, at 16 bits per gradient and 4 bits per outer gradient, in 2⁴⁰ bits."""


OVERTRAINING_COSTS: dict[tuple[Method, int, int], Cost] = {
    (row["method"], row.get("replicas", 2), row["tokens_billion"]): Cost(
        row.get("hours"), row.get("hours_1_gbit_s"), row["tebibits"]
    )
    for row in rows("streaming_overtraining")
}
"""arXiv 2501.18512, Tables 2 and 8, by method, M and 10⁹ tokens: H = 100. The paper prints TB for the last."""
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
        """The number of grid points by which ours is above the published, or the nearest that is printed so."""
        beyond = len(GBIT_S)
        ours = beyond if self.ours is None else GBIT_S.tolist().index(self.ours)
        alike = [index for index, point in enumerate(GBIT_S.tolist()) if _printed(point) == self.published]
        return min((ours - index for index in alike or [beyond]), key=abs)


def _printed(gbit_s: float) -> float:
    """A point of the grid as the papers print it: to two decimals, and then to one.

    >>> _printed(0.44984), _printed(6.25055), _printed(323.74576)
    (0.5, 6.2, 323.8)
    """
    return round(round(gbit_s, 2), 1)


Table = dict[tuple[str, str], tuple[Cell, ...]]
"""Rows by size and method; a cell for each of `TARGETS`."""


def bandwidth_tables() -> dict[str, Table]:
    """The published tables of bandwidth, each cell beside ours, by source."""
    first: Table = {
        (row["size"], row["method"]): _cells(row, SIZES[row["size"]], MethodSettings(method=row["method"]))
        for row in rows("streaming_bandwidth")
    }
    second: Table = {}
    for row in rows("scaling_bandwidth"):
        sync_every = row["sync_every"]
        if sync_every:
            name, settings = f"diloco, H = {sync_every}", MethodSettings(method="diloco", sync_every=sync_every)
        else:
            name, settings = "data_parallel", MethodSettings(method="data_parallel")
        size = SCALING_SIZES[row["size"]]
        second[row["size"], name] = _cells(row, size, settings, num_steps=sync_every + 10)
    return {"arXiv 2501.18512, Table 5": first, "arXiv 2503.09799, Table 6": second}


def _cells(
    row: dict[str, Any], size: Size, settings: MethodSettings, *, num_steps: int | None = None
) -> tuple[Cell, ...]:
    utilization = size.model(settings).compute_utilization(GBIT_S, num_steps=num_steps)
    return tuple(Cell(row[f"{target:g}"], needed_gbit_s(utilization, target)) for target in TARGETS)


def wall_clock_table() -> dict[Method, tuple[float, ...]]:
    """Table 1, simulated: hours at each of `WALL_CLOCK_GBIT_S`, by method."""
    table: dict[Method, tuple[float, ...]] = {}
    for method in WALL_CLOCK_HOURS:
        model = SIZES["1B"].model(MethodSettings(method=method))
        utilization = model.compute_utilization(WALL_CLOCK_GBIT_S)
        table[method] = tuple((WALL_CLOCK_STEPS * model.step_seconds / 3600 / utilization).tolist())
    return table


def overtraining_table() -> dict[tuple[Method, int, int], Cost]:
    """Tables 2 and 8, simulated, by method, M and 10⁹ tokens."""
    table: dict[tuple[Method, int, int], Cost] = {}
    for method, num_replicas, billions in OVERTRAINING_COSTS:
        settings = MethodSettings(method=method, sync_every=100)
        (utilization,) = _OVERTRAINED.model(settings).compute_utilization((1.0,))
        # With M = 4 the batch is doubled.
        num_steps = billions * 1e9 / (_OVERTRAINING_STEP_TOKENS * num_replicas / 2)
        hours = num_steps * _OVERTRAINED.step_seconds / 3600
        bits_per_step = 16.0 if method == "data_parallel" else 4 / settings.sync_every
        tebibits = _OVERTRAINED.num_params * bits_per_step * num_steps / 2**40
        table[method, num_replicas, billions] = Cost(hours, hours / float(utilization), tebibits)
    return table
