"""The flags that describe a simulated run, and the model that simulates it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError
from diloco.presets import Method
from diloco.simulator.methods import MethodSettings, Pattern
from diloco.simulator.model_size import ModelSize
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Stragglers, replicas_of
from diloco.training.config.config import fields_with

SimulatorKind = Literal["physical", "paper"]

_PHYSICAL = {"physical": True}
"""Metadata of a field that describes machines and links, which the preset paper does not have."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The run to simulate."""

    num_params: float
    """N, number of all parameters."""
    num_layers: int
    """L, number of transformer blocks."""
    step_seconds: tuple[float, ...]
    """Compute time of an inner step; one number, or one a replica."""
    method: Method
    """Method of the papers, whose preset gives the settings that are left out."""
    sync_every: int = 100
    """H, inner steps between two syncs of the same fragment; data_parallel ignores it."""
    layers_per_fragment: int = 3
    """Blocks in a fragment of the streaming methods."""
    fragments: Pattern = "strided"
    """Pattern by which blocks form fragments of the streaming methods; it matters to the preset paper, in which
    each layer waits for itself."""
    overlap_steps: int | tuple[int, ...] | None = None
    """τ, inner steps between sending a fragment and merging it; one number, or one a replica; left out, the
    method's own."""
    num_steps: int | None = None
    """Steps of a run, which ends when everything has arrived; left out, the steady state."""
    preset: SimulatorKind = "physical"
    """physical: replicas on links, as the engine works; paper: the simulator of the paper's table."""
    width: int | None = field(default=None, metadata=_PHYSICAL)
    """D; left out, the width with which 12·L·D² and the embeddings make N (physical)."""
    vocab_size: int | None = field(default=None, metadata=_PHYSICAL)
    """V, number of tokens in the vocabulary; left out, 32,000 (physical)."""
    num_replicas: int | None = field(default=None, metadata=_PHYSICAL)
    """M; left out, 2, or as many as the longest list of numbers (physical)."""
    latency_seconds: tuple[float, ...] | None = field(default=None, metadata=_PHYSICAL)
    """Latency of a replica's link, one way; one number, or one a replica; left out, 0 (physical)."""
    wire: str | None = field(default=None, metadata=_PHYSICAL)
    """Codec of the outer gradients; left out, the method's own (physical)."""
    combine: str | None = field(default=None, metadata=_PHYSICAL)
    """gather, reduce_scatter, or reduce_scatter:CODEC; left out, gather (physical)."""
    untied_embeddings: bool = field(default=False, metadata=_PHYSICAL)
    """The head has a matrix of its own (physical)."""
    step_variation: float = field(default=0.0, metadata=_PHYSICAL)
    """Standard deviation of a step's compute time, as a fraction of it (physical)."""
    stall_probability: float = field(default=0.0, metadata=_PHYSICAL)
    """Probability that a step takes --stall-seconds longer (physical)."""
    stall_seconds: float = field(default=0.0, metadata=_PHYSICAL)
    """Duration of such a stall (physical)."""
    seed: int | None = field(default=None, metadata=_PHYSICAL)
    """Seed of the step times and stalls; left out, 0 (physical)."""

    def compute_utilization(
        self, gbit_s: ArrayLike, links: tuple[float | None, ...] = (None,)
    ) -> NDArray[np.float64]:
        """The compute utilization at each of several bandwidths, those of the links that are None.

        Raises:
            UserError: if the fields contradict each other, or nothing would be sent.
        """
        self._check()
        if self.preset == "paper":
            return self.paper_model().compute_utilization(gbit_s, num_steps=self.num_steps)
        return self._physical_model(links).compute_utilization(
            gbit_s, num_steps=self.num_steps, seed=self.seed or 0
        )

    @property
    def settings(self) -> MethodSettings:
        """The method with its numbers."""
        return MethodSettings(
            method=self.method,
            sync_every=self.sync_every,
            layers_per_fragment=self.layers_per_fragment,
            fragments=self.fragments,
            overlap_steps=self.overlap_steps,
        )

    def paper_model(self) -> PaperModel:
        """The model of the preset paper."""
        physical = fields_with(SimulatedRun, "physical")
        defaults = {one.name: one.default for one in fields(self) if one.name in physical}
        given = {name: value for name in defaults if (value := getattr(self, name)) != defaults[name]}
        return paper_model(self.settings, self.num_params, self.num_layers, self.step_seconds, physical=given)

    def _physical_model(self, links: tuple[float | None, ...]) -> PhysicalModel:
        size = ModelSize(
            num_params=self.num_params,
            num_layers=self.num_layers,
            width=self.width,
            vocab_size=32_000 if self.vocab_size is None else self.vocab_size,
            tied_embeddings=not self.untied_embeddings,
        )
        latencies = (0.0,) if self.latency_seconds is None else self.latency_seconds
        stragglers = Stragglers(
            step_variation=self.step_variation,
            stall_probability=self.stall_probability,
            stall_seconds=self.stall_seconds,
        )
        if stragglers == Stragglers() and self.seed is not None:
            raise UserError(
                f"seed={self.seed}, but nothing is random: leave it out, or set step_variation or "
                "stall_probability",
                *("seed", "step_variation", "stall_probability"),
            )
        return PhysicalModel(
            settings=self.settings,
            size=size,
            replicas=replicas_of(self.num_replicas, self.step_seconds, latencies, links, self.overlap_steps),
            wire=self.wire,
            combine="gather" if self.combine is None else self.combine,
            stragglers=None if stragglers == Stragglers() else stragglers,
        )

    def _check(self) -> None:
        for name, most in (("sync_every", 100_000), ("num_layers", 10_000), ("num_steps", 1_000_000)):
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name}={getattr(self, name):,} must be at most {most:,} in a simulation", name)
        if (self.seed or 0) < 0:
            raise UserError(f"seed={self.seed} must be at least 0", "seed")
        syncs = self.settings.method != "data_parallel"
        if self.num_steps is not None and syncs and 1 <= self.num_steps < self.sync_every:
            raise UserError(
                f"num_steps={self.num_steps} with sync_every={self.sync_every}: nothing would be sent; set "
                "a smaller sync_every, or more num_steps",
                *("num_steps", "sync_every"),
            )


def paper_model(
    settings: MethodSettings,
    num_params: float,
    num_layers: int,
    step_seconds: tuple[float, ...],
    *,
    physical: Mapping[str, Any],
) -> PaperModel:
    """The model of the preset paper.

    Args:
        settings: method and numbers.
        num_params: N.
        num_layers: L.
        step_seconds: one number.
        physical: fields that were set although the preset paper does not have them, with their values.

    Raises:
        UserError: if there is such a field, or more than one number of seconds.
    """
    for name, value in physical.items():
        raise UserError(f"{name}={value} means nothing to preset=paper: leave it out", name, "preset")
    if len(step_seconds) != 1:
        raise UserError(
            f"step_seconds={step_seconds} with preset=paper, which has one replica: give one number",
            *("step_seconds", "preset"),
        )
    return PaperModel(
        settings=settings, num_params=num_params, num_layers=num_layers, step_seconds=step_seconds[0]
    )
