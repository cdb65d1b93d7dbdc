"""The sparse codecs for a GPU, in Triton: which elements are kept, and where their values lie.

A program works on SIZE elements. A first kernel counts what each program keeps, so that a second one knows the
place of its first value. Top-K's threshold is the magnitude, as an integer of 31 bits, of the k-th largest: a
histogram of the upper 15 bits, then one of the lower 16 of those in the threshold's bin, tell it exactly.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
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
    element, is_here = _elements(num_elements, SIZE)
    delta = tl.load(delta_ptr + element, mask=is_here, other=0.0)
    _check_finite(delta, bad_ptr)
    is_kept = _masked(num_elements, word0, word1, most, SIZE)
    rank = _ranks(is_kept, ends_ptr)
    tl.store(kept_ptr + rank, delta, mask=is_kept & (rank < room))


@triton.jit(do_not_specialize=_MASK)
def mask_unpack(
    kept_ptr, to_ptr, ends_ptr, num_elements, room, word0, word1, most, ADD: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Write the kept values and zeros, or add the kept values."""
    element, is_here = _elements(num_elements, SIZE)
    is_kept = _masked(num_elements, word0, word1, most, SIZE)
    rank = _ranks(is_kept, ends_ptr)
    is_kept = is_kept & (rank < room)
    value = tl.load(kept_ptr + rank, mask=is_kept, other=0.0)
    if ADD:
        value += tl.load(to_ptr + element, mask=is_kept, other=0.0)
        tl.store(to_ptr + element, value, mask=is_kept)
    else:
        tl.store(to_ptr + element, value, mask=is_here)


@triton.jit
def histogram(
    delta_ptr,
    counts_ptr,
    bin_ptr,
    bad_ptr,
    num_elements,
    UPPER: tl.constexpr,
    COPIES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Count magnitudes by their upper 15 bits, or, of those in one such bin, by their lower 16.

    `counts` has COPIES rows, among which the programs take turns, of 2^15 or 2^16 columns.
    """
    element, is_here = _elements(num_elements, SIZE)
    delta = tl.load(delta_ptr + element, mask=is_here, other=0.0)
    magnitude = delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    row = tl.program_id(0) % COPIES
    if UPPER:
        _check_finite(delta, bad_ptr)
        tl.atomic_add(counts_ptr + row * 32768 + (magnitude >> 16), 1, mask=is_here, sem="relaxed")
    else:
        is_here = is_here & (magnitude >> 16 == tl.load(bin_ptr))
        tl.atomic_add(counts_ptr + row * 65536 + (magnitude & 0xFFFF), 1, mask=is_here, sem="relaxed")


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
    tie = _ranks(is_equal, equal_ptr)
    is_kept = is_above | (is_equal & (tie < num_ties))
    ties_before = tl.minimum(_before(equal_ptr), num_ties)
    flags = is_kept.to(tl.int32)
    rank = _before(above_ptr) + ties_before + tl.cumsum(flags, axis=0) - flags
    element, _ = _elements(num_elements, SIZE)
    tl.store(places_ptr + rank, element, mask=is_kept)
    tl.store(kept_ptr + rank, delta, mask=is_kept)


@triton.jit
def _elements(num_elements, SIZE: tl.constexpr):
    """The program's elements, with a mask."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return element, element < num_elements


@triton.jit
def _magnitudes(delta_ptr, num_elements, SIZE: tl.constexpr):
    """The elements' magnitudes as integers, a mask, and the elements."""
    element, is_here = _elements(num_elements, SIZE)
    delta = tl.load(delta_ptr + element, mask=is_here, other=0.0)
    return delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, is_here, delta


@triton.jit
def _check_finite(delta, bad_ptr) -> None:
    """Write 1 to `bad` if an element is not finite."""
    is_bad = (delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= _INFINITY
    tl.store(bad_ptr + tl.zeros_like(is_bad.to(tl.int32)), 1, mask=is_bad)


@triton.jit
def _masked(num_elements, word0, word1, most, SIZE: tl.constexpr):
    """Flags of the program's elements that a mask keeps, as diloco.wire.payload.Mask has them."""
    element, is_here = _elements(num_elements, SIZE)
    word0, word1 = word0.to(tl.uint32, bitcast=True), word1.to(tl.uint32, bitcast=True)
    x = element.to(tl.uint32) ^ word0
    x = (x ^ (x >> 16)) * 0x7FEB352D ^ word1
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x <= most.to(tl.uint32, bitcast=True)) & is_here


@triton.jit
def _before(ends_ptr):
    """The number in all programs before this one, where `ends` has those up to each program's end."""
    program = tl.program_id(0)
    return tl.load(ends_ptr + program - 1, mask=program > 0, other=0)


@triton.jit
def _ranks(flags, ends_ptr):
    """For each element, the number of flags before it, in programs before this one, too."""
    flags = flags.to(tl.int32)
    return _before(ends_ptr) + tl.cumsum(flags, axis=0) - flags
