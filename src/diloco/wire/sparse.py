"""Sparse codecs: Top-K keeps the largest magnitudes; FedDropout and DARE keep a random subset.

Figure 6 of arXiv 2501.18512 compares them with low precision. Random masks are in section 4 of arXiv 1610.05492;
DARE is arXiv 2311.03099: drop and rescale.

Shapes: N elements, of which k = ⌈density·N⌉ are kept.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from diloco.wire import floats, formats, integers
from diloco.wire.blocks import join, split
from diloco.wire.payload import Codec, Key, is_finite, random_bits

_DENSE = {kind.name: kind for kind in (*floats.CODECS, *integers.CODECS)}
"""The codecs of the kept elements."""


@dataclass(frozen=True)
class _Sparse(formats.Sparse, Codec):
    """k of N elements; the others are zero."""

    never_written = "places or values that are never written"

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Write the places, then the kept values."""
        self.check_body(body, delta_N.numel())
        place_k = self.choose(delta_N, key)
        end = self.places_bytes(delta_N.numel())
        self.pack_places(place_k, delta_N.numel(), body[:end])
        largest = torch.finfo(torch.float32).max
        kept_k = (delta_N[place_k] * self.gain(delta_N.numel())).clamp(-largest, largest)
        _DENSE[self.values]().pack(kept_k, body[end:], key)
        return is_finite(delta_N)

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """Write zeros, and the kept values in their places."""
        self.check_body(body, to_N.numel())
        end = self.places_bytes(to_N.numel())
        place_k, are_places = self.unpack_places(body[:end], to_N.numel(), key)
        kept_k = torch.empty(self.num_kept(to_N.numel()), dtype=torch.float32, device=to_N.device)
        # A copy is aligned for every format.
        are_values = _DENSE[self.values]().unpack(body[end:].clone(), kept_k, key, add=False)
        if add:
            to_N[place_k] += kept_k  # no place occurs twice
        else:
            to_N.zero_()[place_k] = kept_k
        return are_places & are_values

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """True if the places and the values are sound; none of the values is written."""
        self.check_body(body, num_elements)
        end, kept = self.places_bytes(num_elements), self.num_kept(num_elements)
        are_values = _DENSE[self.values]().is_sound(body[end:].clone(), kept, key)
        return self.are_places(body[:end], num_elements) & are_values

    def are_places(self, body: UInt8[Tensor, "bytes"], num_elements: int) -> Bool[Tensor, ""]:
        """True if `pack_places` can have written these bytes, or writes none."""
        return torch.ones((), dtype=torch.bool, device=body.device)

    @abstractmethod
    def choose(self, delta_N: Float32[Tensor, "N"], key: Key) -> Int64[Tensor, "k"]:
        """The places to keep, ascending."""

    @abstractmethod
    def pack_places(self, place_k: Int64[Tensor, "k"], num_elements: int, body: UInt8[Tensor, "bytes"]) -> None:
        """Write the places into `places_bytes(N)` bytes."""

    @abstractmethod
    def unpack_places(
        self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key
    ) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
        """Read the places, all in the vector, or draw them again; False: `pack` never writes them."""


@dataclass(frozen=True)
class TopK(formats.TopK, _Sparse):
    """The largest magnitudes; of equal ones, the first. Places are sent in the code of Elias and Fano.

    Of each place, ascending, the low l = ⌊log2(N/k)⌋ bits are sent as they are, k·l bits together. The rest, place
    div 2^l, is sent as a bit vector of k + ⌊(N − 1)/2^l⌋ bits: for the j-th place (from 0), bit j + place div 2^l
    is set. Both are rounded up to bytes; bits fill a byte from the low end. That is at most 2 + log2(N/k) bits per
    place, and does not depend on the places.
    """

    def choose(self, delta_N: Float32[Tensor, "N"], key: Key) -> Int64[Tensor, "k"]:
        """Choose by magnitude."""
        magnitude_N = (delta_N.view(torch.int32) & 0x7FFFFFFF).long()
        return _first_k(~magnitude_N, self.num_kept(delta_N.numel()))

    def pack_places(self, place_k: Int64[Tensor, "k"], num_elements: int, body: UInt8[Tensor, "bytes"]) -> None:
        """Write the low bits, then the bit vector."""
        low_bytes, high_bits, num_low = self.places_layout(num_elements)
        shifts = torch.arange(num_low, dtype=torch.int64, device=body.device)
        low_bits = (place_k[:, None] >> shifts & 1).to(torch.uint8).view(-1)
        body[:low_bytes] = join(low_bits, 1)
        vector = torch.zeros(high_bits, dtype=torch.uint8, device=body.device)
        vector[(place_k >> num_low) + torch.arange(place_k.numel(), dtype=torch.int64, device=body.device)] = 1
        body[low_bytes:] = join(vector, 1)

    def unpack_places(
        self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key
    ) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
        """Read the low bits and the bit vector."""
        low_bytes, high_bits, num_low = self.places_layout(num_elements)
        kept = self.num_kept(num_elements)
        shifts = torch.arange(num_low, dtype=torch.int64, device=body.device)
        low_bits = split(body[:low_bytes], kept * num_low, 1).view(kept, num_low).long()
        one_k, are_k = _ones(split(body[low_bytes:], high_bits, 1), kept)
        high_k = one_k - torch.arange(kept, dtype=torch.int64, device=body.device)
        place_k = (high_k << num_low) + (low_bits << shifts).sum(dim=1)
        is_sound = are_k & (place_k < num_elements).all() & (place_k.diff() > 0).all()
        return place_k.clamp(0, max(0, num_elements - 1)), is_sound

    def are_places(self, body: UInt8[Tensor, "bytes"], num_elements: int) -> Bool[Tensor, ""]:
        """True if k places are named, ascending and all in the vector."""
        return self.unpack_places(body, num_elements, Key())[1]


@dataclass(frozen=True)
class FedDropout(formats.FedDropout, _Sparse):
    """A random subset, new in each round, the same on all replicas; its places are not sent.

    It keeps the k elements with the smallest random numbers of 31 bits; of equal ones, the first.
    """

    def choose(self, delta_N: Float32[Tensor, "N"], key: Key) -> Int64[Tensor, "k"]:
        """Choose by the key alone."""
        return self._mask(delta_N.numel(), key, delta_N.device)

    def pack_places(self, place_k: Int64[Tensor, "k"], num_elements: int, body: UInt8[Tensor, "bytes"]) -> None:
        """Write nothing."""

    def unpack_places(
        self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key
    ) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
        """Draw the places again."""
        return self._mask(num_elements, key, body.device), self.are_places(body, num_elements)

    def _mask(self, num_elements: int, key: Key, device: torch.device) -> Int64[Tensor, "k"]:
        bits_N = random_bits(key, num_elements, device, common=True) >> 1
        return _first_k(bits_N, self.num_kept(num_elements))


@dataclass(frozen=True)
class DARE(formats.DARE, FedDropout):
    """FedDropout with the kept values multiplied by N/k (in FP32), so that a decoded value is right on average."""


CODECS = (TopK, FedDropout, DARE)


def _ones(bits: UInt8[Tensor, "bits"], kept: int) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
    """The places of k ones, and True if there are exactly k; if not, some places are not those of ones."""
    if bits.device.type != "cpu":  # a GPU would wait to learn how many there are
        return torch.nonzero_static(bits, size=kept, fill_value=0).view(-1), bits.sum(dtype=torch.int64) == kept
    ones = bits.nonzero().view(-1)
    are_k = torch.tensor(ones.numel() == kept, dtype=torch.bool, device="cpu")
    return (ones if are_k else torch.zeros(kept, dtype=torch.int64, device="cpu")), are_k


def _first_k(order_N: Int64[Tensor, "N"], kept: int) -> Int64[Tensor, "k"]:
    """Places of the k smallest 32-bit numbers, ties to the first, ascending."""
    # With the place in the low bits no two numbers are equal, so that every device gives the same answer.
    place_N = torch.arange(order_N.numel(), dtype=torch.int64, device=order_N.device)
    return torch.topk(order_N << 32 | place_N, kept, largest=False).values.bitwise_and(0xFFFFFFFF).sort().values
