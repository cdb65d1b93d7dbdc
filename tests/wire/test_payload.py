import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.wire import reference
from tests.wire.cases import (
    IMPLEMENTATIONS,
    INTEGERS,
    KEYS,
    NAMES,
    OTHER_BLOCKS,
    SCALED_FLOATS,
    SPARSE_SPECS,
    SPECS,
    UNSCALED,
    assert_same_bits,
    decode,
    encode,
    f32,
    implementation,
    sealed,
    vectors,
)

from diloco.errors import NonFiniteError, PayloadError
from diloco.wire import Key, codec
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.payload import base_of, checksum

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
def test_the_conformance_vectors(how, wire):
    chosen = [vector for vector in VECTORS if vector["wire"].partition(":")[0] == wire]
    assert len(chosen) >= 6
    with implementation(how):
        for vector in chosen:
            key, base = Key(*vector["key"]), vector.get("base", 0)
            delta, expected = (
                np.array([float.fromhex(x) for x in vector[part]], f32) for part in ("input", "decoded")
            )
            outer = np.array([float.fromhex(x) for x in vector["outer"]], f32) if "outer" in vector else None
            payload = encode(vector["wire"], delta, key, base=base, outer=outer)
            assert base_of(payload) == base
            assert payload.numpy().tobytes().hex() == vector["payload"], vector["name"]
            assert payload.numpy().tobytes() == reference.encode(vector["wire"], delta, key, base, outer)
            assert_same_bits(decode(vector["wire"], payload, len(delta), key), expected)


@pytest.mark.parametrize(
    ("spec", "how"),
    [(spec, "native") for spec in SPECS] + [(spec, "torch") for spec in UNSCALED + OTHER_BLOCKS + SPARSE_SPECS],
)
@settings(max_examples=25)
@given(vector=vectors(), key=KEYS)
def test_bytes_and_values_are_the_references(spec, how, vector, key):
    expected = reference.encode(spec, vector, key)
    with implementation(how):
        payload = encode(spec, vector, key)
        assert payload.numpy().tobytes() == expected
        decoded = reference.decode(spec, expected, len(vector), key)
        assert_same_bits(decode(spec, payload, len(vector), key), decoded)


@pytest.mark.parametrize("spec", NAMES)
@settings(max_examples=20)
@given(vector=vectors(), key=KEYS)
def test_adding_is_decoding_and_then_adding(spec, vector, key):
    payload = encode(spec, vector, key)
    total = np.linspace(-1e-4, 1e-4, len(vector), dtype=f32)
    expected = total + decode(spec, payload, len(vector), key)
    to = torch.from_numpy(total)
    assert codec(spec).decode_into(to, payload, key, add=True) is to
    assert_same_bits(to.numpy(), expected)


@settings(max_examples=30)
@given(vector=vectors())
def test_a_slice_of_memory_is_encoded_as_a_copy_of_it(vector):
    whole = torch.from_numpy(np.concatenate([vector, vector]))
    for part in (whole[len(vector) :], torch.stack([whole, whole], dim=1)[: len(vector), 0]):
        assert torch.equal(codec("e3m0").encode(part), codec("e3m0").encode(part.clone()))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
def test_a_vector_that_is_not_finite_is_refused(how, wire):
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 100, 299):
            delta = torch.ones(300)
            delta[place] = bad
            with implementation(how), pytest.raises(NonFiniteError, match="NaN or an infinity"):
                codec(wire).encode(delta)


@pytest.mark.parametrize("wire", NAMES)
def test_a_payload_of_another_length_shape_or_type_is_refused(wire):
    payload = codec(wire).encode(torch.ones(300))
    for wrong in (*(payload[:n] for n in (0, 3, 16, 24, HEADER_BYTES, -1)), torch.cat([payload, payload[:1]])):
        with pytest.raises(PayloadError, match=rf"300 elements in {wire}.* is {payload.numel()} bytes, not"):
            codec(wire).decode(wrong, 300)
    for wrong in (payload.view(1, -1), payload.float(), payload.view(torch.int8)):
        with pytest.raises(PayloadError, match=r"300 elements in .* not \(.*\) of torch\..* on cpu$"):
            codec(wire).decode(wrong, 300)


@pytest.mark.parametrize("wire", NAMES)
def test_a_payload_of_another_codec_or_length_is_refused(wire):
    payload = codec(wire).encode(torch.ones(300))
    for other in {*NAMES, f"{wire}:block=64", f"{wire}:density=0.2", f"{wire}:values=bf16"} - {wire}:
        try:
            wrong = codec(other).encode(torch.ones(300))
        except ValueError:
            continue  # it has no such option
        with pytest.raises(PayloadError, match=r"made by another codec for 300 elements$"):
            codec(wire).decode(wrong, 300)
        wrong = torch.nn.functional.pad(wrong, (0, max(0, payload.numel() - wrong.numel())))[: payload.numel()]
        with pytest.raises(PayloadError, match=r"made by another codec for 300 elements(, or damaged)?$"):
            codec(wire).decode(wrong, 300)
    with pytest.raises(PayloadError, match=r"made by this codec for 300 elements$"):
        codec(wire).decode(payload, 299)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("wire", "damaged"),
    [(wire, {1: 255 - reference.FORMATS[wire].E}) for wire in SCALED_FLOATS]
    + [(wire, {4 + 3: 255}) for wire in INTEGERS]
    + [(wire, {3: 0xBF, 2: 0x80}) for wire in INTEGERS]
    + [(wire, {3: 0x7F, 2: 0xC0}) for wire in ("fp32", "topk", "feddropout", "dare", "pulse")]
    + [("sparseloco", {2: 0, 3: 0}), ("sparseloco", {2: 0x80, 3: 0x7F}), ("sparseloco", {0: 0, 1: 0x80 | 0x3F})]
    + [("bf16", {1: 0x7F, 0: 0x80}), ("fp16", {1: 0x7C, 0: 0})]
    + [("e4m3", {2 + 299: 0x7F}), ("e5m2", {2: 0xFC})]
    + [("int8", {8 + 299: 0x80}), ("int4", {8 + 149: 0x80}), ("int2", {8 + 74: 0x80})]
    + [("int8", {0: 4, 1: 2, 2: 0x81, 3: 0x7C}), ("int4", {0: 0x25, 1: 0x49, 2: 0x92, 3: 0x7E})],
)
def test_a_body_that_stands_for_no_finite_number_is_refused_though_its_checksum_is_right(how, wire, damaged):
    payload = codec(wire).encode(torch.arange(300.0))
    start = HEADER_BYTES + (codec(wire).places_bytes(300) if wire in ("topk", "sparseloco", "pulse") else 0)
    for place, value in damaged.items():
        payload[place + start] = value
    sealed(payload)
    with implementation(how):
        for add in (False, True):
            with pytest.raises(PayloadError, match="damaged"):
                codec(wire).decode_into(torch.zeros(300), payload, add=add)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", SCALED_FLOATS + INTEGERS)
def test_the_largest_scale_of_all_and_the_largest_code_are_a_finite_number(how, wire):
    largest = torch.finfo(torch.float32).max
    with implementation(how):
        decoded = decode(wire, codec(wire).encode(torch.full((300,), largest)), 300)
    assert np.isfinite(decoded).all() and decoded.min() > largest / 2.1


@pytest.mark.parametrize("wire", NAMES)
def test_one_flipped_bit_anywhere_is_noticed(wire):
    payload = codec(wire).encode(torch.linspace(-1, 1, 9), base=7)
    for bit in range(8 * payload.numel()):
        damaged = payload.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match=r"damaged|run the same version of diloco on all replicas"):
            codec(wire).decode(damaged, 9)


def test_a_payload_of_version_1_is_refused_with_both_versions():
    old = torch.frombuffer(bytearray(b"DLC1" + bytes(12 + 2 + 150)), dtype=torch.uint8)
    with pytest.raises(
        PayloadError, match=r"not 168 bytes of version 1 of the wire format, and this is version 4: run"
    ):
        codec("e3m0").decode(old, 300)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
def test_a_body_of_another_length_is_refused_before_memory_beyond_it_is_reached(how, wire):
    body, to = codec(wire).encode(torch.ones(300))[HEADER_BYTES:], torch.zeros(300)
    with implementation(how):
        for wrong in (body[:-1], body[:1], body[:0], torch.cat([body, body])):
            with pytest.raises(
                PayloadError, match=rf"the body of 300 elements in {wire}.* is {body.numel()} bytes"
            ):
                codec(wire).unpack(wrong, to, Key(), add=False)
            with pytest.raises(PayloadError, match=r"the body of 300 elements in"):
                codec(wire).pack(to, wrong.clone(), Key())


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
def test_tensors_of_any_layout_are_taken(how, wire):
    delta = torch.linspace(-1, 1, 301)
    payload = codec(wire).encode(delta)
    expected, memory = codec(wire).decode(payload, 301), torch.zeros(2 * payload.numel() + 3, dtype=torch.uint8)
    bytes_of = bytearray(3) + bytearray(payload.numpy().tobytes())
    with implementation(how):
        for layout in (
            memory[1 : payload.numel() + 1],
            memory[3::2],
            torch.frombuffer(bytes_of, dtype=torch.uint8, offset=3),
        ):
            assert torch.equal(codec(wire).decode(layout.copy_(payload), 301), expected)
        vector = torch.frombuffer(bytearray(1 + 4 * 301), dtype=torch.float32, offset=1).copy_(delta)
        for layout in (vector, torch.stack([delta, delta], dim=1)[:, 0], delta.clone().requires_grad_()):
            assert torch.equal(codec(wire).encode(layout), payload)
    with pytest.raises(ValueError, match="only be decoded into a contiguous, aligned vector"):
        codec(wire).decode_into(vector, payload)


def test_tensors_without_memory_of_their_own_are_refused():
    wire = codec("fp32")
    payload = wire.encode(torch.ones(3))
    for wrong in (payload.to("meta"), payload.to_sparse()):
        with pytest.raises(PayloadError, match=r"of torch.uint8 on (meta|cpu)"):
            wire.decode_into(torch.ones(3), wrong)
    for wrong in (torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        with pytest.raises(ValueError, match=r"a flat float32 vector, not \(3,\) of torch.float32 on"):
            wire.encode(wrong)


def test_a_vector_that_is_not_flat_float32_or_not_contiguous_is_refused():
    wire = codec("e3m0")
    payload = wire.encode(torch.ones(300))
    for wrong in (torch.ones(300).bfloat16(), torch.ones(300).double(), torch.ones(3, 100)):
        with pytest.raises(ValueError, match="an outer gradient is a flat float32 vector, not"):
            wire.encode(wrong)
        with pytest.raises(ValueError, match="an outer gradient is a flat float32 vector, not"):
            wire.decode_into(wrong, payload)
    with pytest.raises(ValueError, match="contiguous"):
        wire.decode_into(torch.ones(600)[::2], payload)


def test_the_checksum_is_xxh3_of_the_bytes_in_memory():
    assert (
        checksum() == checksum(b"") == checksum(torch.empty(0)) == 0x2D06800538D394C2
    )  # xxHash's own test vector
    ones = torch.ones(5)
    assert checksum(ones) == checksum(ones.numpy().tobytes()) == checksum(ones[:2], ones.numpy().tobytes()[8:])
    assert checksum(torch.stack([ones, -ones], dim=1)[:, 0].requires_grad_()) == checksum(ones)
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
