"""Who trains: machines, their links, and how evenly they go."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica's speed and link."""

    step_seconds: float
    """Compute of one step, on average."""
    gbit_s: float | None = None
    """Its link, each way; None is the bandwidth that is simulated."""
    latency_seconds: float = 0.0
    """One way, to a replica with the same latency."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if not 0 < self.step_seconds < np.inf:
            raise ValueError(f"step_seconds must be above 0 and finite, not {self.step_seconds}")
        if self.gbit_s is not None and not 0 < self.gbit_s < np.inf:
            raise ValueError(f"link_gbit_s must be above 0 and finite, not {self.gbit_s}")
        if not 0 <= self.latency_seconds < np.inf:
            raise ValueError(f"latency_seconds must be at least 0 and finite, not {self.latency_seconds}")


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How the compute time of a step varies, from step to step and from replica to replica."""

    variation: float = 0.0
    """Standard deviation of a log-normal factor with mean 1."""
    stall_probability: float = 0.0
    """How often a step takes longer by `stall_seconds`."""
    stall_seconds: float = 0.0
    """By how much."""

    def __post_init__(self) -> None:
        """Refuse what is no distribution."""
        if not 0 <= self.stall_probability <= 1:
            raise ValueError(f"stall_probability must lie between 0 and 1, not {self.stall_probability}")
        for name, most in (("variation", 100.0), ("stall_seconds", 1e9)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be at least 0 and at most {most:g}, not {getattr(self, name)}")
        if bool(self.stall_probability) != bool(self.stall_seconds):
            raise ValueError(
                f"stall_probability={self.stall_probability} with stall_seconds={self.stall_seconds} stalls "
                "nothing: pass both"
            )

    def draw(self, step_seconds: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
        """Compute times around those on average."""
        sigma = np.sqrt(np.log1p(self.variation**2))
        factor = np.exp(generator.normal(-(sigma**2) / 2, sigma, step_seconds.shape)) if sigma else 1.0
        return step_seconds * factor + self.stall_seconds * (
            generator.random(step_seconds.shape) < self.stall_probability
        )
