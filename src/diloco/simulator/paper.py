"""The simulator of arXiv 2501.18512, as its published table determines it: one replica, one serial network.

A step is 3L − 1 parts of equal duration, one after the other: the forward pass of layers 1 to L; then, for
l = L to 1, the backward pass with respect to layer l's activations (not for l = 1) and to its parameters. When
layer l's parameter gradient is done at a step with a sync of layer l, its reduction is ready; it lasts
v·N/(L·bandwidth), and the network carries one reduction at a time, in the order in which they are ready. The
forward pass of layer l at step s waits for the reductions of layer l that were launched at steps ≤ s − 1 − τ.
Nothing else waits.

Shapes: L layers, B bandwidths.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError
from diloco.schedule import Schedule
from diloco.simulator.description import MethodSettings, checked_gbit_s
from diloco.simulator.steady import Times, growth_rate

BITS_PER_PARAM = 13.4
"""v, fitted to the published table; the paper does not state it."""


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A run in the paper's simulator.

    Raises:
        UserError: if the fields contradict each other.

    >>> model = PaperModel(
    ...     settings=MethodSettings(method="diloco"), num_params=1e9, num_layers=24, step_seconds=0.1
    ... )
    >>> model.compute_utilization([1.0, 10.0, 100.0]).round(3)
    array([0.429, 0.887, 0.993])
    """

    settings: MethodSettings
    """Method, H, fragments and τ."""
    num_params: float
    """N, spread equally over the layers."""
    num_layers: int
    """L."""
    step_seconds: float
    """Compute time of one step."""

    def __post_init__(self) -> None:
        for name in ("num_params", "num_layers", "step_seconds"):
            if not 0 < getattr(self, name) < np.inf:
                raise UserError(f"{name} must be above 0 and finite, not {getattr(self, name)}", name)
        self.settings.check_replicas(1)
        _ = self.schedule

    @cached_property
    def schedule(self) -> Schedule:
        """The paper's schedule: H becomes a multiple of the number of fragments, its factor rounded half to even.

        Each fragment is first sent at its first turn: otherwise finite runs do not reproduce the published table.
        """
        num_fragments = len(self.settings.layers(self.num_layers))
        settings = self.settings
        if settings.streams:
            between = round(settings.sync_every / num_fragments)
            if not between:
                raise UserError(
                    f"sync_every={settings.sync_every} is too short for {num_fragments} fragments, of which "
                    "preset=paper sends one at a time: raise layers_per_fragment, or set preset=physical",
                    *("sync_every", "layers_per_fragment", "preset"),
                )
            settings = replace(settings, sync_every=num_fragments * between)
        return replace(settings.schedule(num_fragments), first_sync="early")

    def compute_utilization(self, gbit_s: ArrayLike, *, num_steps: int | None = None) -> NDArray[np.float64]:
        """Compute time as a part of all time, for each bandwidth.

        Args:
            gbit_s: bandwidths of the network, (B,).
            num_steps: length of a run that ends with its last reduction; None is the steady state.

        Raises:
            UserError: if a bandwidth or `num_steps` is out of range.
        """
        run = PaperRun(self, gbit_s)
        if num_steps is None:
            return self.schedule.sync_every * self.step_seconds / run.period_seconds()
        if num_steps < 1:
            raise UserError(f"num_steps must be at least 1, not {num_steps}", "num_steps")
        for step in range(1, num_steps + 1):
            run.take(step)
        return num_steps * self.step_seconds / np.maximum(run.clock_B, run.free_B)


class PaperRun:
    """The state of a run between two steps, for all bandwidths."""

    def __init__(self, model: PaperModel, gbit_s: ArrayLike) -> None:
        gbit_s_B = checked_gbit_s(gbit_s)
        quantized = 4 if model.settings.wire == "e3m0" else 1
        bits = BITS_PER_PARAM * model.num_params / model.num_layers / quantized
        self.reduction_B = bits / (gbit_s_B * 1e9)
        """Seconds that one layer's reduction takes."""
        self._num_layers, self._schedule = model.num_layers, model.schedule
        self._layers = model.settings.layers(model.num_layers)
        self._part_seconds = model.step_seconds / (3 * model.num_layers - 1)
        self.clock_B = np.zeros_like(gbit_s_B)
        """Time at which the last step ended."""
        self.free_B = np.zeros_like(gbit_s_B)
        """Time at which the network has carried everything."""
        self.awaited: dict[int, dict[int, Times]] = {}
        """The end of the reduction that a forward pass waits for, by step and by layer from 0."""

    def period_seconds(self) -> Times:
        """Duration of H steps in the steady state, (B,)."""
        period, overlap = self._schedule.sync_every, self._schedule.max_overlap
        start = 2 * period  # from here on, every fragment has been sent before
        for step in range(start - overlap, start + 1):
            if layers := self._layers_sent(step):
                self.awaited[step + 1 + overlap] = dict.fromkeys(layers, self.clock_B)

        def next_period(x_SxB: Times) -> Times:
            times = iter(x_SxB)
            self.clock_B, self.free_B = next(times), next(times)
            self.awaited = {
                step: {layer: next(times) for layer in layers} for step, layers in self.awaited.items()
            }
            for step in range(start + 1, start + period + 1):
                self.take(step)
            self.awaited = {step - period: layers for step, layers in self.awaited.items()}
            return self._times()

        return growth_rate(next_period, self._times(), longest_cycle=overlap + 1)

    def _times(self) -> Times:
        return np.stack(
            [self.clock_B, self.free_B, *(end for ends in self.awaited.values() for end in ends.values())]
        )

    def _layers_sent(self, step: int) -> list[int]:
        """The layers of the fragments sent at a step, in the order of the backward pass."""
        return sorted(
            (layer for sync in self._schedule.sent(step) for layer in self._layers[sync.fragment]), reverse=True
        )

    def take(self, step: int) -> None:
        """Take one step."""
        num_layers, part = self._num_layers, self._part_seconds
        forward_B = self.clock_B + num_layers * part
        for layer, end_B in self.awaited.pop(step, {}).items():
            forward_B = np.maximum(forward_B, end_B + (num_layers - layer) * part)
        if layers := self._layers_sent(step):
            # Layer l, from 0, is done 2(L − l) parts after the forward pass; the first layer has one fewer.
            parts_L = np.array([2 * (num_layers - layer) - (layer == 0) for layer in layers])
            before_L = np.arange(len(layers))[:, None]
            ready_LxB = forward_B + parts_L[:, None] * part
            # end_i = max(ready_i, end_{i−1}) + c: subtracting i·c makes it a running maximum.
            ends_LxB = np.maximum.accumulate(
                np.maximum(ready_LxB - before_L * self.reduction_B, self.free_B), axis=0
            )
            ends_LxB += (before_L + 1) * self.reduction_B
            self.awaited[step + 1 + self._schedule.max_overlap] = dict(zip(layers, ends_LxB, strict=True))
            self.free_B = ends_LxB[-1]
        self.clock_B = forward_B + (2 * num_layers - 1) * part
