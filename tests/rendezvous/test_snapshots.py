import hashlib
import json

import numpy as np
import obstore
import pytest
import safetensors.torch
import torch

from diloco.rendezvous.objects import (
    SnapshotError,
    most_snapshot_bytes,
    open_snapshot,
    seal_snapshot,
    snapshot_name,
)


def snapshot(vectors) -> tuple[bytes, str]:
    """The bytes of a snapshot, and its name."""
    buffers, sha256 = seal_snapshot(vectors)
    return b"".join(buffers), snapshot_name(3, 8, sha256)


def vectors_of(num_elements, seed=0, slots=("outer", "velocity")):
    generator = torch.Generator().manual_seed(seed)
    return {slot: torch.randn(num_elements, generator=generator) for slot in slots}


def named(content: bytes) -> tuple[bytes, str]:
    return content, snapshot_name(3, 8, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("num_elements", [0, 1, 7, 1000])
def test_a_snapshot_is_a_safetensors_file_that_reads_back(num_elements):
    vectors = vectors_of(num_elements)
    content, name = snapshot(vectors)
    assert name == f"snapshots/3/8-{hashlib.sha256(content).hexdigest()}"
    assert len(content) <= most_snapshot_bytes(num_elements)
    by_library = safetensors.torch.load(content)
    ours = open_snapshot(obstore.Bytes(content), name=name, num_elements=num_elements)
    for key, vector in vectors.items():
        assert torch.equal(by_library[key], vector) and torch.equal(ours[key], vector)


def test_equal_content_gives_equal_bytes_in_any_order():
    vectors = vectors_of(10)
    backwards = dict(reversed(vectors.items()))
    assert snapshot(vectors) == snapshot(backwards)
    spread = torch.stack([vectors["outer"], torch.zeros(10)], 1)[:, 0]
    assert snapshot(vectors) == snapshot(vectors | {"outer": spread})
    assert snapshot(vectors)[1] != snapshot(vectors | {"outer": vectors["velocity"]})[1]


def test_neither_writing_nor_reading_copies():
    vectors = vectors_of(1000)
    buffers, sha256 = seal_snapshot(vectors)
    assert [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers[1:]] == [
        vectors[name].data_ptr() for name in ("outer", "velocity")
    ]
    content = b"".join(buffers)
    start, end = np.frombuffer(content, np.uint8).ctypes.data, len(content)
    for vector in open_snapshot(content, name=snapshot_name(3, 8, sha256), num_elements=1000).values():
        assert start < vector.data_ptr() < start + end
    # From an odd address a vector is copied.
    odd = memoryview(b"x" + content)[1:]
    for name, vector in open_snapshot(odd, name=snapshot_name(3, 8, sha256), num_elements=1000).items():
        assert torch.equal(vector, vectors[name]) and vector.data_ptr() % 4 == 0


def changed(content: bytes, old: str, new: str) -> tuple[bytes, str]:
    """A snapshot with another header, padded as it should be."""
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].rstrip().replace(old.encode(), new.encode())
    assert text != content[8 : 8 + length].rstrip()
    text += b" " * (-len(text) % 8)
    return named(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"F32"', '"I32"', "does not hold FP32 vectors of 10 elements: it is of another model"),
        ('"shape":[10]', '"shape":[11]', "does not hold FP32 vectors of 10"),
        ('"shape":[10]', '"shape":[2,5]', "does not hold FP32 vectors of 10"),
        ("[0,40]", "[40,80]", "does not hold FP32 vectors of 10"),
        ('{"dtype', '{ "dtype', "does not hold FP32 vectors of 10"),
        ("velocity", "outer", "the key 'outer' stands twice"),
        ("velocity", "../x", "can't be read"),
        ('{"outer"', '{"__metadata__":{"a":"b"},"outer"', "can't be read"),
    ],
)
def test_a_changed_header_is_refused_though_its_digest_is_right(old, new, reason):
    content, name = changed(snapshot(vectors_of(10))[0], old, new)
    with pytest.raises(SnapshotError, match=reason) as refusal:
        open_snapshot(content, name=name, num_elements=10)
    assert name in str(refusal.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    vectors = vectors_of(10)
    vectors["velocity"][7] = value
    content, name = snapshot(vectors)
    with pytest.raises(SnapshotError, match="its vector velocity holds NaN or an infinity"):
        open_snapshot(content, name=name, num_elements=10)


def test_another_model_or_damage_is_refused():
    content, name = snapshot(vectors_of(10))
    damaged = bytearray(content)
    damaged[-1] ^= 1
    for data in (damaged, content[:-1], content + b"\0", b""):
        with pytest.raises(SnapshotError, match="does not match the SHA-256 in its name"):
            open_snapshot(data, name=name, num_elements=10)
    with pytest.raises(SnapshotError, match="does not hold FP32 vectors of 11 elements"):
        open_snapshot(content, name=name, num_elements=11)
    for data in (b"", b"\0" * 8, (1 << 62).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{}"):
        with pytest.raises(SnapshotError, match=r"does not begin as a snapshot|it has 0 vectors"):
            open_snapshot(*named(data)[:1], name=named(data)[1], num_elements=0)
    many = json.dumps({f"slot_{i}": {} for i in range(17)}).encode()
    with pytest.raises(SnapshotError, match="it has 17 vectors"):
        open_snapshot(
            len(many).to_bytes(8, "little") + many,
            name=named(len(many).to_bytes(8, "little") + many)[1],
            num_elements=0,
        )
