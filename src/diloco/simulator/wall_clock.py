"""Idealized wall-clock of a whole run on two levels of network (arXiv 2503.09799, appendix A).

Compute takes 6·N·D/(R·Q) seconds. An all-reduce of N parameters over R nodes takes 2N/W·(1 − 1/R) + ε. At each of
T steps

    Data-Parallel    2N/W₁·(1 − 1/R) + ε₁
    DiLoCo, M = 1    the same, and once more at every H-th step
    DiLoCo, M ≥ 2    2N/W₀·(1 − M/R) + ε₀ inside a site, and 2N/W₁·(1 − 1/R) + ε₁ between sites at every H-th step

with W₀, ε₀ inside a site and W₁, ε₁ between sites; overlap hides the last for as long as τ steps take.
"""

import math
from dataclasses import dataclass

from diloco.errors import UserError


@dataclass(frozen=True)
class Network:
    """What an all-reduce runs on."""

    gbit_s: float
    """W, between two nodes."""
    latency_seconds: float
    """ε, of an all-reduce."""

    def __post_init__(self) -> None:
        """Refuse what is no network."""
        if not 0 < self.gbit_s < math.inf:
            raise UserError(f"gbit_s must be above 0 and finite, not {self.gbit_s}")
        if not 0 <= self.latency_seconds < math.inf:
            raise UserError(f"latency_seconds must be at least 0 and finite, not {self.latency_seconds}")


NETWORKS = {"high": Network(400, 1e-4), "medium": Network(100, 1e-3), "low": Network(10, 1e-2)}
"""The paper's archetypes."""


@dataclass(frozen=True, kw_only=True)
class IdealizedRun:
    """A run on R chips.

    Raises:
        UserError: if the fields contradict each other; the message names both values.

    >>> run = IdealizedRun(num_params=1e9, num_tokens=20e9, batch_tokens=2**20, num_chips=256, num_replicas=2)
    >>> [round(seconds / 3600, 2) for seconds in (run.compute_seconds, run.inside_seconds, run.between_seconds)]
    [0.43, 0.42, 0.56]
    """

    num_params: float
    """N."""
    num_tokens: float
    """D."""
    batch_tokens: float
    """Tokens of a step over all chips."""
    num_chips: int
    """R."""
    num_replicas: int = 0
    """M; 0 is Data-Parallel."""
    sync_every: int = 30
    """H."""
    overlap_steps: int = 0
    """τ."""
    inside: Network = NETWORKS["high"]
    """W₀ and ε₀."""
    between: Network = NETWORKS["low"]
    """W₁ and ε₁."""
    flops_per_chip: float = 300e12
    """Q, a second."""
    bits_per_param: float = 16
    """What a parameter or its gradient takes on the network."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        names = ("num_params", "num_tokens", "batch_tokens", "num_chips", "flops_per_chip", "bits_per_param")
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if not 0 <= self.num_replicas <= self.num_chips:
            raise UserError(
                f"num_replicas={self.num_replicas} must be at least 0, and at most num_chips={self.num_chips}"
            )
        if self.overlap_steps and not self.num_replicas:
            raise UserError(
                f"overlap_steps={self.overlap_steps}, but num_replicas=0 is Data-Parallel, which overlaps nothing"
            )
        if self.sync_every < 1 or not 0 <= self.overlap_steps < self.sync_every:
            raise UserError(
                f"overlap_steps={self.overlap_steps} must be at least 0 and below sync_every={self.sync_every}"
            )

    @property
    def num_steps(self) -> float:
        """T."""
        return self.num_tokens / self.batch_tokens

    @property
    def compute_seconds(self) -> float:
        """Of all steps."""
        return 6 * self.num_params * self.num_tokens / (self.num_chips * self.flops_per_chip)

    @property
    def inside_seconds(self) -> float:
        """Of the gradients' all-reduce at every step, inside a site where there are several."""
        if self.num_replicas >= 2:
            return self.num_steps * self._all_reduce(self.inside, self.num_chips / self.num_replicas)
        return self.num_steps * self._all_reduce(self.between, self.num_chips)

    @property
    def between_seconds(self) -> float:
        """Of the outer gradients' all-reduce at every H-th step, as far as training waits for it."""
        if self.num_replicas == 0:
            return 0.0
        step_seconds = (self.compute_seconds + self.inside_seconds) / self.num_steps
        waiting = self._all_reduce(self.between, self.num_chips) - self.overlap_steps * step_seconds
        return self.num_steps / self.sync_every * max(0.0, waiting)

    @property
    def seconds(self) -> float:
        """Everything."""
        return self.compute_seconds + self.inside_seconds + self.between_seconds

    def _all_reduce(self, network: Network, num_nodes: float) -> float:
        bits = 2 * self.num_params * self.bits_per_param * (1 - 1 / num_nodes)
        return bits / (network.gbit_s * 1e9) + network.latency_seconds
