"""Payloads without a header: a GPU writes their bodies, and the host seals them when they have come to it.

The host need not wait for the GPU: results that only the GPU has, a byte for each bool, travel in the place of the
header, and the base at its own place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.wire.formats import BASE_BYTES, HEADER_BYTES
from diloco.wire.payload import Codec, Key, base_of, non_finite, plain

MOST_NOTES = BASE_BYTES.start - 1


@dataclass(frozen=True)
class Unsealed(Codec):
    """A codec whose payloads are sealed later, those of one outer gradient."""

    wire: Codec
    notes: tuple[Tensor, ...] = ()
    """Bools on the device, at most `MOST_NOTES`, that travel with each payload."""
    base: Tensor | None = None
    """The digest of Θ on the device, int64 (1), that travels, too; None if the host knows it."""
    sizes: list[int] = field(default_factory=list)
    """Elements of each payload that was encoded, in order."""

    name = "unsealed"

    def body_bytes(self, num_elements: int) -> int:
        """Length of the codec's body."""
        return self.wire.body_bytes(num_elements)

    def encode(self, delta_N: Tensor, key: Key = Key(), *, base: int = 0) -> Tensor:  # noqa: B008
        """A payload with, in the place of its header, whether the vector is finite, the notes and the base."""
        payload, is_finite = self.packed(delta_N, key)
        notes = torch.stack([is_finite, *self.notes])
        assert len(self.notes) <= MOST_NOTES, "the notes take the place before the base"
        payload[: len(notes)].copy_(notes)
        if self.base is not None:
            payload[BASE_BYTES].copy_(self.base.view(torch.uint8))
        self.sizes.append(delta_N.numel())
        return payload

    def decode_into(self, to_N: Tensor, payload: Tensor, key: Key = Key(), *, add: bool = False) -> Tensor:  # noqa: B008
        """Decode a payload of this process's own, which is sound."""
        self.unpack(plain(payload[HEADER_BYTES:], to_N.device), to_N, key, add=add)
        return to_N

    def read_notes(self, payload: Tensor) -> list[bool]:
        """The notes of a payload, which has come to the host."""
        return [bool(note) for note in payload[1 : 1 + len(self.notes)].tolist()]

    def seal_all(self, payloads: Sequence[Tensor], *, base: int | None) -> None:
        """Write the headers of all payloads, which have come to the host.

        Args:
            payloads: those that were encoded, in order.
            base: the digest of Θ; None where it travels with the payloads.

        Raises:
            NonFiniteError: if the outer gradient was not finite.
        """
        if not all(payload[0].item() for payload in payloads):
            raise non_finite()
        for payload, num_elements in zip(payloads, self.sizes, strict=True):
            self.wire.seal(payload, num_elements, base=base_of(payload) if base is None else base)

    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> Tensor:
        """Call the codec's own method."""
        return self.wire.pack(delta_N, body, key)

    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> Tensor:
        """Call the codec's own method."""
        return self.wire.unpack(body, to_N, key, add=add)
