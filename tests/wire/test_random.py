from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.cases import BLOCKS, KEYS, SPARSE, decode, encode, f32, through

from diloco.wire import Key, codec
from diloco.wire.random import philox, random_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    """Those of its authors' library, Random123."""
    words = [torch.tensor([int(word, 16)]) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    assert " ".join(f"{word.item():08x}" for word in philox(words, (k0, k1))) == expected


@given(KEYS, st.integers(0, 50), st.integers(0, 50))
def test_random_bits_depend_on_the_key_and_the_place_alone(key, length, more):
    bits = random_bits(key, length, CPU, common=False)
    assert bits.shape == (length,) and ((bits >= 0) & (bits < 2**32)).all()
    assert torch.equal(random_bits(key, length + more, CPU, common=False)[:length], bits)


@pytest.mark.parametrize("field", Key._fields)
def test_every_part_of_a_key_matters_but_the_replica_to_what_is_common(field):
    key = Key(2**40, 3, 5, 1, 2)
    other = key._replace(**{field: getattr(key, field) + 1})
    for common in (False, True):
        same = torch.equal(*(random_bits(k, 64, CPU, common=common) for k in (key, other)))
        assert same == (common and field == "replica")


@pytest.mark.parametrize("wire", ["feddropout", "dare"])
def test_a_mask_is_the_same_for_all_replicas_and_fair_over_rounds(wire):
    delta, num_rounds = np.ones(100, f32), 2000
    kept = Counter()
    for r in range(1, num_rounds + 1):
        key = Key(7, 0, r, 0)
        first, second = (through(f"{wire}:density=0.1", delta, key._replace(replica=m)) for m in (0, 1))
        assert np.array_equal(first, second) and np.count_nonzero(first) == 10
        kept.update(np.flatnonzero(first).tolist())
    # Binomial(2000, 0.1): its standard deviation is 13.4.
    assert len(kept) == 100 and max(abs(n - 200) for n in kept.values()) < 5 * 13.4


@pytest.mark.parametrize("wire", [f"{wire}:stochastic=true" for wire in BLOCKS] + ["dare:density=0.25"])
def test_what_is_rounded_at_random_or_rescaled_is_right_on_average(wire):
    vector = np.random.default_rng(0).uniform(-1, 1, 64).astype(f32)
    vector[[3, 40]] = 0, -0.0
    num = 2000
    samples = np.array([through(wire, vector, Key(1, 0, r, 0)) for r in range(1, num + 1)], np.float64)
    error = np.abs(samples.mean(axis=0) - vector)
    standard_error = samples.std(axis=0) / num**0.5
    # What lies so near to a value that its neighbour was seldom drawn has no standard error to speak of.
    seldom = 10 * np.ptp(samples, axis=0).max() / num
    assert (error <= 5 * standard_error + seldom).all()
    assert (samples.std(axis=0) > 0).sum() > 30  # it is rounded at random


@pytest.mark.parametrize("wire", BLOCKS)
def test_replicas_round_at_random_independently(wire):
    vector = np.random.default_rng(0).standard_normal(300).astype(f32)
    payloads = [encode(f"{wire}:stochastic=true", vector, Key(replica=m)) for m in (0, 1)]
    assert not torch.equal(*payloads)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 7, 64, 300]), st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_keeps_the_largest_magnitudes_and_of_equal_ones_the_first(seed, length, density):
    vector = np.random.default_rng(seed).integers(-4, 5, length).astype(f32)
    kept = codec(f"topk:density={density}").num_kept(length)
    order = sorted(range(length), key=lambda i: (-abs(vector[i]), i))
    expected = np.zeros(length, f32)
    expected[order[:kept]] = vector[order[:kept]]
    assert np.array_equal(through(f"topk:density={density}", vector), expected)


@given(st.integers(1, 2000), st.floats(1e-3, 1.0))
def test_a_place_costs_less_than_two_bits_more_than_its_information(length, density):
    wire = codec(f"topk:density={density}")
    kept = wire.num_kept(length)
    assert 8 * wire.places_bytes(length) <= kept * (2 + np.log2(length / kept)) + 2 * 8


@pytest.mark.parametrize("wire", SPARSE)
def test_values_may_be_in_any_dense_codec(wire):
    vector = np.random.default_rng(0).standard_normal(1000).astype(f32)
    full = through(wire, vector)
    for values in ("bf16", "e4m3", "e3m0", "int2"):
        spec = f"{wire}:values={values}"
        payload = encode(spec, vector)
        places = decode(spec, payload, 1000) != 0
        assert set(np.flatnonzero(places)) <= set(np.flatnonzero(full)) and places.any()
        assert payload.numel() < encode(wire, vector).numel()


@pytest.mark.parametrize("damage", ["a place twice", "one place less", "a place beyond the end"])
def test_places_that_cannot_be_are_refused(damage):
    wire = codec("topk:density=0.1")
    payload = wire.encode(torch.cat([torch.zeros(90), torch.ones(10)]))  # l = 3 bits, then a vector of 22
    start, end = 16, 16 + wire.places_bytes(100)
    if damage == "a place twice":
        payload[start : end - 3] = 0
    elif damage == "one place less":
        payload[end - 1] = 0
    else:
        payload[start : end - 3] = 255
    with pytest.raises(ValueError, match="names places that can't be"):
        wire.decode(payload, 100)
