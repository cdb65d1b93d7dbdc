"""The block codecs for a GPU, in Triton: one pass over memory each, with the bits of the codecs' plain torch code.

A program that packs works on ROWS blocks, in rows of COLUMNS elements, the first power of two from the block's
length on. All codecs are instances of two families, whose numbers are constants of the compiled code: small floats
under a power of two (FLOAT; see diloco.wire.floats) and integers under an FP32 scale (diloco.wire.integers).

A small float's magnitude is n·2^(e − MANTISSA) with e ≥ SMALLEST and n < 2^(MANTISSA + 1); its index among the
format's magnitudes is (e − SMALLEST)·2^MANTISSA + n, subnormals and carries included.
"""

# pyrefly: ignore-errors[implicit-any-parameter, unsupported-operation]
# ruff: noqa: ANN001, ANN202
import triton
import triton.language as tl
from triton.language.random import philox_impl

_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5·2^23: FP32 numbers beside it are integers, so that adding it rounds to the nearest, ties to even."""


_WORDS = ["word1", "word2", "word3", "key0", "key1"]


@triton.jit(do_not_specialize=_WORDS)
def pack(
    delta_ptr,
    scales_ptr,
    codes_ptr,
    bad_ptr,
    num_elements,
    word1,
    word2,
    word3,
    key0,
    key1,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOP: tl.constexpr,
    TOP_MANTISSA: tl.constexpr,
    TOP_CODE: tl.constexpr,
    TIES_UP: tl.constexpr,
    MOST_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """Write scales and codes; write 1 to `bad` if an element is not finite."""
    row, element, is_here = _elements(num_elements, BLOCK, ROWS, COLUMNS)
    delta = tl.load(delta_ptr + element, mask=is_here, other=0.0)
    largest = tl.max(delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if tl.max(largest, axis=0) >= _INFINITY:
        tl.store(bad_ptr, 1)
    fraction = 0.0
    if STOCHASTIC:
        fraction = _fraction(element, word1, word2, word3, key0, key1)
    if FLOAT:
        byte = _scale_bytes(largest, TOP, TOP_MANTISSA, TIES_UP, STOCHASTIC)
        tl.store(scales_ptr + row, byte.to(tl.uint8), mask=row * BLOCK < num_elements)
        magnitude = tl.abs(delta) * _power_of_two(254 - byte)[:, None]
        code = _float_codes(delta, magnitude, fraction, BITS, MANTISSA, SMALLEST, TOP_CODE, TIES_UP, STOCHASTIC)
    else:
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([ROWS], TOP_CODE, tl.float32))
        scale = tl.minimum(scale, MOST_SCALE)
        tl.store(scales_ptr + row, scale, mask=row * BLOCK < num_elements)
        code = _integer_codes(delta, scale[:, None], fraction, BITS, TOP_CODE, STOCHASTIC)
    code = tl.where(is_here, code, 0)
    PER_BYTE: tl.constexpr = 8 // BITS
    if PER_BYTE > 1:
        place = tl.arange(0, PER_BYTE) * BITS
        code = tl.sum(tl.reshape(code, [ROWS, COLUMNS // PER_BYTE, PER_BYTE]) << place[None, None, :], axis=2)
    byte_at, is_byte = _bytes(row, num_elements, BLOCK, COLUMNS, PER_BYTE)
    tl.store(codes_ptr + byte_at, code.to(tl.uint8), mask=is_byte)


@triton.jit
def unpack(
    scales_ptr,
    codes_ptr,
    to_ptr,
    bad_ptr,
    num_elements,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOP: tl.constexpr,
    TOP_MANTISSA: tl.constexpr,
    TOP_CODE: tl.constexpr,
    TIES_UP: tl.constexpr,
    MOST_SCALE: tl.constexpr,
) -> None:
    """Write the values, or add them; write 1 to `bad` if `pack` never writes one of the scales or codes.

    A program works on SIZE elements, in rows of four, whose codes fill whole bytes: a thread reads, computes and
    writes rows of its own, so that nothing moves from one thread to another.
    """
    row = tl.program_id(0).to(tl.int64) * (SIZE // 4) + tl.arange(0, SIZE // 4)[:, None]
    element = row * 4 + tl.arange(0, 4)[None, :]
    byte_at = row * (BITS // 2) + tl.arange(0, BITS // 2)[None, :]
    scale_at = (element if BLOCK % 4 else row * 4) // BLOCK
    if (tl.program_id(0) + 1).to(tl.int64) * SIZE <= num_elements:
        # Without masks, which would part the reads of a row.
        scale, code = tl.load(scales_ptr + scale_at), tl.load(codes_ptr + byte_at)
        value, is_bad = _values(scale, code, SIZE, BITS, FLOAT, MANTISSA, SMALLEST, TOP, TOP_CODE, MOST_SCALE)
        _report(tl.max(is_bad.to(tl.int32), axis=1), bad_ptr)
        tl.store(to_ptr + element, tl.load(to_ptr + element) + value if ADD else value)
    else:
        is_here = element < num_elements
        scale = tl.load(scales_ptr + scale_at, mask=scale_at * BLOCK < num_elements, other=0)
        code = tl.load(codes_ptr + byte_at, mask=byte_at * (8 // BITS) < num_elements, other=0)
        value, is_bad = _values(scale, code, SIZE, BITS, FLOAT, MANTISSA, SMALLEST, TOP, TOP_CODE, MOST_SCALE)
        _report(tl.max((is_bad & is_here).to(tl.int32), axis=1), bad_ptr)
        before = tl.load(to_ptr + element, mask=is_here, other=0.0)
        tl.store(to_ptr + element, before + value if ADD else value, mask=is_here)


@triton.jit
def _values(
    scale,
    code,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOP: tl.constexpr,
    TOP_CODE: tl.constexpr,
    MOST_SCALE: tl.constexpr,
):
    """Values of rows of four, and flags of those whose scale or code is never written."""
    code = code.to(tl.int32)
    if BITS < 8:
        place = tl.arange(0, 8 // BITS) * BITS
        code = tl.reshape((code[:, :, None] >> place[None, None, :]) & ((1 << BITS) - 1), [SIZE // 4, 4])
    if FLOAT:
        byte = scale.to(tl.int32)
        is_bad_scale, factor = byte > 254 - TOP, _power_of_two(byte)
        is_bad_code, unit = _float_values(code, BITS, MANTISSA, SMALLEST, TOP_CODE)
    else:
        is_bad_scale, factor = ((scale >= 0) & (scale <= MOST_SCALE)) == 0, scale
        num_steps = code - (code >> (BITS - 1) << BITS)
        is_bad_code, unit = num_steps < -TOP_CODE, num_steps.to(tl.float32)
    return unit * factor, is_bad_scale | is_bad_code


@triton.jit
def _report(is_bad, bad_ptr) -> None:
    """Write 1 to `bad` if a number is not 0."""
    tl.store(bad_ptr + tl.zeros_like(is_bad), 1, mask=is_bad > 0)


@triton.jit
def _scale_bytes(
    largest, TOP: tl.constexpr, TOP_MANTISSA: tl.constexpr, TIES_UP: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """The bytes of the blocks' powers of two, by the bits of their largest magnitudes."""
    if STOCHASTIC:
        byte = (largest >> 23) - TOP + ((largest & 0x7FFFFF) > TOP_MANTISSA).to(tl.int32)
    elif TIES_UP:
        byte = tl.where(largest < 0x800000, (largest >= 0x600000).to(tl.int32), (largest + 0x400000) >> 23)
    else:
        byte = (largest >> 23) - TOP
    return tl.minimum(tl.maximum(byte, 0), 254 - TOP)


@triton.jit
def _float_codes(
    delta,
    magnitude,
    fraction,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOP_CODE: tl.constexpr,
    TIES_UP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The codes of elements, of which these are the magnitudes under their scales."""
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, SMALLEST)
    steps = magnitude * _power_of_two(127 + MANTISSA - exponent)
    if STOCHASTIC:
        num_steps = _floor(steps + fraction)
    elif TIES_UP:
        num_steps = (steps >= 0.5).to(tl.int32) + (steps >= 1.5).to(tl.int32)
    else:
        num_steps = ((steps + _ROUNDER) - _ROUNDER).to(tl.int32)
    index = tl.minimum(((exponent - SMALLEST) << MANTISSA) + num_steps, TOP_CODE)
    sign = (delta.to(tl.int32, bitcast=True) >> (32 - BITS)) & (1 << (BITS - 1))
    if TIES_UP:  # its zero has no sign
        sign = tl.where(index > 0, sign, 0)
    return index | sign


@triton.jit
def _float_values(
    code, BITS: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, TOP_CODE: tl.constexpr
):
    """Flags of codes that are never written, and values."""
    index = code & ((1 << (BITS - 1)) - 1)
    binade = index >> MANTISSA
    num_steps = tl.where(binade > 0, 1 << MANTISSA, 0) + (index & ((1 << MANTISSA) - 1))
    exponent = tl.maximum(binade, 1) - 1 + SMALLEST - MANTISSA
    magnitude = num_steps.to(tl.float32) * _power_of_two(127 + exponent)
    sign = code >> (BITS - 1) << 31
    return index > TOP_CODE, (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _integer_codes(delta, scale, fraction, BITS: tl.constexpr, TOP_CODE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The codes of elements under their scales."""
    steps = tl.div_rn(delta, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), delta.shape))
    if STOCHASTIC:
        num_steps = tl.where(scale > 0, _floor(steps + fraction), 0)
    else:
        num_steps = ((steps + _ROUNDER) - _ROUNDER).to(tl.int32)
    return tl.minimum(tl.maximum(num_steps, -TOP_CODE), TOP_CODE) & ((1 << BITS) - 1)


@triton.jit
def _elements(num_elements, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The program's blocks, and their elements with a mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    element = row[:, None] * BLOCK + column[None, :]
    is_here = element < num_elements
    if COLUMNS != BLOCK:
        is_here = is_here & (column[None, :] < BLOCK)
    return row, element, is_here


@triton.jit
def _bytes(row, num_elements, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr):
    """The bytes of the program's codes, with a mask."""
    column = tl.arange(0, COLUMNS // PER_BYTE)
    byte_at = row[:, None] * (BLOCK // PER_BYTE) + column[None, :]
    is_byte = byte_at * PER_BYTE < num_elements
    if COLUMNS != BLOCK:
        is_byte = is_byte & (column[None, :] < BLOCK // PER_BYTE)
    return byte_at, is_byte


@triton.jit
def _power_of_two(byte):
    """2^(byte − 127)."""
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _floor(steps):
    """The largest integer that is not above; tl.floor would take subnormal numbers for 0."""
    towards_zero = steps.to(tl.int32)
    return towards_zero - (steps < towards_zero.to(tl.float32)).to(tl.int32)


@triton.jit
def _fraction(element, word1, word2, word3, key0, key1):
    """A number in [0, 1) for each element, of the upper 24 bits of diloco.wire.payload.random_bits."""
    zero = (element * 0).to(tl.uint32)
    key0, key1 = (zero + key0.to(tl.uint32)), (zero + key1.to(tl.uint32))
    word1, word2, word3 = zero + word1.to(tl.uint32), zero + word2.to(tl.uint32), zero + word3.to(tl.uint32)
    a, b, c, d = philox_impl((element >> 2).to(tl.uint32), word1, word2, word3, key0, key1, 10)
    word = element & 3
    chosen = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return (chosen >> 8).to(tl.float32) * 5.9604644775390625e-08
