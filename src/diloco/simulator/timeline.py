"""The intervals in which each replica and each link is busy, for pictures of a few steps."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from diloco.errors import UserError
from diloco.simulator.paper import PaperModel, PaperRun
from diloco.simulator.physical import PhysicalModel, PhysicalRun
from diloco.simulator.steady import Times

Kind = Literal["forward", "backward_activations", "backward_parameters", "exchange"]


class Interval(NamedTuple):
    """A bar of the picture."""

    lane: str
    """`replica 0` or `link 0`."""
    kind: Kind
    start_seconds: float
    end_seconds: float
    layers: tuple[int, ...]
    """The layers, counted from 0; L is everything outside the blocks."""


def paper_timeline(model: PaperModel, *, gbit_s: float, num_steps: int) -> list[Interval]:
    """The first steps in the paper's simulator: one replica and the network.

    Raises:
        UserError: if the bandwidth or `num_steps` is out of range.
    """
    _check(num_steps)
    run = PaperRun(model, gbit_s)
    part_seconds = model.step_seconds / (3 * model.num_layers - 1)
    intervals: list[Interval] = []
    for step in range(1, num_steps + 1):
        now, awaited = run.clock_B[0], run.awaited.get(step, {})
        for layer in range(model.num_layers):
            start = max(now, awaited[layer][0]) if layer in awaited else now
            now = start + part_seconds
            intervals.append(Interval("replica 0", "forward", start, now, (layer,)))
        intervals += _backward("replica 0", model.num_layers, now, part_seconds)
        before = set(run.awaited)
        run.take(step)
        for launched in set(run.awaited) - before:
            for layer, end_B in run.awaited[launched].items():
                start = end_B[0] - run.reduction_B[0]
                intervals.append(Interval("link 0", "exchange", start, end_B[0], (layer,)))
    return intervals


def physical_timeline(model: PhysicalModel, *, gbit_s: float, num_steps: int) -> list[Interval]:
    """The first steps in the physical model: M replicas, each with its link.

    Raises:
        UserError: for data_parallel, or if the bandwidth or `num_steps` is out of range.
    """
    if model.settings.method == "data_parallel":
        raise UserError("method=data_parallel has a timeline with preset=paper only", "method", "preset")
    _check(num_steps)
    num_layers = model.size.num_layers
    fragments = [*map(tuple, model.settings.layers(num_layers)), (num_layers,)]
    compute_M = np.array([replica.step_seconds for replica in model.replicas])
    intervals: list[Interval] = []
    exchanges: list[Interval] = []

    def record(fragment: int, start_BxMxM: Times, end_BxMxM: Times) -> None:
        for replica, (starts_M, ends_M) in enumerate(zip(start_BxMxM[0], end_BxMxM[0], strict=True)):
            others = np.arange(len(starts_M)) != replica
            if others.any():
                start, end = float(starts_M[others].min()), float(ends_M[others].max())
                exchanges.append(Interval(f"link {replica}", "exchange", start, end, fragments[fragment]))

    run = PhysicalRun(model, gbit_s, record)
    for _ in range(num_steps):
        starts = run.ready_BxM[0]
        run.advance(compute_M[None])
        for replica, start in enumerate(starts):
            lane, part_seconds = f"replica {replica}", compute_M[replica] / (3 * num_layers - 1)
            for layer in range(num_layers):
                begin = start + layer * part_seconds
                intervals.append(Interval(lane, "forward", begin, begin + part_seconds, (layer,)))
            intervals += _backward(lane, num_layers, start + num_layers * part_seconds, part_seconds)
    return intervals + exchanges


def _check(num_steps: int) -> None:
    if not 1 <= num_steps <= _MOST_STEPS:
        raise UserError(f"num_steps must be from 1 to {_MOST_STEPS} in a timeline, not {num_steps}", "num_steps")


_MOST_STEPS = 1000


def _backward(lane: str, num_layers: int, now: float, part_seconds: float) -> Iterator[Interval]:
    for layer in reversed(range(num_layers)):
        for kind in ("backward_activations", "backward_parameters") if layer else ("backward_parameters",):
            yield Interval(lane, kind, now, now + part_seconds, (layer,))
            now += part_seconds
