import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.wire import reference
from tests.wire.cases import (
    BLOCK_SPECS,
    IMPLEMENTATIONS,
    INTEGERS,
    KEYS,
    NAMES,
    SCALED_FLOATS,
    SPECS,
    assert_same_bits,
    decode,
    encode,
    f32,
    implementation,
    vectors,
)

from diloco.errors import NonFiniteError, PayloadError
from diloco.wire import Key, codec

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
def test_the_conformance_vectors(how, wire):
    chosen = [vector for vector in VECTORS if vector["wire"].partition(":")[0] == wire]
    assert len(chosen) >= 6
    with implementation(how):
        for vector in chosen:
            key, delta = Key(*vector["key"]), np.array([float.fromhex(x) for x in vector["input"]], f32)
            payload = encode(vector["wire"], delta, key)
            assert payload.numpy().tobytes().hex() == vector["payload"], vector["name"]
            expected = np.array([float.fromhex(x) for x in vector["decoded"]], f32)
            assert_same_bits(decode(vector["wire"], payload, len(delta), key), expected)


@pytest.mark.parametrize(
    ("spec", "how"), [(spec, "native") for spec in SPECS] + [(spec, "torch") for spec in BLOCK_SPECS]
)
@settings(max_examples=40)
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
    for wrong in (*(payload[:n] for n in (0, 3, 16, -1)), torch.cat([payload, payload[:1]])):
        with pytest.raises(PayloadError, match=rf"300 elements in {wire}.* is {payload.numel()} bytes, not"):
            codec(wire).decode(wrong, 300)
    for wrong in (payload.view(1, -1), payload.float()):
        with pytest.raises(PayloadError, match="300 elements in"):
            codec(wire).decode(wrong, 300)


@pytest.mark.parametrize("wire", NAMES)
def test_a_payload_of_another_codec_or_length_is_refused(wire):
    payload = codec(wire).encode(torch.ones(300))
    for other in {*NAMES, f"{wire}:block=64", f"{wire}:density=0.2", f"{wire}:values=bf16"} - {wire}:
        try:
            wrong = codec(other).encode(torch.ones(300))
        except ValueError:
            continue  # it has no such option
        wrong = torch.nn.functional.pad(wrong, (0, max(0, payload.numel() - wrong.numel())))[: payload.numel()]
        with pytest.raises(PayloadError, match="made by another codec for 300 elements"):
            codec(wire).decode(wrong, 300)
    with pytest.raises(PayloadError, match="made by this codec for 300 elements"):
        codec(wire).decode(payload, 299)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("wire", "damaged"),
    [(wire, {16 + 1: 255}) for wire in SCALED_FLOATS]
    + [(wire, {16 + 4 + 3: 255}) for wire in INTEGERS]
    + [(wire, {16 + 3: 0x7F, 16 + 2: 0xC0}) for wire in ("fp32", "topk", "feddropout", "dare")]
    + [("bf16", {16 + 1: 0x7F, 16: 0x80}), ("fp16", {16 + 1: 0x7C, 16: 0})]
    + [("e4m3", {16 + 2 + 299: 0x7F}), ("e5m2", {16 + 2: 0xFC})],
)
def test_a_body_that_stands_for_no_number_is_refused(how, wire, damaged):
    payload = codec(wire).encode(torch.arange(300.0))
    start = codec(wire).places_bytes(300) if wire == "topk" else 0
    for place, value in damaged.items():
        payload[place + start] = value
    with implementation(how):
        for add in (False, True):
            with pytest.raises(PayloadError, match="damaged"):
                codec(wire).decode_into(torch.zeros(300), payload, add=add)


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
