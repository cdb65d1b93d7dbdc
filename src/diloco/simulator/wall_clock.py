"""Idealized wall-clock of a whole run on two levels of network (arXiv 2503.09799, appendix A).

Compute takes 6·N·D/(R·Q) seconds. An all-reduce of N parameters over R chips takes 2bN/W·(1 − 1/R) + ε with b bits
a parameter: b₀ for gradients, b₁ for outer gradients. At each of T steps

    Data-Parallel    2b₀N/W₁·(1 − 1/R) + ε₁
    DiLoCo, M = 1    the same, and 2b₁N/W₁·(1 − 1/R) + ε₁ more at every H-th step
    DiLoCo, M ≥ 2    2b₀N/W₀·(1 − M/R) + ε₀ inside a site, 2b₁N/W₁·(1 − 1/R) + ε₁ between sites at every H-th step

with W₀, ε₀ inside a site and W₁, ε₁ between sites. Overlap hides the outer exchange for the duration of τ steps.
The paper has one number of bits.

"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diloco.errors import UserError
from diloco.schedule import Schedule
from diloco.units import Amount


class Network(NamedTuple):
    """A network that carries all-reduces."""

    gbit_s: float
    """W, bandwidth between two ends of the network."""
    latency_seconds: float
    """ε, latency of an all-reduce."""


NetworkName = Literal["high", "medium", "low"]
NETWORKS: dict[NetworkName, Network] = {
    "high": Network(400, 1e-4),
    "medium": Network(100, 1e-3),
    "low": Network(10, 1e-2),
}
"""The paper's archetypes."""


@dataclass(frozen=True, kw_only=True)
class IdealizedRun:
    """A run on R chips.

    Raises:
        UserError: if the fields contradict each other.

    >>> run = IdealizedRun(num_params=1e9, num_tokens=20e9, batch_tokens=2**20, num_chips=256, num_replicas=2)
    >>> [round(seconds / 3600, 2) for seconds in (run.compute_seconds, run.inside_seconds, run.between_seconds)]
    [0.43, 0.42, 0.56]
    """

    num_params: Amount
    """N, number of all parameters."""
    num_tokens: Amount
    """D, tokens of the whole run."""
    batch_tokens: Amount
    """Tokens of a step over all chips."""
    num_chips: int
    """R, number of all chips."""
    num_replicas: int = 0
    """M; 0 is Data-Parallel."""
    sync_every: int = 30
    """H, inner steps between two syncs."""
    overlap_steps: int = 0
    """τ, inner steps that hide the exchange of outer gradients."""
    inside: NetworkName = "high"
    """W₀ and ε₀: network within a replica (400, 100 or 10 Gbit/s)."""
    between: NetworkName = "low"
    """W₁ and ε₁: network between replicas, and of Data-Parallel."""
    flops_per_chip: Amount = 300e12
    """Q, floating-point operations that a chip does in a second."""
    inner_bits_per_param: float = 16
    """b₀, bits of a gradient on the network."""
    outer_bits_per_param: float = 16
    """b₁, bits of an outer gradient on the network."""

    def __post_init__(self) -> None:
        names = ("num_params", "num_tokens", "batch_tokens", "num_chips", "flops_per_chip")
        for name in (*names, "inner_bits_per_param", "outer_bits_per_param"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {getattr(self, name)}", name)
        if not 0 <= self.num_replicas <= self.num_chips:
            raise UserError(
                f"num_replicas={self.num_replicas} must be at least 0, and at most num_chips={self.num_chips}",
                *("num_replicas", "num_chips"),
            )
        if self.overlap_steps and not self.num_replicas:
            raise UserError(
                f"overlap_steps={self.overlap_steps}, but num_replicas=0 is Data-Parallel, which overlaps nothing",
                *("overlap_steps", "num_replicas"),
            )
        Schedule(num_fragments=1, sync_every=self.sync_every, overlap_steps=self.overlap_steps)  # refuses others

    @property
    def num_steps(self) -> float:
        """T."""
        return self.num_tokens / self.batch_tokens

    @property
    def compute_seconds(self) -> float:
        """Compute time of all steps."""
        return self.num_steps * step_seconds(
            num_params=self.num_params,
            batch_tokens=self.batch_tokens,
            num_chips=self.num_chips,
            flops_per_chip=self.flops_per_chip,
        )

    @property
    def inside_seconds(self) -> float:
        """The gradients' all-reduces at every step: inside a site if M ≥ 2, else between all chips."""
        if self.num_replicas >= 2:
            num_chips, network = self.num_chips / self.num_replicas, self.inside
        else:
            num_chips, network = self.num_chips, self.between
        return self.num_steps * self._all_reduce(network, num_chips, self.inner_bits_per_param)

    @property
    def between_seconds(self) -> float:
        """The time that training waits for the outer gradients' all-reduces at every H-th step."""
        if self.num_replicas == 0:
            return 0.0
        exchange = self._all_reduce(self.between, self.num_chips, self.outer_bits_per_param)
        hidden = self.overlap_steps * (self.compute_seconds + self.inside_seconds) / self.num_steps
        return self.num_steps / self.sync_every * max(0.0, exchange - hidden)

    @property
    def seconds(self) -> float:
        """Duration of the whole run."""
        return self.compute_seconds + self.inside_seconds + self.between_seconds

    def _all_reduce(self, name: NetworkName, num_chips: float, bits_per_param: float) -> float:
        network, bits = NETWORKS[name], 2 * self.num_params * bits_per_param * (1 - 1 / num_chips)
        return bits / (network.gbit_s * 1e9) + network.latency_seconds


def step_seconds(
    *, num_params: float, batch_tokens: float, num_chips: float, flops_per_chip: float, mfu: float = 1.0
) -> float:
    """6·N·B/(R·Q·MFU) seconds: the rule of Kaplan et al. (arXiv 2001.08361), forward and backward pass.

    Args:
        num_params: N, the parameters that a token activates; all of them but in a mixture of experts.
        batch_tokens: B, tokens of a step on these chips.
        num_chips: R.
        flops_per_chip: Q, floating-point operations that a chip can do in a second.
        mfu: the part of Q that training reaches, above 0 and at most 1.

    Raises:
        UserError: if a number is out of range.

    >>> round(step_seconds(num_params=1e9, batch_tokens=2**17, num_chips=64, flops_per_chip=197e12, mfu=0.6), 3)
    0.104
    """
    numbers = {"num_params": num_params, "batch_tokens": batch_tokens, "num_chips": num_chips}
    for name, value in (numbers | {"flops_per_chip": flops_per_chip}).items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, not {value}", name)
    if not 0 < mfu <= 1:
        raise UserError(f"mfu must be above 0 and at most 1, not {mfu}", "mfu")
    return 6 * num_params * batch_tokens / (num_chips * flops_per_chip * mfu)
