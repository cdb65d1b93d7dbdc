"""Snapshots of a fragment: Θ_p and the outer rule's slots after a round, as safetensors bytes.

The bytes are a pure function of the vectors: sorted names, FP32, one length, no metadata. A reader makes the head
anew from the names, and compares it with the one that is there.

Shapes: N elements of one fragment.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import torch
from torch import Tensor

from diloco.errors import FileError
from diloco.files import sha256
from diloco.rendezvous.payloads import body_tensor
from diloco.schema import decoded
from diloco.wire.payload import is_finite, plain

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST_VECTORS = 16
_MOST_HEAD_BYTES = 1 << 14
_LENGTH = struct.Struct("<Q")
_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]


class SnapshotError(FileError):
    """A snapshot is damaged, forged, or of another model or outer rule."""


def name_of(fragment: int, round: int, sha256: str) -> str:
    """The name of a snapshot in the store.

    Args:
        fragment: p.
        round: outer steps of the fragment so far.
        sha256: of the object.
    """
    return f"snapshots/{fragment}/{round}-{sha256}"


def most_bytes(num_elements: int) -> int:
    """Size of the largest snapshot of N elements that is read."""
    return _MOST_HEAD_BYTES + _MOST_VECTORS * 4 * num_elements


def sealed(vectors: Mapping[str, Tensor]) -> tuple[list[memoryview], str]:
    """The buffers of a snapshot, to be uploaded one after another, and the SHA-256 of all.

    Args:
        vectors: by name: Θ_p as `outer`, and the outer rule's slots; flat FP32 (N). On a CPU their memory is not
            copied: it must not change until the upload is over.
    """
    (num_elements,) = {vector.numel() for vector in vectors.values()}
    assert len(vectors) <= _MOST_VECTORS, "an outer rule has few slots"
    assert all(vector.dtype == torch.float32 and vector.dim() == 1 for vector in vectors.values())
    contents = (vectors[name].detach().cpu().contiguous().view(torch.uint8) for name in sorted(vectors))
    buffers = [memoryview(_head(vectors, num_elements)), *(vector.numpy().data for vector in contents)]
    return buffers, sha256(*buffers)


def opened(data: "Buffer", *, name: str, num_elements: int) -> dict[str, Tensor]:
    """The vectors of a snapshot, from bytes that nobody has checked, on the same memory: not to be written to.

    Args:
        data: the object.
        name: the object's, which ends with its SHA-256.
        num_elements: N.

    Raises:
        SnapshotError: naming the object, if the bytes are not those of its name, are not what `sealed` writes for
            vectors of N elements, or hold NaN or an infinity.
    """
    whole = memoryview(data).cast("B")
    if sha256(whole) != name[-64:]:
        _refuse(name, "it does not match the SHA-256 in its name: it was cut short, damaged or changed")
    names = _names(whole, name)
    head = _head(names, num_elements)
    if whole.nbytes != len(head) + len(names) * 4 * num_elements or whole[: len(head)] != head:
        _refuse(name, f"it does not hold FP32 vectors of {num_elements:,} elements: it is of another model")
    vectors: dict[str, Tensor] = {}
    for index, key in enumerate(names):
        start = len(head) + index * 4 * num_elements
        content = plain(body_tensor(whole[start : start + 4 * num_elements]), torch.device("cpu"))
        vectors[key] = content.view(torch.float32)
        if not is_finite(vectors[key]):
            _refuse(name, f"its vector {key} holds NaN or an infinity")
    return vectors


def read_into(vectors: Mapping[str, Tensor], data: "Buffer", *, name: str) -> None:
    """Copy a snapshot into vectors on any device; they change only if all of it is sound.

    Args:
        vectors: as for `sealed`.
        data: the object.
        name: the object's, which ends with its SHA-256.

    Raises:
        SnapshotError: as `opened`, and if it holds vectors of other names.
    """
    (num_elements,) = {vector.numel() for vector in vectors.values()}
    saved = opened(data, name=name, num_elements=num_elements)
    if saved.keys() != vectors.keys():
        ours, theirs = ", ".join(sorted(vectors)), ", ".join(saved)
        _refuse(name, f"it holds {theirs}, and this run's outer rule needs {ours}: take the same outer rule")
    for key, vector in vectors.items():
        vector.copy_(saved[key])


def _names(whole: memoryview, name: str) -> list[str]:
    """The names of the vectors in a snapshot, in order."""
    length = _LENGTH.unpack_from(whole)[0] if whole.nbytes >= _LENGTH.size else 0
    if not 0 < length <= min(_MOST_HEAD_BYTES - _LENGTH.size, whole.nbytes - _LENGTH.size):
        _refuse(name, "it does not begin as a snapshot")
    header = bytes(whole[_LENGTH.size : _LENGTH.size + length])
    try:
        names = sorted(decoded(header, dict[_Name, dict[str, Any]], source=name))
    except FileError as error:
        raise SnapshotError(str(error)) from None
    if not 0 < len(names) <= _MOST_VECTORS:
        _refuse(name, f"it has {len(names)} vectors")
    return names


def _head(names: Iterable[str], num_elements: int) -> bytes:
    """The length of the header, uint64 little-endian, and the header, padded to a multiple of 8 bytes."""
    size = 4 * num_elements
    entries = {
        name: {"dtype": "F32", "shape": [num_elements], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(sorted(names))
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _refuse(name: str, reason: str) -> NoReturn:
    raise SnapshotError(f"{name} can't be used: {reason}")
