"""Sparse codecs: Top-K keeps the largest magnitudes; FedDropout and DARE keep a random subset.

Figure 6 of arXiv 2501.18512 compares them with low precision. Random masks are in section 4 of arXiv 1610.05492;
DARE is arXiv 2311.03099: drop each value with a probability, and rescale.

Shapes: N elements, k values that are sent.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from diloco.wire import floats, formats, integers
from diloco.wire.blocks import join, split
from diloco.wire.kernels.gpu import GpuSparse, gpu_sparse
from diloco.wire.kernels.native import native
from diloco.wire.kernels.native_sparse import NativeSparse
from diloco.wire.payload import Codec, Key, Mask, is_finite

_DENSE = {kind.name: kind for kind in (*floats.CODECS, *integers.CODECS)}
"""The codecs of the kept elements."""


@dataclass(frozen=True)
class _Sparse(formats.Sparse, Codec):
    """A share of N elements; the others are zero."""

    never_written = "places or values that are never written"

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Write the places, then the kept values."""
        self.check_body(body, delta_N.numel())
        end = self.places_bytes(delta_N.numel())
        kept_k, are_finite = self.keep(delta_N, body[:end], key)
        largest = torch.finfo(torch.float32).max
        kept_k = kept_k.mul_(self.gain(delta_N.numel())).clamp_(-largest, largest)
        _DENSE[self.values]().pack(kept_k, body[end:], key)
        return are_finite

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """Write zeros, and the kept values in their places."""
        self.check_body(body, to_N.numel())
        end = self.places_bytes(to_N.numel())
        kept_k = torch.empty(self.num_values(to_N.numel()), dtype=torch.float32, device=to_N.device)
        # A copy is aligned for every format.
        are_values = _DENSE[self.values]().unpack(body[end:].clone(), kept_k, key, add=False)
        return self.spread(kept_k, body[:end], to_N, key, add=add) & are_values

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """True if the places and the values are sound; none of the values is written."""
        self.check_body(body, num_elements)
        end, kept = self.places_bytes(num_elements), self.num_values(num_elements)
        are_values = _DENSE[self.values]().is_sound(body[end:].clone(), kept, key)
        return self.are_places(body[:end], num_elements) & are_values

    def are_places(self, places: UInt8[Tensor, "bytes"], num_elements: int) -> Bool[Tensor, ""]:
        """True if `keep` can have written these bytes, or writes none."""
        return torch.ones((), dtype=torch.bool, device=places.device)

    @abstractmethod
    def keep(
        self, delta_N: Float32[Tensor, "N"], places: UInt8[Tensor, "bytes"], key: Key
    ) -> tuple[Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """Write the places; return the values there in ascending order, and True if the vector is finite."""

    @abstractmethod
    def spread(
        self,
        kept_k: Float32[Tensor, "k"],
        places: UInt8[Tensor, "bytes"],
        to_N: Float32[Tensor, "N"],
        key: Key,
        *,
        add: bool,
    ) -> Bool[Tensor, ""]:
        """Write zeros and the values, or add the values; False: `keep` never writes such places."""


@dataclass(frozen=True)
class TopK(formats.TopK, _Sparse):
    """The largest magnitudes; of equal ones, the first. Places are sent in the code of Elias and Fano.

    Of each place, ascending, the low l = ⌊log2(N/k)⌋ bits are sent as they are, k·l bits together. The rest, place
    div 2^l, is sent as a bit vector of k + ⌊(N − 1)/2^l⌋ bits: for the j-th place (from 0), bit j + place div 2^l
    is set. Both are rounded up to bytes; bits fill a byte from the low end. That is at most 2 + log2(N/k) bits per
    place, and does not depend on the places.
    """

    def keep(
        self, delta_N: Float32[Tensor, "N"], places: UInt8[Tensor, "bytes"], key: Key
    ) -> tuple[Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """Keep the largest magnitudes."""
        kept = self.num_values(delta_N.numel())
        if (kernels := _kernels(delta_N)) is not None:
            place_k, kept_k, are_finite = kernels.largest(delta_N, kept)
        else:
            # With the place in the low bits no two numbers are equal, so that every device gives the same answer.
            magnitude_N = (delta_N.view(torch.int32) & 0x7FFFFFFF).long()
            order_N = ~magnitude_N << 32 | torch.arange(len(delta_N), dtype=torch.int64, device=delta_N.device)
            first_k = torch.topk(order_N, kept, largest=False).values
            place_k = first_k.bitwise_and(0xFFFFFFFF).sort().values
            kept_k, are_finite = delta_N[place_k], is_finite(delta_N)
        self.pack_places(place_k, delta_N.numel(), places)
        return kept_k, are_finite

    def spread(
        self,
        kept_k: Float32[Tensor, "k"],
        places: UInt8[Tensor, "bytes"],
        to_N: Float32[Tensor, "N"],
        key: Key,
        *,
        add: bool,
    ) -> Bool[Tensor, ""]:
        """Write or add the values in the places that are sent."""
        place_k, are_places = self.unpack_places(places, to_N.numel())
        if not add:
            to_N.zero_()
        if (fast := _native(to_N, kept_k)) is not None:
            fast.write(place_k, kept_k, to_N, add=add)
        elif add:
            to_N[place_k] += kept_k  # no place occurs twice
        else:
            to_N[place_k] = kept_k
        return are_places

    def pack_places(self, place_k: Int64[Tensor, "k"], num_elements: int, places: UInt8[Tensor, "bytes"]) -> None:
        """Write the low bits, then the bit vector."""
        low_bytes, high_bits, num_low = self.places_layout(num_elements)
        if (fast := _native(place_k, places)) is not None:
            fast.pack_places(place_k, num_low, places[:low_bytes], places[low_bytes:])
            return
        shifts = torch.arange(num_low, dtype=torch.int64, device=places.device)
        low_bits = (place_k[:, None] >> shifts & 1).to(torch.uint8).view(-1)
        places[:low_bytes] = join(low_bits, 1)
        vector = torch.zeros(high_bits, dtype=torch.uint8, device=places.device)
        vector[(place_k >> num_low) + torch.arange(place_k.numel(), dtype=torch.int64, device=places.device)] = 1
        places[low_bytes:] = join(vector, 1)

    def unpack_places(
        self, places: UInt8[Tensor, "bytes"], num_elements: int
    ) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
        """Read places in the vector; False: `pack_places` never writes them."""
        low_bytes, high_bits, num_low = self.places_layout(num_elements)
        kept = self.num_values(num_elements)
        if (fast := _native(places)) is not None:
            place_k = torch.zeros(kept, dtype=torch.int64, device=places.device)
            parts = num_low, places[:low_bytes], places[low_bytes:], (high_bits, num_elements)
            return place_k, torch.tensor(fast.unpack_places(place_k, *parts), dtype=torch.bool, device="cpu")
        shifts = torch.arange(num_low, dtype=torch.int64, device=places.device)
        low_bits = split(places[:low_bytes], kept * num_low, 1).view(kept, num_low).long()
        one_k, are_k = _ones(split(places[low_bytes:], high_bits, 1), kept)
        high_k = one_k - torch.arange(kept, dtype=torch.int64, device=places.device)
        place_k = (high_k << num_low) + (low_bits << shifts).sum(dim=1)
        is_sound = are_k & (place_k < num_elements).all() & (place_k.diff() > 0).all()
        return place_k.clamp(0, max(0, num_elements - 1)), is_sound

    def are_places(self, places: UInt8[Tensor, "bytes"], num_elements: int) -> Bool[Tensor, ""]:
        """True if k places are named, ascending and all in the vector."""
        return self.unpack_places(places, num_elements)[1]


@dataclass(frozen=True)
class FedDropout(formats.FedDropout, _Sparse):
    """A random subset, new in each round, the same on all replicas; its places are not sent.

    Each element is kept with the probability `density`, independently of the others. The room for values that are
    not there holds zeros, which nobody reads; if there are more values than room, the last ones are dropped.
    """

    def keep(
        self, delta_N: Float32[Tensor, "N"], places: UInt8[Tensor, "bytes"], key: Key
    ) -> tuple[Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """Keep what the key alone chooses."""
        mask, room = self._mask(key, delta_N.numel()), self.num_values(delta_N.numel())
        if (kernels := _kernels(delta_N)) is not None:
            return kernels.masked(mask, delta_N, room)
        rank_N, is_kept_N = _ranks(mask.flags(delta_N.numel(), delta_N.device), room)
        kept_k = torch.zeros(room + 1, dtype=torch.float32, device=delta_N.device)
        kept_k.scatter_(0, torch.where(is_kept_N, rank_N, room), delta_N)  # what is not kept goes into the last
        return kept_k[:room], is_finite(delta_N)

    def spread(
        self,
        kept_k: Float32[Tensor, "k"],
        places: UInt8[Tensor, "bytes"],
        to_N: Float32[Tensor, "N"],
        key: Key,
        *,
        add: bool,
    ) -> Bool[Tensor, ""]:
        """Write or add the values in the places that the key chooses again."""
        mask = self._mask(key, to_N.numel())
        if (kernels := _kernels(to_N)) is not None:
            kernels.spread(mask, kept_k, to_N, add=add)
        elif kept_k.numel():
            rank_N, is_kept_N = _ranks(mask.flags(to_N.numel(), to_N.device), kept_k.numel())
            value_N = kept_k[rank_N.clamp_(0, kept_k.numel() - 1)]
            to_N.copy_(torch.where(is_kept_N, to_N + value_N if add else value_N, to_N if add else 0.0))
        return self.are_places(places, to_N.numel())

    def _mask(self, key: Key, num_elements: int) -> Mask:
        assert num_elements <= 1 << 32, "a position has 32 bits"
        return Mask.of(key, self.density)


@dataclass(frozen=True)
class DARE(formats.DARE, FedDropout):
    """FedDropout with the kept values divided by the density, so that a decoded value is right on average.

    They are multiplied by 1/density, the double, rounded to FP32.
    """


CODECS = (TopK, FedDropout, DARE)


def _ones(bits: UInt8[Tensor, "bits"], kept: int) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
    """The places of k ones, and True if there are exactly k; if not, some places are not those of ones."""
    if bits.device.type != "cpu":  # a GPU would wait to learn how many there are
        return torch.nonzero_static(bits, size=kept, fill_value=0).view(-1), bits.sum(dtype=torch.int64) == kept
    ones = bits.nonzero().view(-1)
    are_k = torch.tensor(ones.numel() == kept, dtype=torch.bool, device="cpu")
    return (ones if are_k else torch.zeros(kept, dtype=torch.int64, device="cpu")), are_k


def _ranks(is_kept_N: Bool[Tensor, "N"], room: int) -> tuple[Int64[Tensor, "N"], Bool[Tensor, "N"]]:
    """The number of kept elements before each, and flags of those for which there is room."""
    rank_N = is_kept_N.cumsum(0) - 1
    return rank_N, is_kept_N & (rank_N < room)


def _kernels(vector_N: Tensor) -> GpuSparse | NativeSparse | None:
    """The fast functions for the vector's device, if there are any."""
    if vector_N.is_cuda:
        return gpu_sparse()
    return _native(vector_N)


def _native(*tensors: Tensor) -> NativeSparse | None:
    """The C functions, if they can reach these tensors."""
    is_within_reach = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    compiled = native() if is_within_reach else None
    return None if compiled is None else NativeSparse(compiled)
