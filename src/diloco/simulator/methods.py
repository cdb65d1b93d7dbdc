"""A method with its numbers: which layers form a fragment, when each is sent, and in which wire format."""

from dataclasses import dataclass
from typing import Literal, get_args

from diloco.errors import UserError
from diloco.presets import METHODS, PRESETS, Method
from diloco.schedule import Schedule

Pattern = Literal["strided", "sequential"]
"""The pattern by which layers form fragments: strided, every P-th layer; sequential, neighbouring layers."""


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A method and its numbers.

    Raises:
        UserError: if the fields contradict each other or the method.
    """

    method: Method
    """A name of `diloco.presets`."""
    sync_every: int = 100
    """H; data_parallel ignores it."""
    layers_per_fragment: int = 3
    """Layers in a fragment, at the most; only the streaming methods have several fragments."""
    fragments: Pattern = "strided"
    """The pattern by which layers form the fragments of the streaming methods."""
    overlap_steps: int | tuple[int, ...] | None = None
    """τ, one number or one a replica; None is the method's own."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """The first sync of a fragment, as in `Schedule`; it changes short runs only."""
    offsets: tuple[int, ...] | None = None
    """t_p, one a fragment, as in `Schedule`."""

    def __post_init__(self) -> None:
        """Refuse contradictions."""
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
    def streams(self) -> bool:
        """Whether the layers form several fragments."""
        return self.method != "data_parallel" and PRESETS[self.method].fragments != "whole"

    @property
    def wire(self) -> str:
        """The method's own codec; data_parallel sends FP32 gradients."""
        return "fp32" if self.method == "data_parallel" else PRESETS[self.method].wire

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each fragment, counted from 0 (arXiv 2501.18512, 3.1).

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
            period, overlap = 1, 0
        else:
            period, overlap = self.sync_every, PRESETS[self.method].overlap_steps
        return Schedule(
            sync_every=period,
            num_fragments=num_fragments,
            overlap_steps=overlap if self.overlap_steps is None else self.overlap_steps,
            first_sync=self.first_sync,
            offsets=self.offsets,
        )
