"""The outer state in memory: beside the parameters, or in host memory, from which fragments visit the device.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.outer.digest import outer_digest
from diloco.wire.kernels.memory import empty, has_streams

OUTER, ERROR = "outer", "error"
"""The kinds of vectors that are not slots of a rule: Θ, and the error e of error feedback."""
SENT_THETA = "sent_theta"
"""The slot of merge rules that read the θ that was sent."""


class OuterState:
    """Flat FP32 vectors of every fragment, by kind: Θ, the slots of the outer rule, the error.

    In host memory they are pinned, and copied to and from the device on a stream of its own while training goes
    on. One fragment visits the device at a time: the one in use, and after that the one that was announced.

    Args:
        outer: Θ of each fragment, on the device where it is used; the others start at zero.
        slots: names of the outer rule's vectors.
        with_error: whether there is an error.
        offload: keep them in host memory.
    """

    def __init__(self, outer: Iterable[Tensor], *, slots: Sequence[str], with_error: bool, offload: bool) -> None:
        self._offload = offload
        self._device = torch.device("cpu")
        homes: list[Tensor] = []
        for outer_N in outer:  # one at a time: with `offload`, there may be no room for more
            self._device = outer_N.device
            homes.append(self._at_home(outer_N))
        self.kinds = (OUTER, *slots, ERROR)
        """All kinds, those without vectors included."""
        self._home: dict[str, list[Tensor]] = {OUTER: homes}
        for kind in slots:
            self._home[kind] = [self._at_home_like(home_N) for home_N in homes]
        self._home[ERROR] = [self._at_home_like(home_N) for home_N in homes if with_error]
        is_far = offload and has_streams(self._device)
        self._module: Any = torch.get_device_module(self._device) if is_far else None
        self._stream: Any = None if self._module is None else self._module.Stream(self._device)
        self._visiting: dict[tuple[str, int], tuple[Tensor, Any]] = {}

    def use(self, kind: str, fragment: int) -> Tensor:
        """The vector on the device, to be read or changed in place by work queued there from now on."""
        if not self._offload:
            return self._home[kind][fragment]
        self._send_home_all_but(fragment)
        if (kind, fragment) not in self._visiting:
            self._fetch(kind, fragment)
        vector_N, ready = self._visiting[kind, fragment]
        if ready is not None:
            stream = self._module.current_stream(self._device)
            stream.wait_event(ready)
            vector_N.record_stream(stream)
        return vector_N

    def keep(self, kind: str, fragment: int) -> None:
        """Write the changed vector of `use` back to where it lives."""
        if not self._offload:
            return
        vector_N, _ = self._visiting[kind, fragment]
        if self._stream is None:
            self._home[kind][fragment].copy_(vector_N)
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            self._home[kind][fragment].copy_(vector_N, non_blocking=True)
            self._visiting[kind, fragment] = vector_N, self._event()  # nobody changes it before it was copied

    def expect(self, kinds: Sequence[str], fragment: int) -> None:
        """Start to fetch the fragment that is used next."""
        if not self._offload:
            return
        self._send_home_all_but(fragment)
        for kind in kinds:
            if self._home[kind] and (kind, fragment) not in self._visiting:
                self._fetch(kind, fragment)

    def at_home(self, kind: str) -> list[Tensor]:
        """The vectors of all fragments where they live, with every change; they may be changed in place, too."""
        if self._stream is not None:
            self._stream.synchronize()
        self._visiting.clear()
        return self._home[kind]

    def digest(self, fragment: int, kind: str = OUTER) -> int:
        """The digest of a vector where it lives; replicas compare Θ_p by its digest."""
        if self._stream is not None:
            self._stream.synchronize()  # `keep` may still be writing it
        return outer_digest(self._home[kind][fragment])

    def num_elements(self, fragment: int) -> int:
        """N."""
        return self._home[OUTER][fragment].numel()

    @property
    def num_fragments(self) -> int:
        """P."""
        return len(self._home[OUTER])

    def _at_home(self, vector_N: Tensor) -> Tensor:
        return self._at_home_like(vector_N).copy_(vector_N) if self._offload else vector_N

    def _at_home_like(self, like_N: Tensor) -> Tensor:
        """Zeros where vectors live, pinned if they are copied to a GPU."""
        if self._offload and self._device.type == "cuda":
            return torch.zeros(like_N.numel(), dtype=torch.float32, device="cpu", pin_memory=True)
        device = torch.device("cpu") if self._offload else like_N.device
        return empty(like_N.numel(), torch.float32, device).zero_()

    @torch.inference_mode(False)  # else what `logs` fetches in an evaluation could not be changed afterwards
    def _fetch(self, kind: str, fragment: int) -> None:
        home_N = self._home[kind][fragment]
        if self._stream is None:
            self._visiting[kind, fragment] = home_N.to(self._device, copy=True), None
            return
        with self._module.stream(self._stream):
            vector_N = home_N.to(self._device, non_blocking=True)
            self._visiting[kind, fragment] = vector_N, self._event()

    def _event(self) -> Any:
        """An event after all that was queued on the stream so far."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def _send_home_all_but(self, fragment: int) -> None:
        """Drop the other fragments from the device; their memory is reused once the stream is done with it."""
        for visitor in [visitor for visitor in self._visiting if visitor[1] != fragment]:
            del self._visiting[visitor]
