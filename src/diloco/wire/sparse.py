"""Sparse codecs: Top-K, SparseLoCo and PULSE keep large magnitudes; FedDropout and DARE keep a random subset.

Figure 6 of arXiv 2501.18512 compares Top-K, FedDropout and DARE with low precision. Random masks are arXiv
1610.05492; DARE is arXiv 2311.03099: drop each value with a probability, and rescale.

Shapes: N elements, k values that are sent, B blocks of K elements.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from diloco.wire import floats, formats, integers
from diloco.wire.blocks import join, split
from diloco.wire.kernels.gpu import GpuSparse, gpu_sparse
from diloco.wire.kernels.native import NativeSparse, native
from diloco.wire.payload import Codec, Key, Mask, is_finite

_DENSE = {kind.name: kind for kind in (*floats.CODECS, *integers.CODECS)}
"""The codecs of the kept elements that `values` names."""


@dataclass(frozen=True)
class _Sparse(formats.Sparse, Codec):
    """Some of N elements; the others are zero."""

    never_written = "places or values that are never written"

    @property
    @abstractmethod
    def dense(self) -> Codec:
        """The codec of the kept elements."""

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Write the places, then the kept values."""
        self.check_body(body, delta_N.numel())
        end = self.places_bytes(delta_N.numel())
        kept_k, are_finite = self.keep(delta_N, body[:end], key)
        largest = torch.finfo(torch.float32).max
        kept_k = kept_k.mul_(self.gain(delta_N.numel())).clamp_(-largest, largest)
        self.dense.pack(kept_k, body[end:], key)
        return are_finite

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """Write zeros, and the kept values in their places."""
        self.check_body(body, to_N.numel())
        end = self.places_bytes(to_N.numel())
        kept_k = torch.empty(self.num_values(to_N.numel()), dtype=torch.float32, device=to_N.device)
        # A copy is aligned for every format.
        are_values = self.dense.unpack(body[end:].clone(), kept_k, key, add=False)
        return self.spread(kept_k, body[:end], to_N, key, add=add) & are_values

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """True if the places and the values are sound; none of the values is written."""
        self.check_body(body, num_elements)
        end, kept = self.places_bytes(num_elements), self.num_values(num_elements)
        are_values = self.dense.is_sound(body[end:].clone(), kept, key)
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
class _Placed(formats.Placed, _Sparse):
    """The places are sent in the code of Elias and Fano.

    Of each place, ascending, the low l = ⌊log2⌊N/k⌋⌋ bits are sent as they are, k·l bits together. The rest, place
    div 2^l, is sent as a bit vector of k + ⌊(N − 1)/2^l⌋ bits: for the j-th place (from 0), bit j + place div 2^l
    is set. Both are rounded up to bytes; bits fill a byte from the low end. That is at most 2 + log2(N/k) bits per
    place, and does not depend on the places.
    """

    def keep(
        self, delta_N: Float32[Tensor, "N"], places: UInt8[Tensor, "bytes"], key: Key
    ) -> tuple[Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """Keep the largest magnitudes."""
        place_k, kept_k, are_finite = self.largest(delta_N)
        self.pack_places(place_k, delta_N.numel(), places)
        return kept_k, are_finite

    @abstractmethod
    def largest(
        self, delta_N: Float32[Tensor, "N"]
    ) -> tuple[Int64[Tensor, "k"], Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """The places to keep, ascending; the values there; and True if the whole vector is finite."""

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
class _Share(formats.Share, _Sparse):
    """A share of N elements, in any dense codec."""

    @property
    def dense(self) -> Codec:
        """The codec that `values` names."""
        return _DENSE[self.values]()


@dataclass(frozen=True)
class TopK(formats.TopK, _Share, _Placed):
    """The largest magnitudes; of equal ones, the first."""

    def largest(
        self, delta_N: Float32[Tensor, "N"]
    ) -> tuple[Int64[Tensor, "k"], Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """The k largest of all."""
        kept = self.num_values(delta_N.numel())
        if (kernels := _kernels(delta_N)) is not None:
            return kernels.largest(delta_N, kept)
        place_k = _largest(delta_N[None], kept)[0]
        return place_k, delta_N[place_k], is_finite(delta_N)


@dataclass(frozen=True)
class Pulse(formats.Pulse, TopK):
    """s_i where BF16(Θ_i − s_i) ≠ BF16(Θ_i), as the next forward pass sees it; the rest waits in the error.

    The gate of PULSELoCo (arXiv 2602.03839, version 2), with its FP32 values. s = β e + Δ is what error feedback
    encodes; the paper's β is 1. Where Θ is not given, every element counts as seen. The paper sends as many values
    as there are; here k = ⌈density·N⌉, since receivers wait for a length that they know: of more, the largest
    magnitudes are sent, and instead of fewer, zeros. The body is that of Top-K.
    """

    needs_outer = True

    def gated(self, delta_N: Float32[Tensor, "N"], outer_N: Float32[Tensor, "N"]) -> Float32[Tensor, "N"]:
        """Zero where the mask's dtype does not see the change."""
        is_bf16 = self.mask == "bf16"
        if delta_N.is_cuda and (kernels := gpu_sparse()) is not None:
            return kernels.gated(delta_N, outer_N, is_bf16=is_bf16)
        if (fast := _native(delta_N, outer_N)) is not None:
            return fast.gated(delta_N, outer_N, is_bf16=is_bf16)
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        return delta_N.where((outer_N - delta_N).to(dtype) != outer_N.to(dtype), 0)


@dataclass(frozen=True)
class SparseLoCo(formats.SparseLoCo, _Placed):
    """The 64 largest magnitudes of each 4,096 elements, at 2 bits (arXiv 2508.15706).

    The paper's e ← β e + Δ is the engine's error feedback (its β is 0.95); its outer step has no momentum. Its
    blocks are tiles of 64 × 64 of a matrix, here 4,096 elements of the flat vector in a row. Its authors' code
    (tplr-ai/templar) sends a place in 12 bits, or in a Rice code of varying length; the code of Elias and Fano
    takes 8, whatever the places. For the 2 bits, that code bins all kept values of a tensor around their mean, 1.5
    standard deviations wide, and decodes a bin to its values' mean. That is not taken: after Top-K nothing is near
    the mean, and devices sum in other orders. `Halves` loses less: 8 % of normal values, and that code 11 %.
    """

    @property
    def dense(self) -> Codec:
        """Two bits, and two bounds per block."""
        return Halves(block=self.k)

    def largest(
        self, delta_N: Float32[Tensor, "N"]
    ) -> tuple[Int64[Tensor, "k"], Float32[Tensor, "k"], Bool[Tensor, ""]]:
        """The k largest of each block."""
        if (kernels := _kernels(delta_N)) is not None:
            return kernels.largest_of_blocks(delta_N, self.block, self.k, self.num_values(delta_N.numel()))
        num_whole = delta_N.numel() // self.block
        end = num_whole * self.block
        starts = torch.arange(0, end, self.block, dtype=torch.int64, device=delta_N.device)
        place_Bxk = _largest(delta_N[:end].view(num_whole, self.block), self.k) + starts[:, None]
        last_k = _largest(delta_N[None, end:], self.num_values(delta_N.numel() - end))[0] + end
        place_k = torch.cat([place_Bxk.view(-1), last_k])
        return place_k, delta_N[place_k], is_finite(delta_N)

    def unpack_places(
        self, places: UInt8[Tensor, "bytes"], num_elements: int
    ) -> tuple[Int64[Tensor, "k"], Bool[Tensor, ""]]:
        """As in every codec that sends places; False also if a block has another number of them."""
        place_k, are_places = super().unpack_places(places, num_elements)
        block_k = torch.arange(place_k.numel(), dtype=torch.int64, device=place_k.device) // self.k
        return place_k, are_places & (place_k // self.block == block_k).all()


@dataclass(frozen=True)
class Halves(formats.Halves, Codec):
    """Sign, and the half in which a magnitude lies between its block's smallest, a, and largest, c.

    With a and c in BF16 and d = c − a: a + d/4 stands for what is below a + d/2, and c − d/4 for the others. The
    body is a and c of every block, then the codes: 2·sign + half.
    """

    def pack(self, delta_N: Float32[Tensor, "N"], body: UInt8[Tensor, "bytes"], key: Key) -> Bool[Tensor, ""]:
        """Bounds, then codes."""
        missing, end = -delta_N.numel() % self.block, self.scales_bytes(delta_N.numel())
        sizes = [pad(delta_N.abs(), (0, missing), value=value).view(-1, self.block) for value in (math.inf, 0)]
        bound_Bx2 = torch.stack([sizes[0].amin(dim=1), sizes[1].amax(dim=1)], dim=1)
        bound_Bx2 = bound_Bx2.clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
        smallest_B, largest_B = bound_Bx2.float().unbind(dim=1)
        middle_B = smallest_B + (largest_B - smallest_B) * 0.5
        half_N = (sizes[1] >= middle_B[:, None]).view(-1)[: delta_N.numel()]
        body[:end] = bound_Bx2.view(torch.uint8).view(-1)
        body[end:] = join(delta_N.signbit().to(torch.uint8) << 1 | half_N.to(torch.uint8), self.bits)
        return is_finite(delta_N)

    def unpack(
        self, body: UInt8[Tensor, "bytes"], to_N: Float32[Tensor, "N"], key: Key, *, add: bool
    ) -> Bool[Tensor, ""]:
        """The value of each code between its block's bounds."""
        smallest_B, largest_B = self._bounds(body, to_N.numel())
        quarter_B = (largest_B - smallest_B) * 0.25
        level_Bx2 = torch.stack([smallest_B + quarter_B, largest_B - quarter_B], dim=1)
        value_Bx4 = torch.cat([level_Bx2, -level_Bx2], dim=1)
        code_N = split(body[self.scales_bytes(to_N.numel()) :], to_N.numel(), self.bits).long()
        code_BxK = pad(code_N, (0, -to_N.numel() % self.block)).view(-1, self.block)
        value_N = value_Bx4.gather(1, code_BxK).view(-1)[: to_N.numel()]
        to_N.copy_(to_N + value_N if add else value_N)
        return self.is_sound(body, to_N.numel(), key)

    def is_sound(self, body: UInt8[Tensor, "bytes"], num_elements: int, key: Key) -> Bool[Tensor, ""]:
        """True if all bounds are finite, and in order."""
        smallest_B, largest_B = self._bounds(body, num_elements)
        return ((smallest_B >= 0) & (smallest_B <= largest_B) & (largest_B < math.inf)).all()

    def _bounds(self, body: Tensor, num_elements: int) -> tuple[Tensor, ...]:
        """a and c of each block."""
        bounds = body[: self.scales_bytes(num_elements)].view(torch.bfloat16)
        return bounds.float().view(-1, 2).unbind(dim=1)


@dataclass(frozen=True)
class FedDropout(formats.FedDropout, _Share):
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


CODECS = (TopK, FedDropout, DARE, SparseLoCo, Pulse)


def _largest(delta_BxK: Float32[Tensor, "B K"], kept: int) -> Int64[Tensor, "B k"]:
    """The columns of each row's largest magnitudes, ascending; of equal ones, the first."""
    # With the place in the low bits no two numbers are equal, so that every device gives the same answer.
    magnitude_BxK = (delta_BxK.view(torch.int32) & 0x7FFFFFFF).long()
    column_K = torch.arange(delta_BxK.shape[1], dtype=torch.int64, device=delta_BxK.device)
    first_Bxk = torch.topk(~magnitude_BxK << 32 | column_K, kept, largest=False).values
    return first_Bxk.bitwise_and(0xFFFFFFFF).sort(dim=1).values


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
