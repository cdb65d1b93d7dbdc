"""Who trains: machines, their links, and how evenly they go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError


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
            raise UserError(f"step_seconds must be above 0 and finite, not {self.step_seconds}")
        if self.gbit_s is not None and not 0 < self.gbit_s < np.inf:
            raise UserError(f"link_gbit_s must be above 0 and finite, not {self.gbit_s}")
        if not 0 <= self.latency_seconds < np.inf:
            raise UserError(f"latency_seconds must be at least 0 and finite, not {self.latency_seconds}")


def replicas_of(
    num_replicas: int | None,
    step_seconds: Sequence[float],
    latency_seconds: Sequence[float],
    gbit_s: Sequence[float | None],
    overlap_steps: int | tuple[int, ...] | None = None,
) -> tuple[Replica, ...]:
    """M replicas from numbers that are one for all, or one a replica; left out, as many as there are, at least 2.

    Raises:
        UserError: if their counts contradict one another.
    """
    given = {"step_seconds": step_seconds, "latency_seconds": latency_seconds, "link_gbit_s": gbit_s}
    longest = max(*map(len, given.values()), len(overlap_steps) if isinstance(overlap_steps, tuple) else 1)
    num_replicas = num_replicas if num_replicas is not None else max(2, longest)
    if num_replicas < 1:
        raise UserError(f"num_replicas must be at least 1, not {num_replicas}")
    for name, values in given.items():
        if len(values) not in (1, num_replicas):
            raise UserError(f"{name}={values} must be one number, or one for each of {num_replicas} replicas")
    steps, latencies, links = (
        values if len(values) == num_replicas else list(values) * num_replicas for values in given.values()
    )
    return tuple(
        Replica(step_seconds=step, latency_seconds=latency, gbit_s=link)
        for step, latency, link in zip(steps, latencies, links, strict=True)
    )


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
            raise UserError(f"stall_probability must lie between 0 and 1, not {self.stall_probability}")
        for name, most in (("variation", 100.0), ("stall_seconds", 1e9)):
            if not 0 <= getattr(self, name) <= most:
                raise UserError(f"{name} must be at least 0 and at most {most:g}, not {getattr(self, name)}")
        if bool(self.stall_probability) != bool(self.stall_seconds):
            raise UserError(
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
