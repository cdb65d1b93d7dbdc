"""What each method of the papers sends, and when."""

from dataclasses import dataclass
from typing import Literal, get_args

from diloco.errors import UserError
from diloco.schedule import Schedule

Method = Literal["data_parallel", "diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A method and its numbers; None is the method's own.

    Raises:
        UserError: if they contradict each other, or the method; the message names both values.
    """

    method: Method
    """data_parallel exchanges gradients at every step; the others outer gradients."""
    sync_every: int = 100
    """H; nothing to data_parallel."""
    layers_per_fragment: int = 3
    """Of the streaming methods."""
    fragments: Literal["strided", "sequential"] = "strided"
    """Which layers of the model a fragment takes, of the streaming methods."""
    overlap_steps: int | tuple[int, ...] | None = None
    """τ, one number or one a replica; None is 1 for the overlapped methods, and 0 is all that the others have."""
    first_sync: Literal["full_period", "early"] = "full_period"
    """As in `Schedule`; it matters to runs that are short."""
    offsets: tuple[int, ...] | None = None
    """As in `Schedule`, of the streaming methods: one a fragment."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.method not in METHODS:
            raise UserError(f"{self.method!r} is not a method: choose one of {', '.join(METHODS)}")
        if self.overlap_steps is not None and not self.overlaps:
            raise UserError(
                f"overlap_steps={self.overlap_steps}, but {self.method} does not overlap: leave it out, "
                "or take streaming_overlapped"
            )
        for name in ("sync_every", "layers_per_fragment"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.fragments not in ("strided", "sequential"):
            raise UserError(f"fragments must be strided or sequential, not {self.fragments!r}")
        self.schedule(len(self.offsets or (0,)))  # which checks the rest

    @property
    def streams(self) -> bool:
        """Whether fragments travel one at a time."""
        return self.method.startswith("streaming")

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while they travel."""
        return self.method.startswith("streaming_overlapped")

    @property
    def wire(self) -> str:
        """The codec that the method is named for."""
        return "e3m0" if self.method.endswith("fp4") else "fp32"

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers, from 0, of each fragment (arXiv 2501.18512, 3.1), or all in one."""
        if self.streams and self.layers_per_fragment > num_layers:
            raise UserError(
                f"layers_per_fragment={self.layers_per_fragment}, but the model has num_layers={num_layers}"
            )
        if not self.streams:
            return (range(num_layers),)
        size, num_fragments = self.layers_per_fragment, -(-num_layers // self.layers_per_fragment)
        if self.fragments == "strided":
            return tuple(range(first, num_layers, num_fragments) for first in range(num_fragments))
        return tuple(range(first, min(first + size, num_layers)) for first in range(0, num_layers, size))

    def schedule(self, num_fragments: int) -> Schedule:
        """When each of that many fragments is sent and merged."""
        return Schedule(
            sync_every=1 if self.method == "data_parallel" else self.sync_every,
            num_fragments=num_fragments,
            overlap_steps=self.overlap_steps if self.overlap_steps is not None else int(self.overlaps),
            first_sync=self.first_sync,
            offsets=self.offsets,
        )
