"""Snapshots of a fragment: Θ_p and the outer rule's slots after a round, as safetensors bytes.

The bytes are a pure function of the vectors: names in their order, FP32, no metadata. So a reader knows the head that
it must find, and parses none.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.errors import FileError
from diloco.rendezvous.entries import digest_of
from diloco.rendezvous.payloads import body_tensor
from diloco.wire.payload import is_finite, plain

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SnapshotError(FileError):
    """A snapshot is damaged, forged, or of another model or outer rule."""


def name_of(fragment: int, round: int, sha256: str) -> str:
    """The name of a snapshot in the store.

    Args:
        fragment: p.
        round: outer steps of the fragment before it.
        sha256: of the object.
    """
    return f"snapshots/{fragment}/{round}-{sha256}"


def sealed(vectors: Mapping[str, Tensor]) -> tuple[tuple[memoryview, ...], str]:
    """The buffers of a snapshot, to be uploaded one after another, and their SHA-256.

    Args:
        vectors: by name: Θ_p as `outer`, and the outer rule's slots; flat FP32. On a CPU their memory is not copied:
            it must not change until the upload is over.
    """
    _check(vectors)
    contents = [vectors[name].detach().cpu() for name in sorted(vectors)]
    buffers = (memoryview(_head(vectors)), *(memoryview(vector.numpy()).cast("B") for vector in contents))
    return buffers, digest_of(buffers)


def size_of(vectors: Mapping[str, Tensor]) -> int:
    """The size of a snapshot in bytes."""
    return len(_head(vectors)) + sum(vector.nbytes for vector in vectors.values())


def read_into(data: "Buffer", vectors: Mapping[str, Tensor], *, name: str) -> None:
    """Read a snapshot, from bytes that nobody has checked, into vectors; they change only if all of it is sound.

    Args:
        data: the object.
        vectors: as in `sealed`; on any device.
        name: the object's, which ends with its SHA-256.

    Raises:
        SnapshotError: naming the object, if the bytes are not those of its name, hold other vectors than these, or
            values that are not finite.
    """
    _check(vectors)
    whole, head = memoryview(data).cast("B"), _head(vectors)
    if digest_of([whole]) != name[-64:]:
        raise SnapshotError(f"{name} does not match the SHA-256 in its name: it was cut short, damaged or changed")
    if whole.nbytes != size_of(vectors) or bytes(whole[: len(head)]) != head:
        lengths = " and ".join(f"{key} of {vectors[key].numel():,}" for key in sorted(vectors))
        raise SnapshotError(
            f"{name}, {whole.nbytes:,} bytes, is not what this run needs, the FP32 vectors {lengths} elements in "
            f"{size_of(vectors):,} bytes: it is of another model, outer rule or version of diloco"
        )
    contents: dict[str, Tensor] = {}
    start = len(head)
    for key in sorted(vectors):
        end = start + vectors[key].nbytes
        contents[key] = plain(body_tensor(whole[start:end]), torch.device("cpu")).view(torch.float32)
        start = end
        if not is_finite(contents[key]):
            raise SnapshotError(f"{name} holds NaN or an infinity in {key}")
    for key, values_N in contents.items():
        vectors[key].copy_(values_N)


def _head(vectors: Mapping[str, Tensor]) -> bytes:
    """The length of the header, uint64 little-endian, and the header, padded to a multiple of 8 bytes."""
    entries: dict[str, dict[str, str | Sequence[int]]] = {}
    start = 0
    for name in sorted(vectors):
        end = start + 4 * vectors[name].numel()
        entries[name] = {"dtype": "F32", "shape": [vectors[name].numel()], "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check(vectors: Mapping[str, Tensor]) -> None:
    for name, vector in vectors.items():
        is_flat = vector.dim() == 1 and vector.dtype == torch.float32 and vector.is_contiguous()
        assert is_flat, f"{name} is a flat FP32 vector"
