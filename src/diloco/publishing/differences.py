"""The lossless difference of two states of one model, and the digest of a state.

A state is `Mapping[str, Tensor]`: contiguous CPU tensors of any dtype, without memory in common. Its tensors, in
the order of their names, are cut into chunks of `cells.CHUNK` cells; each tensor begins a chunk. A difference is a
magic word, the digest of the state's layout, the length of each chunk's body, and the bodies of `cells.encode`. It
is never larger than the state by more than its head and 4 bytes per chunk.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.errors import PayloadError
from diloco.publishing import cells
from diloco.wire.kernels.memory import recycled_bytes

T = TypeVar("T")
_Pairs: TypeAlias = Sequence[tuple[cells.Cells, cells.Cells]]
_MAGIC = b"DLCDIFF3"
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_LENGTH_BYTES = 4
_CHUNKS_AT_ONCE = 8


def difference_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> memoryview:
    """The difference that `apply_to` adds to the old state to make the new one, bit by bit.

    Args:
        old: the state before.
        new: a state of the same names, shapes and dtypes.
    """
    layout = _layout(old)
    assert layout == _layout(new), "both states are of one model"
    pairs = [(old_N, new_N) for (_, old_N), (_, new_N) in zip(_runs(old), _runs(new), strict=True)]
    start = _HEAD_BYTES + _LENGTH_BYTES * sum(-(-len(cells_N) // cells.CHUNK) for cells_N, _ in pairs)
    parts, room = list[tuple[int, _Pairs]](), start
    for first, last in _shares(len(pairs)):
        parts.append((room, pairs[first:last]))
        room += sum(cells_N.nbytes for cells_N, _ in pairs[first:last]) + cells.SLACK
    body = recycled_bytes(room, torch.device("cpu")).numpy()

    def encode(at: int, pairs: _Pairs) -> list[int]:
        return cells.encode(pairs, body[at:])

    lengths, stop = list[int](), start
    for (at, _), of_part in zip(parts, _on_threads(encode, parts), strict=True):
        if at > stop:
            body[stop : stop + sum(of_part)] = body[at : at + sum(of_part)]
        stop += sum(of_part)
        lengths += of_part
    head = b"".join((_MAGIC, layout, struct.pack(f"<{len(lengths)}I", *lengths)))
    body[:start] = np.frombuffer(head, np.uint8)
    return body.data[:stop].toreadonly()


def apply_to(state: Mapping[str, Tensor], body: bytes | bytearray | memoryview, *, source: str) -> int:
    """Make the new state of a difference out of the old one, in place; the number of cells that changed.

    All of the body is checked before the first cell is written. A sound difference from another base can't be told
    from the right one here: compare `content_digest`.

    Args:
        state: the old state.
        body: from `difference_of`, or from anybody.
        source: the difference in words, for errors.

    Raises:
        PayloadError: if `difference_of` writes no such body for a state of this layout; the state is as it was.
    """
    runs = _runs(state)
    parts = _parts(memoryview(body).cast("B"), runs, _layout(state), source)

    def decode(first: int, last: int, lengths: Sequence[int], bodies: memoryview, only_check: bool) -> int:
        try:
            return cells.decode(lengths, bodies, [into_N for _, into_N in runs[first:last]], only_check=only_check)
        except cells.UnsoundCellsError as error:
            raise PayloadError(f"{source} is damaged at {runs[first + error.vector][0]}: {error}") from None

    _on_threads(decode, [(*part, True) for part in parts])
    return sum(_on_threads(decode, [(*part, False) for part in parts]))


def _parts(
    body: memoryview, runs: Sequence[tuple[str, cells.Cells]], layout: bytes, source: str
) -> list[tuple[int, int, Sequence[int], memoryview]]:
    """For each thread, the first and last of its runs, the lengths of their chunks' bodies, and these."""
    numbers = list(accumulate((-(-len(cells_N) // cells.CHUNK) for _, cells_N in runs), initial=0))
    start = _HEAD_BYTES + _LENGTH_BYTES * numbers[-1]
    if body[: len(_MAGIC)] != _MAGIC:
        raise PayloadError(f"{source} is no difference of weights that this version of diloco can read")
    if body[len(_MAGIC) : _HEAD_BYTES] != layout:
        raise PayloadError(f"{source} is the difference of a model with other names, shapes or dtypes")
    if len(body) < start:
        raise PayloadError(f"{source} is damaged: it has {len(body)} bytes, and ends before its lengths do")
    lengths = struct.unpack_from(f"<{numbers[-1]}I", body, _HEAD_BYTES)
    if start + sum(lengths) != len(body):
        raise PayloadError(
            f"{source} is damaged: it has {len(body)} bytes, and should have {start + sum(lengths)}"
        )
    parts = list[tuple[int, int, Sequence[int], memoryview]]()
    for first, last in _shares(len(runs)):
        of_part = lengths[numbers[first] : numbers[last]]
        parts.append((first, last, of_part, body[start : start + sum(of_part)]))
        start += sum(of_part)
    return parts


def content_digest(state: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bits: SHA-256 over these and the XXH3-128 of each tensor.

    It finds accidents, such as a flipped bit or a difference that was applied to another base. XXH3 is no
    cryptographic hash: against forgers a follower has the SHA-256 of each body that it applies, under a signature.

    >>> content_digest({"a": torch.zeros(2)})[:16], content_digest({"a": torch.tensor([0.0, -0.0])})[:16]
    ('8f44414292f23c1a', '216b0c5e88759106')
    """

    def digest_of(tensor: Tensor) -> str:
        digest = xxhash.xxh3_128()
        digest.update(_bytes(tensor).data)  # other threads run meanwhile
        return digest.hexdigest()

    names = sorted(state)
    digests = _on_threads(digest_of, [(state[name],) for name in names])
    entries = [[*_form(name, state[name]), digest] for name, digest in zip(names, digests, strict=True)]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _layout(state: Mapping[str, Tensor]) -> bytes:
    """The digest of names, dtypes and shapes."""
    forms = [_form(name, state[name]) for name in sorted(state)]
    return hashlib.sha256(json.dumps(forms).encode()).digest()


def _form(name: str, tensor: Tensor) -> list:
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _runs(state: Mapping[str, Tensor]) -> list[tuple[str, cells.Cells]]:
    """The cells of each tensor, on its memory, in runs of chunks that a thread codes at once, with its name."""
    length = _CHUNKS_AT_ONCE * cells.CHUNK
    runs = list[tuple[str, cells.Cells]]()
    for name in sorted(state):
        cells_N = _bytes(state[name]).view(f"<u{_cell_bytes(state[name])}")
        runs += [(name, cells_N[start : start + length]) for start in range(0, len(cells_N), length)]
    return runs


def _shares(number: int) -> list[tuple[int, int]]:
    """The first and last of so many things, for each of torch's threads."""
    num_threads = torch.get_num_threads()
    return list(pairwise(number * thread // num_threads for thread in range(num_threads + 1)))


def _on_threads(call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """The results of calls with these arguments, on as many threads as torch has."""
    if torch.get_num_threads() == 1 or len(arguments) < 2:
        return [call(*some) for some in arguments]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(lambda some: call(*some), arguments))


def _cell_bytes(tensor: Tensor) -> int:
    """The bytes of a real number of a tensor: a complex one is two cells."""
    return tensor.itemsize // 2 if tensor.is_complex() else tensor.itemsize


def _bytes(tensor: Tensor) -> np.ndarray:
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "a state has contiguous CPU tensors"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
