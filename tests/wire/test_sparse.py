import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.cases import f32, sealed, through

from diloco.wire import Key, codec
from diloco.wire.formats import HEADER_BYTES


def test_a_mask_is_the_same_for_all_replicas_and_codecs_and_fair_over_rounds():
    delta, num_rounds = torch.ones(100), 500
    masks = [codec("feddropout:density=0.1").choose(delta, Key(7, 0, r, 0)) for r in range(1, num_rounds + 1)]
    counts = torch.cat(masks).bincount(minlength=100)
    # Binomial(500, 0.1): its standard deviation is 6.7.
    assert counts.sum() == 10 * num_rounds and (counts - 50).abs().max() < 5 * 6.7
    other = codec("dare:density=0.1").choose(torch.zeros(100), Key(7, 0, 1, 3))
    assert torch.equal(other, masks[0]) and not torch.equal(other, masks[1])


def test_dare_is_right_on_average():
    num_samples = 2000
    vector = np.random.default_rng(0).uniform(-1, 1, 64).astype(f32)
    samples = through("dare:density=0.25", np.tile(vector, num_samples), Key(1, 0, 1, 0)).reshape(-1, 64)
    error = np.abs(samples.mean(axis=0, dtype=np.float64) - vector)
    assert (error <= 5 * samples.std(axis=0) / num_samples**0.5).all() and (samples == 0).mean() == 0.75


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 7, 64, 300]), st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_keeps_the_largest_magnitudes_and_of_equal_ones_the_first(seed, length, density):
    vector = np.random.default_rng(seed).integers(-4, 5, length).astype(f32)
    kept = codec(f"topk:density={density}").num_kept(length)
    order = sorted(range(length), key=lambda i: (-abs(vector[i]), i))
    expected = np.zeros(length, f32)
    expected[order[:kept]] = vector[order[:kept]]
    assert np.array_equal(through(f"topk:density={density}", vector), expected)


@pytest.mark.parametrize("damage", ["a place twice", "one place less", "a place beyond the end"])
def test_places_that_cannot_be_are_refused(damage):
    wire = codec("topk:density=0.1")
    payload = wire.encode(torch.cat([torch.zeros(90), torch.ones(10)]))  # l = 3 bits, then a vector of 22
    start, end = HEADER_BYTES, HEADER_BYTES + wire.places_bytes(100)
    if damage == "a place twice":
        payload[start : end - 3] = 0
    elif damage == "one place less":
        payload[end - 1] = 0
    else:
        payload[start : end - 3] = 255
    with pytest.raises(ValueError, match="holds places or values that are never written"):
        wire.decode(sealed(payload), 100)
