"""The functions of native.c for the sparse codecs, with the interface of `kernels.gpu.GpuSparse`."""

from collections.abc import Sequence
from ctypes import c_int, c_int32, c_int64, c_uint32, c_void_p

import torch
from torch import Tensor

from diloco.wire.kernels.memory import empty
from diloco.wire.kernels.native import Native, on_threads, ranges

CPU = torch.device("cpu")
_MASK = (c_void_p, c_int64, c_int64, c_uint32, c_uint32, c_uint32, c_int64, c_void_p)


class NativeSparse:
    """The functions of the sparse codecs, on contiguous CPU tensors; masks are those of diloco.wire.payload."""

    def __init__(self, compiled: Native) -> None:
        self._function = compiled.function

    def masked(self, mask: Sequence[int], delta_N: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """The values that a mask keeps, then zeros, FP32 (room); False if an element is not finite."""
        kept, pack = torch.zeros(room, dtype=torch.float32, device=CPU), self._function("mask_pack", *_MASK)

        def call(start: int, length: int, before: int) -> bool:
            addresses = delta_N.data_ptr() + 4 * start, kept.data_ptr() + 4 * before
            return not pack(addresses[0], start, length, *mask, room - before, addresses[1])

        are_finite = all(on_threads(call, self._mask_ranges(mask, delta_N.numel())))
        return kept, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def spread(self, mask: Sequence[int], kept: Tensor, to_N: Tensor, *, add: bool) -> None:
        """Write zeros and the values that a mask kept, or add the values."""
        unpack = self._function("mask_unpack", *_MASK, c_int)

        def call(start: int, length: int, before: int) -> int:
            addresses = to_N.data_ptr() + 4 * start, kept.data_ptr() + 4 * before
            return unpack(addresses[0], start, length, *mask, kept.numel() - before, addresses[1], add)

        on_threads(call, self._mask_ranges(mask, to_N.numel()))

    def largest(self, delta_N: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest magnitudes, of equal ones the first.

        Returns:
            Their places, ascending, int64 (k); their values, FP32 (k); False if an element is not finite.
        """
        place_k = torch.empty(kept, dtype=torch.int64, device=CPU)
        kept_k = torch.empty(kept, dtype=torch.float32, device=CPU)
        count = self._function("topk_count", c_void_p, c_int64, c_uint32, c_void_p)
        select = self._function("topk_select", c_void_p, *[c_int64] * 2, c_uint32, c_int64, *[c_void_p] * 2)
        if not kept:
            return place_k, kept_k, torch.ones((), dtype=torch.bool, device=CPU)
        threshold, ties, are_finite = self._threshold(delta_N, kept)

        def counts(start: int, length: int) -> tuple[int, int]:
            counts = torch.zeros(2, dtype=torch.int64, device=CPU)
            count(delta_N.data_ptr() + 4 * start, length, threshold, counts.data_ptr())
            above, equal = counts.tolist()
            return above, equal

        def call(start: int, length: int, before: int, num_ties: int) -> int:
            addresses = kept_k.data_ptr() + 4 * before, place_k.data_ptr() + 8 * before
            return select(delta_N.data_ptr() + 4 * start, start, length, threshold, num_ties, *addresses)

        parts, before, arguments = ranges(delta_N.numel(), 64), 0, list[tuple[int, ...]]()
        several = on_threads(counts, parts) if len(parts) > 1 else [(kept - ties, ties)]
        for part, (above, equal) in zip(parts, several, strict=True):
            num_ties = min(equal, ties)
            arguments.append((*part, before, num_ties))
            before, ties = before + above + num_ties, ties - num_ties
        on_threads(call, arguments)
        return place_k, kept_k, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def largest_of_blocks(
        self, delta_N: Tensor, block: int, kept: int, num_values: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `largest`, of each block its k, and of a shorter last one the same share; `num_values` in all."""
        place_k = torch.empty(num_values, dtype=torch.int64, device=CPU)
        kept_k = torch.empty(num_values, dtype=torch.float32, device=CPU)
        select = self._function("blocks_select", c_void_p, *[c_int64] * 4, *[c_void_p] * 2)

        def call(start: int, length: int) -> bool:
            before = start // block * kept
            addresses = kept_k.data_ptr() + 4 * before, place_k.data_ptr() + 8 * before
            return not select(delta_N.data_ptr() + 4 * start, start, length, block, kept, *addresses)

        are_finite = all(on_threads(call, ranges(delta_N.numel(), block)))
        return place_k, kept_k, torch.tensor(are_finite, dtype=torch.bool, device=CPU)

    def gated(self, delta_N: Tensor, outer_N: Tensor, *, is_bf16: bool) -> Tensor:
        """The elements by which Θ changes as BF16, or as FP32; zeros elsewhere."""
        gate = self._function("gate", *[c_void_p] * 2, c_int64, c_int, c_void_p)
        to_N = empty(delta_N.numel(), torch.float32, CPU)

        def call(start: int, length: int) -> int:
            vector, outer, to = (vector.data_ptr() + 4 * start for vector in (delta_N, outer_N, to_N))
            return gate(vector, outer, length, is_bf16, to)

        on_threads(call, ranges(delta_N.numel(), 16))
        return to_N

    def pack_places(self, place_k: Tensor, num_low: int, low: Tensor, high: Tensor) -> None:
        """Write the places of Top-K: the low bits of each, then the bit vector."""
        pack = self._function("places_pack", c_void_p, c_int64, c_int, c_void_p, c_void_p)
        pack(place_k.data_ptr(), place_k.numel(), num_low, low.data_ptr(), high.zero_().data_ptr())

    def unpack_places(
        self, place_k: Tensor, num_low: int, low: Tensor, high: Tensor, sizes: tuple[int, int]
    ) -> bool:
        """Read them; False if they are not k ascending ones below N.

        Args:
            place_k: zeros.
            num_low: low bits of a place.
            low: memory of these.
            high: memory of the bit vector.
            sizes: bits of that vector, and N.
        """
        unpack = self._function("places_unpack", *[c_void_p] * 2, *[c_int64] * 2, c_int, c_int64, c_void_p)
        where = place_k.numel(), num_low, sizes[1], place_k.data_ptr()
        return not unpack(low.data_ptr(), high.data_ptr(), sizes[0], *where)

    def write(self, place_k: Tensor, kept_k: Tensor, to_N: Tensor, *, add: bool) -> None:
        """Write the values in their places, or add them."""
        write = self._function("places_write", *[c_void_p] * 2, c_int64, c_void_p, c_int)
        write(place_k.data_ptr(), kept_k.data_ptr(), kept_k.numel(), to_N.data_ptr(), add)

    def _mask_ranges(self, mask: Sequence[int], num_elements: int) -> list[tuple[int, int, int]]:
        """Start and length of each thread's range, and the number of elements before it that a mask keeps."""
        count = self._function("mask_count", *[c_int64] * 2, *[c_uint32] * 3, result=c_int64)
        parts, before = ranges(num_elements, 64), 0
        counts = on_threads(lambda start, length: count(start, length, *mask), parts) if len(parts) > 1 else [0]
        placed = list[tuple[int, int, int]]()
        for (start, length), number in zip(parts, counts, strict=True):
            placed.append((start, length, before))
            before += number
        return placed

    def _threshold(self, delta_N: Tensor, kept: int) -> tuple[int, int, bool]:
        """The magnitude of the k-th largest, as an integer; the number of those at it that are kept.

        Also False if an element is not finite.
        """
        upper = self._histogram(delta_N, -1, 1 << 15)
        upper_bits, left = _last_bin(upper, kept)
        lower_bits, left = _last_bin(self._histogram(delta_N, upper_bits, 1 << 16), left)
        return upper_bits << 16 | lower_bits, left, not upper[0x7F80:].any()

    def _histogram(self, delta_N: Tensor, upper_bits: int, num_bins: int) -> Tensor:
        """The number of magnitudes per value of their upper bits."""
        histogram = self._function("topk_histogram", c_void_p, c_int64, c_int32, c_void_p)
        parts = ranges(delta_N.numel(), 64)
        counts = torch.zeros(len(parts), num_bins, dtype=torch.int64, device=CPU)

        def call(number: int, start: int, length: int) -> int:
            return histogram(delta_N.data_ptr() + 4 * start, length, upper_bits, counts[number].data_ptr())

        on_threads(call, [(number, *part) for number, part in enumerate(parts)])
        return counts.sum(0)


def _last_bin(counts: Tensor, kept: int) -> tuple[int, int]:
    """The last bin from which on there are enough, and the number that is left for it."""
    from_bin_on = counts.flip(0).cumsum(0).flip(0)
    chosen = int((from_bin_on >= kept).sum()) - 1
    return chosen, kept - int(from_bin_on[chosen] - counts[chosen])
