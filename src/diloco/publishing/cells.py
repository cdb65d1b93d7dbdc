"""The lossless difference of cells, a cell being one element of a tensor as bits.

Shapes: N cells in chunks of n = CHUNK, the last one of fewer; k of a chunk changed.

Floats of one sign are ordered as their bits are. `order` extends this to both signs, so that a small change of a
weight is a small step s between the places of its bits in that order, mostly ±1 in bfloat16 after a step of AdamW.
A chunk's body consists of planes of bits, each of which begins with a byte and goes on from the lowest bit of a
byte on. The smaller an old weight is, the more often it changes: its class, one of four, is that of the top seven
bits of its magnitude, two binades of a bfloat16. A chunk of which most cells change has one class. In order:

    head            the highest bucket of the classes, e; for each class a number, and g
    of each class   g = 0: the mask of its changed cells; the number is that of the mask's bytes
                    g = 1: the mask of its pairs of cells that changed, and the number of its bytes; of these, the
                    mask of those whose first cell alone changed; of the others, those whose cells both changed
                    g > 1: y = d + 2^g for each changed cell, with d unchanged ones before it; the number is theirs
    signs           of the steps
                    y = |s| − 1 + 2^e for each changed cell

Numbers y, by exponential Golomb with the parameter e or g, are planes too:

    bits b < e      a plane each
    for each b ≥ e  which of the y that reach bit b have a higher one; of these, bit b

So the C code works on 64 cells at once: it compresses those that go on to the next plane, and expands them back. A
chunk without change has no body; a chunk whose body would be as long as its cells, or longer, is these cells. On
other old cells than the encoder's a body leads to other new ones.

Steps are exact integers modulo 2^b, with b bits in a cell: nothing is rounded, whatever the bits mean.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_int64, c_void_p
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.errors import PayloadError
from diloco.wire.kernels.native import Native, native

CHUNK = 1 << 17
"""Cells that are coded together, at most: with their positions and steps they fit the cache."""
SLACK = 16
"""Bytes beyond the bodies that `encode` may write."""
_NUM_CLASSES = 4
_HEAD = struct.Struct("<BB" + "HB" * _NUM_CLASSES)
_SAMPLE = 16
"""Runs of 64 cells from which a chunk's parameters are read, at least."""
_MOST_GAP, _GAP_BITS = 16, 18
_MOST_BIT = 62
"""The largest parameter: so y is below 2^64."""

_ENCODE = c_void_p, c_int64, c_int64, c_void_p, c_void_p
_DECODE = c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int

_Take: TypeAlias = Callable[[int], NDArray[np.bool]]
"""Takes so many bits from a body."""
Cells = NDArray[np.unsignedinteger]
"""Flat little-endian unsigned integers of 1, 2, 4 or 8 bytes."""


class UnsoundCellsError(PayloadError):
    """A chunk's body that `encode` does not write."""

    def __init__(self, vector: int = 0) -> None:
        super().__init__("a chunk of cells is not as it is written")
        self.vector = vector
        """The number of the first vector with such a chunk."""


def encode(pairs: Sequence[tuple[Cells, Cells]], into: NDArray[np.uint8]) -> list[int]:
    """Write the chunks' bodies one after another; their lengths.

    Args:
        pairs: the old cells of vectors, and as many new ones.
        into: memory of at least as many bytes as the old cells have, and `SLACK` more.

    >>> old, new = np.zeros(CHUNK + 4, np.uint16), np.zeros(CHUNK + 4, np.uint16)
    >>> new[100], new[CHUNK:] = 1, 0xFFFF
    >>> into = np.empty(old.nbytes + SLACK, np.uint8)
    >>> encode([(old, old)], into), encode([(old, new)], into)
    ([0, 0], [33, 8])
    """
    assert into.flags.c_contiguous and len(into) >= sum(old_N.nbytes for old_N, _ in pairs) + SLACK
    if (compiled := _compiled()) is None:
        bodies = [
            _encode_chunk(old_N[some], new_N[some]) for old_N, new_N in pairs for some in _chunks(len(old_N))
        ]
        into[: sum(map(len, bodies))] = np.frombuffer(b"".join(bodies), np.uint8)
        return [len(body) for body in bodies]
    vectors, lengths = _vectors(pairs), np.empty(sum(-(-len(old_N) // CHUNK) for old_N, _ in pairs), np.uint32)
    encode = compiled.function("cells_encode", *_ENCODE, result=c_int64)
    if encode(vectors.ctypes.data, len(pairs), CHUNK, lengths.ctypes.data, into.ctypes.data) < 0:
        raise MemoryError
    return lengths.tolist()


def decode(lengths: Sequence[int], body: memoryview, into: Sequence[Cells], *, only_check: bool = False) -> int:
    """Change cells; the number of those that changed.

    Args:
        lengths: of the chunks' bodies.
        body: as many bytes, read as if anybody had written them.
        into: the old cells of vectors, which become the new ones.
        only_check: leave the cells as they are.

    Raises:
        UnsoundCellsError: if `encode` writes no such body for these numbers of cells.
    """
    assert len(lengths) == sum(-(-len(into_N) // CHUNK) for into_N in into), "as many as there are"
    assert sum(lengths) == len(body), "as long as it is"
    if (compiled := _compiled()) is None:
        bodies = iter([body[start:end] for start, end in pairwise(accumulate(lengths, initial=0))])
        return sum(_decode_vector(number, bodies, into_N, only_check) for number, into_N in enumerate(into))
    decode = compiled.function("cells_decode", *_DECODE, result=c_int64)
    memory = (
        np.frombuffer(body, np.uint8),
        np.array(lengths, np.uint32),
        _vectors([(into_N, into_N) for into_N in into]),
    )
    num_changed = decode(*(array.ctypes.data for array in memory), len(into), CHUNK, only_check)
    if num_changed == -(1 << 63):
        raise MemoryError
    if num_changed < 0:
        raise UnsoundCellsError(-1 - num_changed)
    return num_changed


def _compiled() -> Native | None:
    compiled = native()
    return compiled if compiled is not None and compiled.has("cells_encode") else None


def _vectors(pairs: Sequence[tuple[Cells, Cells]]) -> NDArray[np.int64]:
    """For the C code, of each pair the addresses of both, the number of cells and the bytes of one."""
    rows = [(old_N.ctypes.data, new_N.ctypes.data, len(old_N), old_N.itemsize) for old_N, new_N in pairs]
    return np.array(rows, np.int64)


def _chunks(num_cells: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, num_cells)) for start in range(0, num_cells, CHUNK)]


def _encode_chunk(old_n: Cells, new_n: Cells) -> bytes:
    is_changed_n, bits = old_n != new_n, 8 * old_n.itemsize
    if not is_changed_n.any():
        return b""
    step_k = order(new_n[is_changed_n]) - order(old_n[is_changed_n])
    is_down_k = step_k >> old_n.dtype.type(bits - 1) != 0
    least_k = (np.where(is_down_k, -step_k, step_k) - old_n.dtype.type(1)).astype(np.uint64)
    is_sampled_n = np.arange(len(old_n)) // 64 % (len(old_n) // 64 // _SAMPLE + 1) == 0
    sample_k = least_k[is_sampled_n[is_changed_n]]
    is_dense = 8 * len(sample_k) >= 5 * np.count_nonzero(is_sampled_n)
    top, e = 0 if is_dense else _top(_buckets(old_n[is_sampled_n])), _step_parameter(sample_k, bits)
    class_n = _classes(old_n, top)
    masks = [_mask_planes(is_changed_n[class_n == number]) for number in range(_NUM_CLASSES)]
    head = _HEAD.pack(top, e, *(field for *fields, _ in masks for field in fields))
    planes = [head, *(plane for *_, planes in masks for plane in planes)]
    body = b"".join([*planes, _packed(is_down_k), *_number_planes(least_k, e, bits)])
    return body if len(body) < old_n.nbytes else new_n.tobytes()


def _mask_planes(is_changed_m: NDArray[np.bool]) -> tuple[int, int, list[bytes]]:
    """The head of a class of m cells, and its planes."""
    if not is_changed_m.any():
        return 0, 0, []
    place_k = np.flatnonzero(is_changed_m)
    g = _gap_parameter(len(is_changed_m), len(place_k))
    if g > 1:
        gap_k = np.diff(place_k, prepend=-1) - 1
        return len(place_k), g, list(_number_planes(gap_k.astype(np.uint64), g, _GAP_BITS))
    planes = [_packed(is_changed_m)]
    if g == 1:
        pairs = np.append(is_changed_m, np.zeros(len(is_changed_m) % 2, np.bool)).reshape(-1, 2)
        first, second = pairs[pairs[:, 0] | pairs[:, 1]].T
        planes = [_packed(pairs[:, 0] | pairs[:, 1]), _packed(first & ~second), _packed((first & second)[second])]
    return len(planes[0]), g, planes


def _number_planes(number_k: NDArray[np.uint64], e: int, bits: int) -> Iterator[bytes]:
    y_k = number_k + np.uint64(1 << e)
    for bit in range(e):
        yield _packed(y_k >> np.uint64(bit) & np.uint64(1))
    for bit in range(e, bits - 1):
        if not len(y_k):
            return
        is_longer_k = y_k >> np.uint64(bit + 1) != 0
        yield _packed(is_longer_k)
        y_k = y_k[is_longer_k]
        yield _packed(y_k >> np.uint64(bit) & np.uint64(1))


def _decode_vector(number: int, bodies: Iterator[memoryview], into_N: Cells, only_check: bool) -> int:
    try:
        return sum(_decode_chunk(next(bodies), into_N[some], only_check) for some in _chunks(len(into_N)))
    except UnsoundCellsError:
        raise UnsoundCellsError(number) from None


def _decode_chunk(body: memoryview, into_n: Cells, only_check: bool) -> int:
    if not body:
        return 0
    if len(body) == into_n.nbytes:
        new_n = np.frombuffer(body, into_n.dtype)
        num_changed = int(np.count_nonzero(into_n != new_n))
        if not only_check:
            into_n[:] = new_n
        return num_changed
    top, masks, step_k = _changes(body, len(into_n), into_n.dtype)
    if only_check:
        return len(step_k)
    class_n, is_changed_n = _classes(into_n, top), np.zeros(len(into_n), np.bool)
    for number, mask in enumerate(masks):
        place_m = np.flatnonzero(class_n == number)[: len(mask)]
        is_changed_n[place_m] = mask[: len(place_m)]
    step_k = step_k[: np.count_nonzero(is_changed_n)]
    into_n[is_changed_n] = order(order(into_n[is_changed_n]) + step_k, back=True)
    return len(step_k)


def _changes(body: memoryview, n: int, dtype: np.dtype) -> tuple[int, list[NDArray[np.bool]], Cells]:
    """The highest bucket, the mask of each class, which ends with zeros, and the steps (k)."""
    bits, flags = 8 * dtype.itemsize, np.frombuffer(body, np.uint8)
    _check(_HEAD.size <= len(body) < n * dtype.itemsize)
    (top, e), pairs = (head := _HEAD.unpack_from(body))[:2], list(zip(head[2::2], head[3::2], strict=True))
    _check(e <= min(bits - 2, _MOST_BIT))
    at = _HEAD.size

    def taken(num_bits: int) -> NDArray[np.bool]:
        nonlocal at
        start, at = at, at + (num_bits + 7) // 8
        _check(at <= len(body))
        return np.unpackbits(flags[start:at], count=num_bits, bitorder="little").astype(np.bool)

    masks = [_mask(number, g, n, taken) for number, g in pairs]
    num_changed = int(sum(map(np.count_nonzero, masks)))
    _check(0 < num_changed <= n)
    is_down_k = taken(num_changed)
    step_k = (_numbers(num_changed, e, bits, taken) + np.uint64(1)).astype(dtype)
    _check(at == len(body))
    return top, masks, np.where(is_down_k, -step_k, step_k)


def _mask(number: int, g: int, n: int, taken: _Take) -> NDArray[np.bool]:
    """The mask of a class from its planes."""
    _check(g <= _MOST_GAP)
    if g > 1:
        place_k = (_numbers(number, g, _GAP_BITS, taken).astype(np.int64) + 1).cumsum() - 1
        _check(not number or place_k[-1] < n)
        mask = np.zeros(n, np.bool)
        mask[place_k] = True
        return mask
    _check(8 * number <= (n + g >> g) + 7)
    first = taken(8 * number)
    if not g:
        return first
    pairs = np.zeros((len(first), 2), np.bool)
    pairs[first, 0] = only_first = taken(int(np.count_nonzero(first)))
    pairs[np.flatnonzero(first)[~only_first], 0] = taken(int(np.count_nonzero(~only_first)))
    pairs[np.flatnonzero(first)[~only_first], 1] = True
    return pairs.reshape(-1)


def _numbers(num: int, e: int, bits: int, taken: _Take) -> NDArray[np.uint64]:
    """The numbers y − 2^e of their planes."""
    y_k, place_k = np.zeros(num, np.uint64), np.arange(num)
    for bit in range(e):
        y_k |= taken(num).astype(np.uint64) << np.uint64(bit)
    for bit in range(e, bits):
        if not len(place_k):
            break
        is_longer = taken(len(place_k)) if bit < bits - 1 else np.zeros(len(place_k), np.bool)
        y_k[place_k[~is_longer]] |= np.uint64(1 << bit)
        place_k = place_k[is_longer]
        y_k[place_k] |= taken(len(place_k)).astype(np.uint64) << np.uint64(bit)
    return y_k - np.uint64(1 << e)


def order(cells: Cells, *, back: bool = False) -> Cells:
    """The places of cells in the order of the floats that they may be; `back`, the cells of places.

    >>> order(np.array([-1.0, -0.0, 0.0, 1.0], np.float16).view(np.uint16))
    array([17407, 32767, 32768, 48128], dtype=uint16)
    """
    top = cells.dtype.type(1 << (8 * cells.itemsize - 1))
    is_negative = (cells & top == 0) if back else (cells & top != 0)
    return np.where(is_negative, ~cells, cells ^ top)


def _buckets(cells: Cells) -> NDArray[np.uint8]:
    """The highest bits of magnitudes: of bfloat16 and of float32 the exponent."""
    bits = 8 * cells.itemsize
    magnitude = cells & cells.dtype.type((1 << (bits - 1)) - 1)
    return (magnitude >> cells.dtype.type(bits - 8)).astype(np.uint8)


def _top(bucket: NDArray[np.uint8]) -> int:
    """The highest bucket with a 64th of the cells in it and above."""
    above = np.bincount(bucket, minlength=128)[::-1].cumsum()
    return 127 - int(np.argmax(64 * above >= len(bucket)))


def _classes(cells_n: Cells, top: int) -> NDArray[np.int64]:
    return np.clip(top - _buckets(cells_n).astype(np.int64), 0, _NUM_CLASSES - 1)


def _gap_parameter(num_cells: int, num_changed: int) -> int:
    """The g that fits the mean distance of changed cells, which is divided by about 1/ln 2."""
    return max(0, (num_cells * 11 // (16 * num_changed)).bit_length() - 1)


def _step_parameter(least_k: NDArray[np.uint64], bits: int) -> int:
    """The e of the shortest planes of steps, by an estimate from the bit lengths of a sample of |s| − 1."""
    counts = [int(count) for count in np.bincount(_bit_lengths(least_k), minlength=bits)]

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


def _packed(bits: NDArray) -> bytes:
    """Bits, from the lowest of a byte on."""
    return np.packbits(bits.astype(np.bool), bitorder="little").tobytes()


def _check(is_sound: bool | np.bool) -> None:
    if not is_sound:
        raise UnsoundCellsError
