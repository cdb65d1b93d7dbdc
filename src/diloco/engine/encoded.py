"""An outer gradient on its way out: encoded on the device, sealed on the host.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.engine.guards import Verdict, undone
from diloco.reduction import Reduction
from diloco.wire.payload import Key
from diloco.wire.unsealed import Unsealed


@dataclass(eq=False, kw_only=True)
class Encoded:
    """The payloads of a fragment's outer gradient; on a GPU they may still be on their way to the host."""

    step: int
    """The inner step after which it is sent."""
    unsealed: Unsealed
    """The codec that wrote the payloads."""
    reduction: Reduction
    """The reduction with that codec."""
    payloads: tuple[Tensor, ...]
    """The payloads on the device, without headers."""
    error_N: Tensor | None
    """The error of error feedback that the payloads leave."""
    host_payloads: tuple[Tensor, ...]
    """The payloads where they are sent from."""
    base: int | None
    """The digest of Θ; None where it travels with the payloads."""
    verdicts: Sequence[Verdict]
    """Verdicts on earlier merges, which travel with the payloads."""
    wait: Callable[[], None]
    """Waits for the device; then the host may read the payloads."""

    def own(self, num_elements: int, key: Key) -> Tensor:
        """The outer gradient as the other replicas will decode it, flat FP32 (N)."""
        return self.reduction.decode(self.payloads, num_elements, key)

    def sealed(self) -> tuple[Tensor, ...]:
        """The payloads as they are sent; called once, by any thread.

        Raises:
            NonFiniteError: if the outer gradient, with what error feedback adds, is not finite.
            UserError: if a merge of before was undone.
        """
        self.wait()
        notes = self.unsealed.read_notes(self.host_payloads[0])
        for verdict, is_undone in zip(self.verdicts, notes, strict=True):
            if is_undone:
                raise undone(verdict, f"step {self.step}: ")
        self.unsealed.seal_all(self.host_payloads, base=self.base)
        return self.host_payloads


def together(payloads: Sequence[Tensor], to_host: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Take payloads to the host in one copy."""
    if len(payloads) == 1:
        return (to_host(payloads[0]),)
    return to_host(torch.cat(list(payloads))).split([payload.numel() for payload in payloads])
