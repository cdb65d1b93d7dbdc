"""The replicas' machines: step time, link, and how much step times vary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica's speed and link.

    Raises:
        UserError: if a number is out of range.
    """

    step_seconds: float
    """Compute time of one inner step, on average."""
    gbit_s: float | None = None
    """Bandwidth of its link, each way; None is the bandwidth that is simulated."""
    latency_seconds: float = 0.0
    """Latency one way, to a replica with the same latency."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 < self.step_seconds < np.inf:
            raise UserError(f"step_seconds must be above 0 and finite, not {self.step_seconds}", "step_seconds")
        if self.gbit_s is not None and not 0 < self.gbit_s < np.inf:
            raise UserError(f"link_gbit_s must be above 0 and finite, not {self.gbit_s}", "link_gbit_s")
        if not 0 <= self.latency_seconds < np.inf:
            raise UserError(
                f"latency_seconds must be at least 0 and finite, not {self.latency_seconds}", "latency_seconds"
            )


def replicas_of(
    num_replicas: int | None,
    step_seconds: Sequence[float],
    latency_seconds: Sequence[float],
    link_gbit_s: Sequence[float | None],
    overlap_steps: int | tuple[int, ...] | None = None,
) -> tuple[Replica, ...]:
    """M replicas.

    Args:
        num_replicas: M; None is the length of the longest sequence, and at least 2.
        step_seconds: one number for all replicas, or one a replica; so are the next two.
        latency_seconds: one way.
        link_gbit_s: each way.
        overlap_steps: τ; only its length counts here.

    Raises:
        UserError: if a sequence holds neither one number nor M, or a number is out of range.
    """
    given = {"step_seconds": step_seconds, "latency_seconds": latency_seconds, "link_gbit_s": link_gbit_s}
    longest = max(*map(len, given.values()), len(overlap_steps) if isinstance(overlap_steps, tuple) else 1)
    num_replicas = num_replicas if num_replicas is not None else max(2, longest)
    if num_replicas < 1:
        raise UserError(f"num_replicas must be at least 1, not {num_replicas}", "num_replicas")
    for name, values in given.items():
        if len(values) not in (1, num_replicas):
            raise UserError(
                f"{name}={values} must be one number, or one for each of {num_replicas} replicas", name
            )
    steps, latencies, links = (
        values if len(values) == num_replicas else list(values) * num_replicas for values in given.values()
    )
    return tuple(
        Replica(step_seconds=step, latency_seconds=latency, gbit_s=link)
        for step, latency, link in zip(steps, latencies, links, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """The distribution of compute times, independent for each step and replica.

    Raises:
        UserError: if a number is out of range, or stalls have a probability but no duration.
    """

    step_variation: float = 0.0
    """Standard deviation of a log-normal factor with mean 1."""
    stall_probability: float = 0.0
    """Probability that a step takes `stall_seconds` longer."""
    stall_seconds: float = 0.0
    """Duration of a stall."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 <= self.stall_probability <= 1:
            raise UserError(
                f"stall_probability must lie between 0 and 1, not {self.stall_probability}", "stall_probability"
            )
        for name, most in (("step_variation", 100.0), ("stall_seconds", 1e9)):
            if not 0 <= getattr(self, name) <= most:
                raise UserError(f"{name} must be at least 0 and at most {most:g}, not {getattr(self, name)}", name)
        if bool(self.stall_probability) != bool(self.stall_seconds):
            raise UserError(
                f"stall_probability={self.stall_probability} with stall_seconds={self.stall_seconds} stalls "
                "nothing: set both",
                *("stall_probability", "stall_seconds"),
            )

    def draw(self, step_seconds: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
        """Random compute times, of any shape, with the given averages (before stalls)."""
        sigma = np.sqrt(np.log1p(self.step_variation**2))
        factor = np.exp(generator.normal(-(sigma**2) / 2, sigma, step_seconds.shape)) if sigma else 1.0
        return step_seconds * factor + self.stall_seconds * (
            generator.random(step_seconds.shape) < self.stall_probability
        )
