import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire import reference
from tests.wire.cases import (
    BLOCK_SPECS,
    BLOCKS,
    IMPLEMENTATIONS,
    INTEGERS,
    KEYS,
    NAMES,
    SCALED_FLOATS,
    SPECS,
    UNSCALED,
    assert_same_bits,
    decode,
    encode,
    f32,
    implementation,
    through,
    vectors,
)

from diloco.errors import NonFiniteError, PayloadError
from diloco.wire import CODECS, Key, codec

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


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors(), key=KEYS)
def test_bytes_and_values_are_the_references(how, spec, vector, key):
    expected = reference.encode(spec, vector, key)
    with implementation(how):
        payload = encode(spec, vector, key)
        assert payload.numpy().tobytes() == expected
        decoded = reference.decode(spec, expected, len(vector), key)
        assert_same_bits(decode(spec, payload, len(vector), key), decoded)


@pytest.mark.parametrize("spec", UNSCALED + BLOCK_SPECS)
@given(vector=vectors())
def test_a_decoded_value_is_the_nearest_of_all_that_the_block_can_hold(spec, vector):
    """By trying all of them: distances in float64 are exact."""
    name, options = reference._parse(spec)
    block = options.get("block", max(1, len(vector)))
    decoded = through(spec, vector)
    table = np.zeros(1) if name == "fp32" else representable(name)
    for start in range(0, len(vector), block):
        x, y = vector[start : start + block].astype(np.float64), decoded[start : start + block].astype(np.float64)
        if name == "fp32":
            assert (x == y).all()
            continue
        values = np.sort(table * scale_of(spec, vector, start // block))
        place = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
        nearest = np.minimum(np.abs(values[place - 1] - x), np.abs(values[place] - x))
        # An integer's quotient and product are rounded to FP32, which may favour the other of two neighbours.
        slack = np.abs(x) * 2.0**-22 if name in INTEGERS else 0
        assert (np.abs(y - x) <= nearest + slack).all()


def representable(name: str) -> np.ndarray:
    if name in reference.Q:
        return np.arange(-reference.Q[name], reference.Q[name] + 1.0)
    magnitudes = reference.FORMATS[name].magnitudes
    return np.concatenate([-magnitudes, magnitudes])


def scale_of(spec: str, vector: np.ndarray, block: int) -> float:
    name = spec.partition(":")[0]
    if name in UNSCALED:
        return 1.0
    scales = encode(spec, vector).numpy()[16:].tobytes()
    if name in INTEGERS:
        return float(np.frombuffer(scales, "<f4", block + 1)[block])
    return 2.0 ** (scales[block] - 127)


@pytest.mark.parametrize("spec", [spec for spec in UNSCALED + BLOCK_SPECS if spec[:3] != "int"])
@given(vector=vectors())
def test_a_decoded_vector_is_its_own_image(spec, vector):
    once = through(spec, vector)
    assert_same_bits(through(spec, once), once)


@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors(), key=KEYS)
def test_adding_is_decoding_and_then_adding(spec, vector, key):
    payload = encode(spec, vector, key)
    total = np.linspace(-1e-4, 1e-4, len(vector), dtype=f32)
    expected = total + decode(spec, payload, len(vector), key)
    to = torch.from_numpy(total)
    assert codec(spec).decode_into(to, payload, key, add=True) is to
    assert_same_bits(to.numpy(), expected)


@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors(), key=KEYS)
def test_payload_bytes_depend_on_the_length_alone(spec, vector, key):
    payload = encode(spec, vector, key)
    assert payload.dtype == torch.uint8 and payload.dim() == 1
    assert payload.numel() == codec(spec).payload_bytes(len(vector))


@given(vector=vectors())
def test_a_slice_of_memory_is_encoded_as_a_copy_of_it(vector):
    whole = torch.from_numpy(np.concatenate([vector, vector]))
    for part in (whole[len(vector) :], torch.stack([whole, whole], dim=1)[: len(vector), 0]):
        assert torch.equal(codec("e3m0").encode(part), codec("e3m0").encode(part.clone()))


LIMITS = {"e3m0": 4.04, "e2m1": 4.26, "int8": 8.13, "int4": 4.13, "int2": 2.13, "bf16": 16.001, "topk": 1.92}


@pytest.mark.parametrize(("wire", "bits"), LIMITS.items())
def test_bits_a_value_with_headers_and_scales(wire, bits):
    payload = codec(wire).encode(torch.randn(10**6, generator=torch.Generator().manual_seed(0)))
    assert 8 * payload.numel() / 10**6 <= bits


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 100, 299])
def test_a_vector_that_is_not_finite_is_refused(how, wire, bad, place):
    delta = torch.ones(300)
    delta[place] = bad
    with implementation(how), pytest.raises(NonFiniteError, match="NaN or an infinity"):
        codec(wire).encode(delta)


@pytest.mark.parametrize("wire", NAMES)
@pytest.mark.parametrize("num_bytes", [0, 3, 16, -1, 1])
def test_a_payload_of_another_length_is_refused(wire, num_bytes):
    payload = codec(wire).encode(torch.ones(300))
    wrong = torch.cat([payload, payload[:1]]) if num_bytes == 1 else payload[:num_bytes]
    with pytest.raises(PayloadError, match=rf"300 elements in {wire}.* is {payload.numel()} bytes, not"):
        codec(wire).decode(wrong, 300)


@pytest.mark.parametrize("wire", NAMES)
def test_a_payload_of_another_shape_or_type_is_refused(wire):
    payload = codec(wire).encode(torch.ones(300))
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


@pytest.mark.parametrize("wire", NAMES)
def test_what_is_no_flat_float32_vector_is_refused(wire):
    payload = codec(wire).encode(torch.ones(300))
    for wrong in (torch.ones(300).bfloat16(), torch.ones(300).double(), torch.ones(3, 100)):
        with pytest.raises(ValueError, match="an outer gradient is a flat float32 vector, not"):
            codec(wire).encode(wrong)
        with pytest.raises(ValueError, match="an outer gradient is a flat float32 vector, not"):
            codec(wire).decode_into(wrong, payload)
    with pytest.raises(ValueError, match="contiguous"):
        codec(wire).decode_into(torch.ones(600)[::2], payload)


def test_every_codec_is_tested():
    assert list(CODECS) == NAMES


@pytest.mark.parametrize("spec", SPECS)
def test_a_codec_is_known_by_its_spec(spec):
    assert codec(codec(spec).spec) == codec(spec)
    assert codec(spec.partition(":")[0]) == codec(f"{spec.partition(':')[0]}:")


@pytest.mark.parametrize("wire", BLOCKS)
@given(vector=vectors(), key=KEYS)
def test_how_it_was_rounded_does_not_matter_to_a_decoder(wire, vector, key):
    payload = encode(f"{wire}:stochastic=true", vector, key)
    assert_same_bits(
        decode(wire, payload, len(vector)), decode(f"{wire}:stochastic=true", payload, len(vector), key)
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp8", r"'fp8' is not a wire format: choose one of fp32, bf16, fp16, e4m3"),
        ("", r"'' is not a wire format"),
        (
            "e3m0:blocks=128",
            r"'blocks=128' is not an option of e3m0, .* \(it has: block=INTEGER, stochastic=true|false\)",
        ),
        ("e3m0:block=many", r"block must be INTEGER, not 'many'"),
        ("e3m0:stochastic=yes", r"stochastic must be true\|false, not 'yes'"),
        ("bf16:block=128", r"'block=128' is not an option of bf16, .* \(it has: none\)"),
        ("e3m0:block=0", r"block must be from 2 to 65536 elements, a multiple of 2, not 0"),
        ("e3m0:block=255", r"block must be from 2 to 65536 elements, a multiple of 2, not 255"),
        ("int2:block=6", r"int2: block must be .* a multiple of 4, not 6"),
        ("int8:block=65537", r"int8: block must be from 2 to 65536 elements, not 65537"),
        ("e3m0:block=64,block=128", r"'block=128' is not an option of e3m0, or given twice"),
        ("topk:density=0", r"topk: density must be above 0 and at most 1, not 0"),
        ("topk:density=1.5", r"topk: density must be above 0 and at most 1, not 1.5"),
        ("topk:density=nan", r"topk: density must be above 0 and at most 1, not nan"),
        ("topk:values=topk", r"topk: values=topk must be one of fp32, bf16"),
    ],
)
def test_a_wire_that_does_not_exist_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        codec(spec)


@given(st.integers(1, 400), st.sampled_from(BLOCKS))
def test_the_sign_of_a_vector_is_the_sign_of_what_is_decoded(seed, wire):
    vector = np.random.default_rng(seed).standard_normal(300).astype(f32)
    assert np.array_equal(through(wire, -vector), -through(wire, vector))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("spec", ["e3m0", "int4:stochastic=true"])
def test_the_reference_compiles_as_one_graph_to_the_same_bits(spec):
    """What a GPU runs, compiled for the CPU; in a process that checks no types, since that can't be traced."""
    subprocess.run([sys.executable, "-m", "tests.wire.compiled", spec], check=True, timeout=200)
