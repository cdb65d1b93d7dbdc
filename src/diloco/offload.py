"""Where the outer state lives: beside the parameters, or in host memory, from which fragments visit the device."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["outer", "velocity", "error"]
"""Θ, the outer momentum v, and the error e of error feedback."""
KINDS: tuple[Kind, ...] = ("outer", "velocity", "error")


class OuterState:
    """Flat FP32 vectors of every fragment, by kind.

    In host memory they are pinned, and copied to and from the device on a stream of its own while training goes
    on. One fragment visits the device at a time: the one in use, and after that the one that was announced.

    Args:
        vectors: of each kind one vector a fragment, or none, on the device where they are used.
        offload: keep them in host memory.
    """

    def __init__(self, vectors: Mapping[Kind, Sequence[Tensor]], *, offload: bool) -> None:
        self._device = vectors["outer"][0].device
        self._offload = offload
        self._stream = torch.cuda.Stream(self._device) if offload and self._device.type == "cuda" else None
        self._home = {
            kind: [self._at_home(vector_N) for vector_N in fragments] for kind, fragments in vectors.items()
        }
        self._visiting: dict[tuple[Kind, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    def use(self, kind: Kind, fragment: int) -> Tensor:
        """The vector on the device, to be read or changed in place by what is queued there from now on."""
        if not self._offload:
            return self._home[kind][fragment]
        self._send_home_all_but(fragment)
        if (kind, fragment) not in self._visiting:
            self._fetch(kind, fragment)
        vector_N, arrived = self._visiting[kind, fragment]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        return vector_N

    def keep(self, kind: Kind, fragment: int) -> None:
        """What `use` gave was changed: from now on this is the vector."""
        if not self._offload:
            return
        vector_N, _ = self._visiting[kind, fragment]
        if self._stream is None:
            self._home[kind][fragment].copy_(vector_N)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._home[kind][fragment].copy_(vector_N, non_blocking=True)

    def expect(self, kinds: Sequence[Kind], fragment: int) -> None:
        """This fragment will be used next: start to fetch it."""
        if not self._offload:
            return
        self._send_home_all_but(fragment)
        for kind in kinds:
            if kind in self and (kind, fragment) not in self._visiting:
                self._fetch(kind, fragment)

    def at_home(self, kind: Kind) -> list[Tensor]:
        """The vectors of all fragments where they live, with every change; they may be changed in place, too."""
        if self._stream is not None:
            self._stream.synchronize()
        self._visiting.clear()
        return self._home[kind]

    def num_elements(self, fragment: int) -> int:
        """N."""
        return self._home["outer"][fragment].numel()

    def __contains__(self, kind: Kind) -> bool:
        return bool(self._home[kind])

    def _at_home(self, vector_N: Tensor) -> Tensor:
        if not self._offload:
            return vector_N
        return torch.empty(vector_N.shape, dtype=vector_N.dtype, pin_memory=vector_N.is_cuda).copy_(vector_N)

    def _fetch(self, kind: Kind, fragment: int) -> None:
        home_N = self._home[kind][fragment]
        if self._stream is None:
            self._visiting[kind, fragment] = home_N.clone(), None
            return
        with torch.cuda.stream(self._stream):
            vector_N = home_N.to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        vector_N.record_stream(torch.cuda.current_stream(self._device))
        self._visiting[kind, fragment] = vector_N, arrived

    def _send_home_all_but(self, fragment: int) -> None:
        """The memory is free for others when the stream has done what it was asked to."""
        for visitor in [visitor for visitor in self._visiting if visitor[1] != fragment]:
            del self._visiting[visitor]
