"""The sparse codecs for a GPU, in Triton: which elements are kept, and where their values lie.

A program works on SIZE elements. A first kernel counts what each program keeps, so that a second one knows the
place of its first value. Top-K's threshold is the magnitude, as an integer of 31 bits, of the k-th largest: a
histogram of the upper 15 bits, then one of the lower 16 of those in the threshold's bin, tell it exactly. A first
histogram, of the largest magnitude of each group of elements, spares the others most of their additions: its k-th
largest is at most the threshold, and what is smaller need not be counted.
"""

# pyrefly: ignore-errors[implicit-any-parameter, unsupported-operation]
# ruff: noqa: ANN001, ANN202
import triton
import triton.language as tl

_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


_MASK = ["word0", "word1", "most"]
"""A diloco.wire.payload.Mask, whose numbers come as signed ones."""


@triton.jit(do_not_specialize=_MASK)
def mask_counts(counts_ptr, num_elements, word0, word1, most, SIZE: tl.constexpr) -> None:
    """Write the number of elements that each program keeps."""
    is_kept = _masked(num_elements, word0, word1, most, SIZE)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(is_kept.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=_MASK)
def mask_pack(
    delta_ptr, kept_ptr, ends_ptr, bad_ptr, num_elements, room, word0, word1, most, SIZE: tl.constexpr
) -> None:
    """Write the kept values; write 1 to `bad` if an element is not finite."""
    first, lane, is_here = _lanes(num_elements, SIZE)
    delta = tl.load(delta_ptr + first + lane, mask=is_here, other=0.0)
    _check_finite(delta, bad_ptr, SIZE)
    is_kept = _masked(num_elements, word0, word1, most, SIZE)
    before, rank = _before(ends_ptr), _ranks(is_kept)
    tl.store(kept_ptr + before + rank, delta, mask=is_kept & (rank < _left(room, before, SIZE)))


@triton.jit(do_not_specialize=_MASK)
def mask_unpack(
    kept_ptr, to_ptr, ends_ptr, num_elements, room, word0, word1, most, ADD: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Write the kept values and zeros, or add the kept values."""
    first, lane, is_here = _lanes(num_elements, SIZE)
    is_kept = _masked(num_elements, word0, word1, most, SIZE)
    before, rank = _before(ends_ptr), _ranks(is_kept)
    is_kept = is_kept & (rank < _left(room, before, SIZE))
    value = tl.load(kept_ptr + before + rank, mask=is_kept, other=0.0)
    if ADD:
        value += tl.load(to_ptr + first + lane, mask=is_kept, other=0.0)
        tl.store(to_ptr + first + lane, value, mask=is_kept)
    else:
        tl.store(to_ptr + first + lane, value, mask=is_here)


@triton.jit
def histogram(
    delta_ptr,
    counts_ptr,
    least_ptr,
    bad_ptr,
    num_elements,
    UPPER: tl.constexpr,
    GROUP: tl.constexpr,
    COPIES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Count magnitudes, from `least` on, by their upper 15 bits, or those with its upper bits by their lower 16.

    Of each GROUP of elements only the largest magnitude is counted. `least` is above 0. `counts` has COPIES rows,
    among which the programs take turns, of 2^15 or 2^16 columns.
    """
    magnitude, _, delta = _magnitudes(delta_ptr, num_elements, SIZE)
    if GROUP > 1:
        magnitude = tl.max(tl.reshape(magnitude, [SIZE // GROUP, GROUP]), axis=1)
    least, row = tl.load(least_ptr), tl.program_id(0) % COPIES
    is_counted = magnitude >= least
    if UPPER:
        _check_finite(delta, bad_ptr, SIZE)
        tl.atomic_add(counts_ptr + row * 32768 + (magnitude >> 16), 1, mask=is_counted, sem="relaxed")
    else:
        is_counted = is_counted & (magnitude >> 16 == least >> 16)
        tl.atomic_add(counts_ptr + row * 65536 + (magnitude & 0xFFFF), 1, mask=is_counted, sem="relaxed")


@triton.jit
def largest_counts(delta_ptr, above_ptr, equal_ptr, threshold_ptr, num_elements, SIZE: tl.constexpr) -> None:
    """Write the numbers of elements above the threshold, and at it, that each program has."""
    magnitude, is_here, _ = _magnitudes(delta_ptr, num_elements, SIZE)
    threshold = tl.load(threshold_ptr)
    tl.store(above_ptr + tl.program_id(0), tl.sum((magnitude > threshold).to(tl.int32), axis=0))
    is_equal = (magnitude == threshold) & is_here
    tl.store(equal_ptr + tl.program_id(0), tl.sum(is_equal.to(tl.int32), axis=0))


@triton.jit
def largest_pack(
    delta_ptr,
    places_ptr,
    kept_ptr,
    above_ptr,
    equal_ptr,
    threshold_ptr,
    ties_ptr,
    num_elements,
    SIZE: tl.constexpr,
) -> None:
    """Write places and values of the elements above the threshold, and of the first ones at it.

    Args:
        above_ptr: for each program, the number of elements above the threshold up to its end.
        equal_ptr: the same of those at it.
        ties_ptr: the number of those that are kept.
    """
    magnitude, is_here, delta = _magnitudes(delta_ptr, num_elements, SIZE)
    threshold, num_ties = tl.load(threshold_ptr), tl.load(ties_ptr)
    is_above, is_equal = magnitude > threshold, (magnitude == threshold) & is_here
    ties_before = _before(equal_ptr)
    is_kept = is_above | (is_equal & (_ranks(is_equal) < _left(num_ties, ties_before, SIZE)))
    before, rank = _before(above_ptr) + tl.minimum(ties_before, num_ties), _ranks(is_kept)
    first, lane, _ = _lanes(num_elements, SIZE)
    tl.store(places_ptr + before + rank, first + lane, mask=is_kept)
    tl.store(kept_ptr + before + rank, delta, mask=is_kept)


@triton.jit
def block_pack(
    delta_ptr,
    places_ptr,
    kept_ptr,
    bad_ptr,
    num_elements,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Write places and values of a block's KEPT largest magnitudes; write 1 to `bad` if an element is not finite.

    The threshold is the largest number that so many magnitudes reach, found bit by bit. Of a shorter last block
    the same share is kept, rounded up. SIZE is the first power of two from BLOCK on.
    """
    program, lane = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    first = program * BLOCK
    num_here = tl.minimum(num_elements - first, BLOCK).to(tl.int32)
    is_here, kept = lane < num_here, (num_here * KEPT + BLOCK - 1) // BLOCK
    delta = tl.load(delta_ptr + first + lane, mask=is_here, other=0.0)
    magnitude = tl.where(is_here, delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    if tl.max(magnitude, axis=0) >= _INFINITY:
        tl.store(bad_ptr, 1)
    threshold = tl.zeros([], tl.int32)
    for i in range(31):
        higher = threshold | (1 << (30 - i))
        threshold = tl.where(tl.sum((magnitude >= higher).to(tl.int32), axis=0) >= kept, higher, threshold)
    is_above, is_equal = magnitude > threshold, magnitude == threshold
    num_ties = kept - tl.sum(is_above.to(tl.int32), axis=0)
    is_kept = is_above | (is_equal & (_ranks(is_equal) < num_ties))
    at = program * KEPT + _ranks(is_kept)
    tl.store(places_ptr + at, first + lane, mask=is_kept)
    tl.store(kept_ptr + at, delta, mask=is_kept)


@triton.jit
def gate(delta_ptr, outer_ptr, to_ptr, num_elements, BF16: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Write the elements by which Θ changes as BF16, or as FP32, and zeros elsewhere."""
    first, lane, is_here = _lanes(num_elements, SIZE)
    delta = tl.load(delta_ptr + first + lane, mask=is_here, other=0.0)
    outer = tl.load(outer_ptr + first + lane, mask=is_here, other=0.0)
    before, after = outer, outer - delta
    if BF16:
        before, after = _as_bf16(before), _as_bf16(after)
    tl.store(to_ptr + first + lane, tl.where(after != before, delta, 0.0), mask=is_here)


@triton.jit
def _as_bf16(x):
    """FP32 rounded to BF16, to nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, rounded)


@triton.jit
def _lanes(num_elements, SIZE: tl.constexpr):
    """The program's first element, the others from there on in 32 bits, and a mask."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    lane = tl.arange(0, SIZE)
    return first, lane, lane < _left(num_elements, first, SIZE)


@triton.jit
def _left(number, before, SIZE: tl.constexpr):
    """Number of elements left for this program, in 32 bits."""
    return tl.minimum(tl.maximum(number - before, 0), SIZE).to(tl.int32)


@triton.jit
def _magnitudes(delta_ptr, num_elements, SIZE: tl.constexpr):
    """The elements' magnitudes as integers, a mask, and the elements."""
    first, lane, is_here = _lanes(num_elements, SIZE)
    delta = tl.load(delta_ptr + first + lane, mask=is_here, other=0.0)
    return delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, is_here, delta


@triton.jit
def _check_finite(delta, bad_ptr, SIZE: tl.constexpr) -> None:
    """Write 1 to `bad` if an element is not finite; a thread looks at four that it holds."""
    magnitude = tl.reshape(delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [SIZE // 4, 4])
    largest = tl.max(magnitude, axis=1)
    tl.store(bad_ptr + tl.zeros_like(largest), 1, mask=largest >= _INFINITY)


@triton.jit
def _masked(num_elements, word0, word1, most, SIZE: tl.constexpr):
    """Flags of the program's elements that a mask keeps, as diloco.wire.payload.Mask has them."""
    first, lane, is_here = _lanes(num_elements, SIZE)
    word0, word1 = word0.to(tl.uint32, bitcast=True), word1.to(tl.uint32, bitcast=True)
    x = (first.to(tl.uint32) + lane.to(tl.uint32)) ^ word0
    x = (x ^ (x >> 16)) * 0x7FEB352D ^ word1
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x <= most.to(tl.uint32, bitcast=True)) & is_here


@triton.jit
def _before(ends_ptr):
    """The number in all programs before this one, where `ends` has those up to each program's end."""
    program = tl.program_id(0)
    return tl.load(ends_ptr + program - 1, mask=program > 0, other=0)


@triton.jit
def _ranks(flags):
    """For each element, the number of flags before it in the program."""
    flags = flags.to(tl.int32)
    return tl.cumsum(flags, axis=0) - flags
