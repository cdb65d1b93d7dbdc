"""The lossless difference of cells, a cell being one element of a tensor as bits.

Shapes: N cells in chunks of n = CHUNK, the last one of fewer; k of a chunk changed.

Floats of one sign are ordered as their bits are. `order` extends this to both signs, so that a small change of a
weight is a small step s between the places of its bits in that order, mostly ±1 in bfloat16 after a step of AdamW.
A chunk's body holds, for the k changed cells:

    counts    k, bytes of the first and of the fourth plane; then the two parameters, g and e
    1         the number of unchanged cells before each changed one, divided by 2^g, in unary
    2         its remainders, of g bits
    3         the signs of the steps
    4         of y = |s| − 1 + 2^e, the bits below the highest one: their number less e, in unary
    5         these bits

Planes 1 and 2 are Rice's code, which is within 5 % of the entropy where at most half of the cells change, one
independently of another; with g = 0 it is a mask of the chunk. Planes 4 and 5 are the exponential Golomb code,
which fits steps of all magnitudes. Each plane begins with a byte, and its bits follow one another from the lowest
bit of a byte on. A chunk without change has no body; a chunk whose body would be as long as its cells, or longer,
is these cells.

Steps are exact integers modulo 2^b, with b bits in a cell: nothing is rounded, whatever the bits mean.
"""

import struct
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from diloco.errors import PayloadError
from diloco.wire.kernels.native import Native, native

CHUNK = 1 << 17
"""Cells that are coded together, at most: with their positions and steps they fit the cache."""
_COUNTS = struct.Struct("<IIIBB")
_SAMPLE = 1 << 12
_MOST_BIT = 62
"""The largest parameter: so y is below 2^64."""

_ENCODE = (*[c_void_p] * 2, *[c_int64] * 2, *[c_void_p] * 2)
_DECODE = (*[c_void_p] * 3, *[c_int64] * 2, c_int)

Cells = NDArray[np.unsignedinteger]
"""Flat little-endian unsigned integers of 1, 2, 4 or 8 bytes."""


def encode(old_N: Cells, new_N: Cells) -> tuple[list[int], bytes]:
    """The lengths of the chunks' bodies, and these, one after another.

    >>> old, new = np.zeros(CHUNK + 4, np.uint16), np.zeros(CHUNK + 4, np.uint16)
    >>> new[100], new[CHUNK:] = 1, 0xFFFF
    >>> encode(old, old)[0], encode(old, new)[0]
    ([0, 0], [19, 8])
    """
    if (compiled := _compiled()) is None:
        bodies = [_encode_chunk(old_N[some], new_N[some]) for some in _chunks(len(old_N))]
        return [len(body) for body in bodies], b"".join(bodies)
    encode = compiled.function(f"cells{old_N.itemsize}_encode", *_ENCODE, result=c_int64)
    lengths = np.empty(len(_chunks(len(old_N))), np.uint32)
    body = np.empty(old_N.nbytes + 16, np.uint8)
    sizes = len(old_N), CHUNK
    num_bytes = encode(old_N.ctypes.data, new_N.ctypes.data, *sizes, lengths.ctypes.data, body.ctypes.data)
    if num_bytes < 0:
        raise MemoryError
    return lengths.tolist(), body[:num_bytes].tobytes()  # nearly all of the memory is left


def decode(lengths: Sequence[int], body: memoryview, into_N: Cells, *, only_check: bool = False) -> int:
    """Change cells; the number of those that changed.

    Args:
        lengths: of the chunks' bodies.
        body: as many bytes, read as if anybody had written them.
        into_N: the old cells, which become the new ones.
        only_check: leave the cells as they are.

    Raises:
        PayloadError: if `encode` writes no such body for this number of cells.
    """
    assert len(lengths) == len(_chunks(len(into_N))) and sum(lengths) == len(body), "as many as there are"
    if (compiled := _compiled()) is None:
        ends = accumulate(lengths, initial=0)
        chunks = zip(pairwise(ends), _chunks(len(into_N)), strict=True)
        return sum(_decode_chunk(body[start:end], into_N[some], only_check) for (start, end), some in chunks)
    decode = compiled.function(f"cells{into_N.itemsize}_decode", *_DECODE, result=c_int64)
    memory = np.frombuffer(body, np.uint8), np.array(lengths, np.uint32), into_N  # held while it is used
    num_changed = decode(*(array.ctypes.data for array in memory), len(into_N), CHUNK, only_check)
    if num_changed == -(1 << 63):
        raise MemoryError
    _check(num_changed >= 0)
    return num_changed


def _compiled() -> Native | None:
    compiled = native()
    return compiled if compiled is not None and compiled.has("cells1_encode") else None


def _chunks(num_cells: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, num_cells)) for start in range(0, num_cells, CHUNK)]


def _encode_chunk(old_n: Cells, new_n: Cells) -> bytes:
    place_k = np.flatnonzero(old_n != new_n)
    if not len(place_k):
        return b""
    step_k = order(new_n[place_k]) - order(old_n[place_k])
    bits = 8 * old_n.itemsize
    is_down_k = step_k >> old_n.dtype.type(bits - 1) != 0
    least_k = (np.where(is_down_k, -step_k, step_k) - old_n.dtype.type(1)).astype(np.uint64)
    num_gap, num_exact = gap_parameter(len(old_n), len(place_k)), step_parameter(least_k, bits)
    gap_k = (np.diff(place_k, prepend=-1) - 1).astype(np.uint64)
    y_k = least_k + np.uint64(1 << num_exact)
    length_k = _bit_lengths(y_k) - 1
    first = _unary(gap_k >> np.uint64(num_gap))
    fourth = _unary(length_k - num_exact)
    planes = (
        _COUNTS.pack(len(place_k), len(first), len(fourth), num_gap, num_exact),
        first,
        _fields(gap_k, np.full(len(place_k), num_gap)),
        np.packbits(is_down_k, bitorder="little").tobytes(),
        fourth,
        _fields(y_k, length_k),
    )
    body = b"".join(planes)
    return body if len(body) < old_n.nbytes else new_n.tobytes()


def _decode_chunk(body: memoryview, into_n: Cells, only_check: bool) -> int:
    if not body:
        return 0
    if len(body) == into_n.nbytes:
        new_n = np.frombuffer(body, into_n.dtype)
        num_changed = int(np.count_nonzero(into_n != new_n))
        if not only_check:
            into_n[:] = new_n
        return num_changed
    place_k, step_k = _changes(body, len(into_n), into_n.dtype)
    if not only_check:
        into_n[place_k] = order(order(into_n[place_k]) + step_k, back=True)
    return len(place_k)


def _changes(body: memoryview, num_cells: int, dtype: np.dtype) -> tuple[NDArray[np.int64], Cells]:
    """The places and the steps of the changed cells (k)."""
    bits = 8 * dtype.itemsize
    _check(_COUNTS.size <= len(body) < num_cells * dtype.itemsize)
    num_changed, num_first, num_fourth, num_gap, num_exact = _COUNTS.unpack_from(body)
    num_second, num_third = (num_changed * num_gap + 7) // 8, (num_changed + 7) // 8
    ends = np.cumsum([_COUNTS.size, num_first, num_second, num_third, num_fourth]).tolist()
    _check(0 < num_changed <= num_cells and num_gap <= 17 and num_exact <= min(bits - 2, _MOST_BIT))
    _check(ends[-1] <= len(body))
    flags = np.frombuffer(body, np.uint8)
    first, second, third, fourth = (flags[start:end] for start, end in pairwise(ends))
    gap_k = _from_unary(first, num_changed) << num_gap
    gap_k += _from_fields(second, np.full(num_changed, num_gap)).astype(np.int64)
    place_k = (gap_k + 1).cumsum() - 1
    _check(place_k[-1] < num_cells)
    length_k = _from_unary(fourth, num_changed) + num_exact
    _check(length_k.max() < bits and len(body) - ends[-1] == (length_k.sum() + 7) // 8)
    y_k = _from_fields(flags[ends[-1] :], length_k) + (np.uint64(1) << length_k.astype(np.uint64))
    step_k = (y_k - np.uint64((1 << num_exact) - 1)).astype(dtype)
    is_down_k = np.unpackbits(third, count=num_changed, bitorder="little").astype(bool)
    return place_k, np.where(is_down_k, -step_k, step_k)


def order(cells: Cells, *, back: bool = False) -> Cells:
    """The places of cells in the order of the floats that they may be; `back`, the cells of places.

    >>> order(np.array([-1.0, -0.0, 0.0, 1.0], np.float16).view(np.uint16))
    array([17407, 32767, 32768, 48128], dtype=uint16)
    """
    top = cells.dtype.type(1 << (8 * cells.itemsize - 1))
    is_negative = (cells & top == 0) if back else (cells & top != 0)
    return np.where(is_negative, ~cells, cells ^ top)


def gap_parameter(num_cells: int, num_changed: int) -> int:
    """The g that fits the mean distance of changed cells, which is divided by about 1/ln 2."""
    return max(0, (num_cells * 11 // (16 * num_changed)).bit_length() - 1)


def step_parameter(least_k: NDArray[np.uint64], bits: int) -> int:
    """The e of the shortest fourth and fifth plane, by an estimate from the bit lengths of a sample of |s| − 1."""
    sample = least_k[:: len(least_k) // _SAMPLE + 1]
    counts = [int(count) for count in np.bincount(_bit_lengths(sample), minlength=bits)]

    def cost(e: int) -> int:
        longer = enumerate(counts[e + 1 :], e + 1)
        return sum(counts[: e + 1]) * (e + 1) + sum(count * (2 * b - e + (b == e + 1)) for b, count in longer)

    return min(range(min(bits - 2, _MOST_BIT) + 1), key=cost)


def _bit_lengths(value_k: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The place of each value's highest bit, counted from 1; 0 for 0."""
    length_k = np.zeros(len(value_k), np.int64)
    value_k = value_k.copy()
    for shift in (32, 16, 8, 4, 2, 1):
        is_longer = value_k >> np.uint64(shift) != 0
        length_k += shift * is_longer
        value_k = np.where(is_longer, value_k >> np.uint64(shift), value_k)
    return length_k + (value_k != 0)


def _unary(value_k: NDArray) -> bytes:
    """For each value as many zeros, and a one."""
    one_k = (value_k.astype(np.int64) + 1).cumsum() - 1
    flags = np.zeros(one_k[-1] + 1, np.uint8)
    flags[one_k] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def _from_unary(plane: NDArray[np.uint8], num_values: int) -> NDArray[np.int64]:
    one_k = np.flatnonzero(np.unpackbits(plane, bitorder="little"))
    _check(len(one_k) == num_values and one_k[-1] >> 3 == len(plane) - 1)
    return np.diff(one_k, prepend=-1) - 1


def _fields(value_k: NDArray[np.uint64], width_k: NDArray[np.int64]) -> bytes:
    """The lowest bits of each value."""
    start_k = width_k.cumsum() - width_k
    flags = np.zeros(width_k.sum(), np.uint8)
    for bit in range(width_k.max()):
        is_wide = width_k > bit
        flags[start_k[is_wide] + bit] = value_k[is_wide] >> np.uint64(bit) & np.uint64(1)
    return np.packbits(flags, bitorder="little").tobytes()


def _from_fields(plane: NDArray[np.uint8], width_k: NDArray[np.int64]) -> NDArray[np.uint64]:
    start_k = width_k.cumsum() - width_k
    flags, value_k = np.unpackbits(plane, bitorder="little"), np.zeros(len(width_k), np.uint64)
    for bit in range(width_k.max()):
        is_wide = width_k > bit
        value_k[is_wide] |= flags[start_k[is_wide] + bit].astype(np.uint64) << np.uint64(bit)
    return value_k


def _check(is_sound: bool | np.bool) -> None:
    if not is_sound:
        raise PayloadError("a chunk of cells is not as it is written")
