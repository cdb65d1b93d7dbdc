import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests import reference

from diloco.wire import codec

f32 = np.float32
SPECS = ["fp32", "bf16", "e3m0", "e3m0:block=2", "e3m0:block=128"]
LENGTHS = st.sampled_from([0, 1, 2, 3, 127, 255, 256, 257, 513])
ANY_SIZE = st.integers(0, 0x7F7FFFFF)  # the bits of every finite magnitude, subnormals and zero included
SIGNS = st.sampled_from([0, 0x80000000])


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(f32)


@st.composite
def vectors(draw):
    """Finite FP32 vectors: any bits at all, or magnitudes within some octaves, with ties and zeros among them."""
    length = draw(LENGTHS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sign = rng.integers(0, 2, length, np.uint32) << 31
    if draw(st.booleans()):
        bits = rng.integers(0, 0x7F800000, length, np.uint32)
    else:
        top = draw(st.integers(0, 254))
        exponent = np.clip(top - rng.integers(0, draw(st.integers(1, 12)), length), 0, 254).astype(np.uint32)
        mantissa = rng.choice([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], length).astype(np.uint32)
        bits = exponent << 23 | mantissa
        bits[rng.random(length) < 0.1] = 0
    return (sign | bits).view(f32)


def encode(spec: str, vector: np.ndarray) -> torch.Tensor:
    return codec(spec).encode(torch.tensor(vector.tolist(), dtype=torch.float32))


def through(spec: str, vector: np.ndarray) -> np.ndarray:
    """decode(encode(Δ))."""
    decoded = codec(spec).decode(encode(spec, vector), len(vector))
    assert decoded.dtype == torch.float32
    return decoded.numpy()


def options(spec: str) -> dict[str, int]:
    return {"block": int(spec.partition("=")[2])} if "=" in spec else {}


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.astype(f32).view(np.uint32))


@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors())
@example(vector=floats([0x80000000, 0, 1, 0x80000001, 0x007FFFFF]))
@example(vector=np.array([-0.0], f32))
@example(vector=np.finfo(f32).max * np.array([1, -0.5, 0.75, 0.006], f32))
@example(vector=np.zeros(257, f32))
def test_values_are_the_references(spec, vector):
    expected = getattr(reference, spec.partition(":")[0])(vector, **options(spec))
    assert_same_bits(through(spec, vector), expected)


@pytest.mark.parametrize("spec", ["e3m0", "e3m0:block=2", "e3m0:block=128"])
@given(vector=vectors())
def test_e3m0_bytes_are_the_references(spec, vector):
    assert encode(spec, vector).numpy().tobytes() == reference.e3m0_bytes(vector, **options(spec))


@given(st.lists(st.tuples(SIGNS, ANY_SIZE).map(sum), min_size=1, max_size=9).map(floats))
def test_e3m0_of_any_few_numbers(vector):
    assert encode("e3m0", vector).numpy().tobytes() == reference.e3m0_bytes(vector)
    assert_same_bits(through("e3m0", vector), reference.e3m0(vector))


@given(vectors())
def test_floats_are_little_endian(vector):
    assert encode("fp32", vector).numpy().tobytes() == vector.astype("<f4").tobytes()
    upper_half = reference.bf16(vector).view(np.uint32) >> 16
    assert encode("bf16", vector).numpy().tobytes() == upper_half.astype("<u2").tobytes()


@given(vectors())
def test_fp32_changes_nothing(vector):
    assert_same_bits(through("fp32", vector), vector)


@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors())
def test_a_decoded_vector_is_its_own_image(spec, vector):
    once = through(spec, vector)
    if np.isfinite(once).all():
        assert_same_bits(through(spec, once), once)


@pytest.mark.parametrize("spec", SPECS)
@given(vector=vectors())
def test_payload_bytes_depend_on_the_length_alone(spec, vector):
    payload = encode(spec, vector)
    assert payload.dtype == torch.uint8 and payload.dim() == 1
    assert payload.numel() == codec(spec).payload_bytes(len(vector))


def test_payload_bytes_of_a_million_and_one():
    assert [codec(spec).payload_bytes(10**6 + 1) for spec in SPECS] == [
        4_000_004,
        2_000_002,
        500_001 + 3907,
        500_001 + 500_001,
        500_001 + 7813,
    ]


@given(vectors())
def test_e3m0_is_odd_in_its_argument_and_bounded_by_a_factor(vector):
    decoded = through("e3m0", vector)
    assert_same_bits(through("e3m0", -vector), np.where(decoded == 0, 0, -decoded))
    # A power of two is the nearest to x when x lies between 3/4 and 3/2 of it, but for what is cut to 0.
    kept = (decoded != 0) & (np.abs(vector) < 2.0**127) & (np.abs(vector) > 2.0**-119)
    ratio = vector[kept].astype(np.float64) / decoded[kept]
    assert ((ratio >= 0.5) & (ratio < 1.5)).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_payload_of_another_length_is_refused(spec, wrong):
    payload = torch.zeros(codec(spec).payload_bytes(300) + wrong, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"300 elements must be {payload.numel() - wrong} bytes"):
        codec(spec).decode(payload, 300)


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_of_another_shape_or_type_is_refused(spec):
    length = codec(spec).payload_bytes(300)
    for payload in (torch.zeros(length), torch.zeros(1, length, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="300 elements must be"):
            codec(spec).decode(payload, 300)


@pytest.mark.parametrize("name", ["fp32", "bf16", "e3m0"])
def test_codecs_are_known_by_name(name):
    assert codec(name) == codec(f"{name}:")
    assert codec(name) != codec("e3m0:block=64")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp16", r"wire='fp16' is not a wire format: choose one of fp32, bf16, e3m0"),
        ("", r"wire='' is not a wire format"),
        ("e3m0:blocks=128", r"'blocks=128' is not an option of e3m0 \(it has: block=INTEGER\)"),
        ("e3m0:block=many", r"'block=many' is not an option of e3m0"),
        ("e3m0:block=-2", r"'block=-2' is not an option of e3m0"),
        ("bf16:block=128", r"'block=128' is not an option of bf16 \(it has: none\)"),
        ("e3m0:block=0", r"block must be an even number .* not 0"),
        ("e3m0:block=255", r"block must be an even number .* not 255"),
    ],
)
def test_a_wire_that_does_not_exist_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        codec(spec)
