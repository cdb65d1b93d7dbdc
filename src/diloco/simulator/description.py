"""The description of a simulated run: the method with its numbers, the model's size, machines, and bandwidths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError
from diloco.models.decoder_config import LADDER, ladder
from diloco.presets import METHODS, PRESETS, Method
from diloco.schedule import Schedule, Timing
from diloco.units import Amount

Pattern = Literal["strided", "sequential"]
"""The pattern by which layers form fragments: strided, every P-th layer; sequential, neighbouring layers."""


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Timing):
    """A method and its numbers.

    Raises:
        UserError: if the fields contradict each other or the method.
    """

    method: Method
    """Method of the papers, whose preset gives the settings that are left out."""
    sync_every: int = 100
    """H, inner steps between two syncs of the same fragment; data_parallel ignores it."""
    layers_per_fragment: int = 3
    """Blocks in a fragment of the streaming methods, at the most."""
    fragments: Pattern = "strided"
    """Pattern by which blocks form fragments of the streaming methods; it matters to the preset paper, in which
    each layer waits for itself."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"{self.method!r} is not a method: choose one of {', '.join(METHODS)}", "method")
        if self.overlap_steps is not None and self.method == "data_parallel":
            raise UserError(
                f"overlap_steps={self.overlap_steps}, but data_parallel does not overlap: leave it out",
                "overlap_steps",
            )
        for name in ("sync_every", "layers_per_fragment"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if self.fragments not in get_args(Pattern):
            raise UserError(f"fragments must be strided or sequential, not {self.fragments!r}", "fragments")
        self.schedule(len(self.offsets or (0,)))  # checks the rest

    @property
    def least_replicas(self) -> int:
        """The number of replicas that have a τ of their own; 1 if all have the same."""
        return len(self.overlaps)

    @property
    def streams(self) -> bool:
        """True if the layers form several fragments."""
        return self.method != "data_parallel" and PRESETS[self.method].fragments != "whole"

    @property
    def wire(self) -> str:
        """The method's own codec; data_parallel sends FP32 gradients."""
        return "fp32" if self.method == "data_parallel" else PRESETS[self.method].wire

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each fragment, counted from 0 (arXiv 2501.18512, 2.1).

        Raises:
            UserError: if a fragment would hold more layers than the model has.
        """
        size = self.layers_per_fragment
        if not self.streams:
            return (range(num_layers),)
        if size > num_layers:
            raise UserError(
                f"layers_per_fragment={size}, but the model has num_layers={num_layers}",
                "layers_per_fragment",
                "num_layers",
            )
        num_fragments = -(-num_layers // size)
        if self.fragments == "strided":
            return tuple(range(first, num_layers, num_fragments) for first in range(num_fragments))
        return tuple(range(first, min(first + size, num_layers)) for first in range(0, num_layers, size))

    def schedule(self, num_fragments: int) -> Schedule:
        """The steps at which each fragment is sent and merged; data_parallel syncs at every step."""
        if self.method == "data_parallel":
            return replace(super().schedule(num_fragments), sync_every=1)
        overlap = PRESETS[self.method].overlap_steps if self.overlap_steps is None else self.overlap_steps
        return replace(super().schedule(num_fragments), overlap_steps=overlap)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder's parameters: L equal blocks, and embeddings.

    Raises:
        UserError: if no model has these sizes.

    >>> size = ModelSize(num_params=1.2e9, num_layers=24, width=2048, vocab_size=32_000)
    >>> size.outside_params, round(size.block_params)
    (65536000, 47269333)
    """

    num_params: Amount
    """N, number of all parameters, such as 124M."""
    num_layers: int = 0
    """L, number of transformer blocks; 0 is that of the nearest size of arXiv 2503.09799."""
    width: int | None = None
    """D; left out, the width with which 12·L·D² and the embeddings make N."""
    vocab_size: int = 32_000
    """V, number of tokens in the vocabulary."""
    untied_embeddings: bool = False
    """The head has a matrix of its own."""

    def __post_init__(self) -> None:
        """Refuse impossible sizes; fill in the layers."""
        if self.num_layers == 0 and 0 < self.num_params < math.inf:
            object.__setattr__(self, "num_layers", _usual_layers(self.num_params))
        for name in ("num_params", "num_layers", "width", "vocab_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {value}", name)
        if self.outside_params >= self.num_params:
            raise UserError(
                f"num_params={self.num_params:g} leaves nothing for blocks beside vocab_size={self.vocab_size} "
                f"embeddings of width={self.width}",
                *("num_params", "vocab_size", "width"),
            )

    @property
    def outside_params(self) -> float:
        """Parameters of embeddings and head, which form the last fragment."""
        matrices = 2 if self.untied_embeddings else 1
        if self.width is not None:
            return matrices * self.vocab_size * self.width
        a, b = 12 * self.num_layers, matrices * self.vocab_size
        return b * (math.sqrt(b**2 + 4 * a * self.num_params) - b) / (2 * a)

    @property
    def block_params(self) -> float:
        """Parameters of one block."""
        return (self.num_params - self.outside_params) / self.num_layers


def _usual_layers(num_params: float) -> int:
    """The layers of the ladder's size with the nearest number of parameters."""
    sizes = [ladder(scale) for scale in LADDER]
    return min(sizes, key=lambda size: abs(math.log(size.num_matrix_params / num_params))).num_layers


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
        if not 0 < self.step_seconds < np.inf:
            raise UserError(f"step_seconds must be above 0 and finite, not {self.step_seconds}", "step_seconds")
        if self.gbit_s is not None and not 0 < self.gbit_s < np.inf:
            raise UserError(f"link must be above 0 and finite, not {self.gbit_s} Gbit/s", "link")
        if not 0 <= self.latency_seconds < np.inf:
            raise UserError(
                f"latency_seconds must be at least 0 and finite, not {self.latency_seconds}", "latency_seconds"
            )


def replicas_of(
    num_replicas: int | None,
    step_seconds: Sequence[float],
    latency_seconds: Sequence[float],
    link_gbit_s: Sequence[float | None],
    *,
    least: int = 1,
) -> tuple[Replica, ...]:
    """M replicas.

    Args:
        num_replicas: M; None is the length of the longest sequence, or `least`, and at least 2.
        step_seconds: one number for all replicas, or one per replica; so are the next two.
        latency_seconds: one way.
        link_gbit_s: each way.
        least: the least M, where it is None.

    Raises:
        UserError: if a sequence holds neither one number nor M, or a number is out of range.
    """
    given: dict[str, Sequence[Any]] = {
        "step_seconds": step_seconds,
        "latency_seconds": latency_seconds,
        "link": link_gbit_s,
    }
    if num_replicas is None:
        num_replicas = max(2, least, *map(len, given.values()))
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
    """Standard deviation of a step's compute time, as a fraction of it: of a log-normal factor with mean 1."""
    stall_probability: float = 0.0
    """Probability that a step takes `stall_seconds` longer."""
    stall_seconds: float = 0.0
    """Duration of a stall."""

    def __post_init__(self) -> None:
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


GBIT_S = np.logspace(-1, 3, 50)
"""The grid of arXiv 2501.18512: 0.1 to 1000 Gbit/s."""


def checked_gbit_s(gbit_s: ArrayLike) -> NDArray[np.float64]:
    """Bandwidths as a vector, (B,).

    Raises:
        UserError: if a bandwidth is not above 0 and finite.
    """
    gbit_s_B = np.atleast_1d(np.asarray(gbit_s, dtype=np.float64))
    if gbit_s_B.ndim != 1 or not gbit_s_B.size or not (np.isfinite(gbit_s_B) & (gbit_s_B > 0)).all():
        raise UserError(f"link must be above 0 and finite, not {gbit_s} Gbit/s", "link")
    return gbit_s_B


def reaches(compute_utilization: NDArray[np.float64], target: float) -> NDArray[np.bool_]:
    """True for each utilization that reaches a target, up to rounding errors."""
    return compute_utilization >= target - 1e-9


def needed_gbit_s(compute_utilization: NDArray[np.float64], target: float) -> float | None:
    """The smallest bandwidth of the grid that reaches a target; None if the largest does not.

    Args:
        compute_utilization: at each bandwidth of `GBIT_S`, (50,).
        target: above 0, at most 1.

    >>> needed_gbit_s(GBIT_S / 1000, 0.5)
    568.9866029018293
    """
    assert 0 < target <= 1, "the caller checks the target"
    enough = np.flatnonzero(reaches(compute_utilization, target))
    return float(GBIT_S[enough[0]]) if enough.size else None
