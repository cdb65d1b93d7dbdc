"""The lossless difference of two states of one model, and the digest of a state.

A state is `Mapping[str, Tensor]`: contiguous CPU tensors of any dtype, without memory in common. Its tensors, in the
order of their names, are cut into chunks of `cells.CHUNK` cells; a tensor begins a chunk of its own. A difference is
a magic word, the digest of the state's layout, the length of each chunk's body, and the bodies of `cells.encode`.
So it is no larger than the state by more than 4 bytes per chunk and the head.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.errors import PayloadError
from diloco.publishing import cells

_MAGIC = b"DLCDIFF1"
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_LENGTH_BYTES = 4


def difference_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bytes:
    """The difference that `apply_to` adds to the old state to make the new one, bit by bit.

    Args:
        old: the state before.
        new: a state of the same names, shapes and dtypes.
    """
    assert _layout(old) == _layout(new), "both states are of one model"
    chunks = zip(_chunks(old), _chunks(new), strict=True)
    bodies = [cells.encode(old_n, new_n) for old_n, new_n in chunks]
    lengths = struct.pack(f"<{len(bodies)}I", *map(len, bodies))
    return b"".join((_MAGIC, _layout(old), lengths, *bodies))


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
    chunks = _chunks(state)
    bodies = _bodies(memoryview(body).cast("B"), chunks, _layout(state), source)
    for only_check in (True, False):
        num_changed = 0
        for chunk, (into_n, of_chunk) in enumerate(zip(chunks, bodies, strict=True)):
            try:
                num_changed += cells.decode(of_chunk, into_n, only_check=only_check)
            except PayloadError as error:
                raise PayloadError(f"{source} is damaged: {error} (chunk {chunk})") from None
    return num_changed


def _bodies(body: memoryview, chunks: Sequence[cells.Cells], layout: bytes, source: str) -> list[memoryview]:
    """Each chunk's body."""
    start = _HEAD_BYTES + _LENGTH_BYTES * len(chunks)
    if body[: len(_MAGIC)] != _MAGIC:
        raise PayloadError(f"{source} is no difference of weights that this version of diloco can read")
    if len(body) < _HEAD_BYTES or body[len(_MAGIC) : _HEAD_BYTES] != layout:
        raise PayloadError(f"{source} is the difference of a model with other names, shapes or dtypes")
    if len(body) < start:
        raise PayloadError(f"{source} is damaged: it has {len(body)} bytes, and ends before its lengths do")
    lengths = struct.unpack_from(f"<{len(chunks)}I", body, _HEAD_BYTES)
    ends = list(accumulate(lengths, initial=start))
    if ends[-1] != len(body):
        raise PayloadError(f"{source} is damaged: it has {len(body)} bytes, and should have {ends[-1]}")
    return [body[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def content_digest(state: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bits: SHA-256 over these and the XXH3-128 of each tensor.

    It finds accidents, such as a flipped bit or a difference that was applied to another base. XXH3 is no
    cryptographic hash: against forgers a follower has the SHA-256 of each body that it applies, under a signature.

    >>> content_digest({"a": torch.zeros(2)})[:16], content_digest({"a": torch.tensor([0.0, -0.0])})[:16]
    ('8f44414292f23c1a', '216b0c5e88759106')
    """
    entries = [
        [*_form(name, state[name]), xxhash.xxh3_128_hexdigest(_bytes(state[name]).data)] for name in sorted(state)
    ]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _layout(state: Mapping[str, Tensor]) -> bytes:
    """The digest of names, dtypes and shapes."""
    forms = [_form(name, state[name]) for name in sorted(state)]
    return hashlib.sha256(json.dumps(forms).encode()).digest()


def _form(name: str, tensor: Tensor) -> list:
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _chunks(state: Mapping[str, Tensor]) -> list[cells.Cells]:
    """The cells of each chunk, on the tensors' memory."""
    flat = [_bytes(state[name]).view(f"<u{_cell_bytes(state[name])}") for name in sorted(state)]
    return [
        cells_N[start : start + cells.CHUNK] for cells_N in flat for start in range(0, len(cells_N), cells.CHUNK)
    ]


def _cell_bytes(tensor: Tensor) -> int:
    """The bytes of a real number of a tensor: a complex one is two cells."""
    return tensor.itemsize // 2 if tensor.is_complex() else tensor.itemsize


def _bytes(tensor: Tensor) -> np.ndarray:
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "a state has contiguous CPU tensors"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
