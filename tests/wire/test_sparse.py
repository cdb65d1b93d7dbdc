from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.wire import reference
from tests.wire.cases import (
    IMPLEMENTATIONS,
    decode,
    encode,
    f32,
    implementation,
    sealed,
    through,
    vectors,
)

from diloco.wire import Key, codec
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.sparse import FedDropout


def kept(spec: str, delta: np.ndarray, key: Key) -> np.ndarray:
    return through(spec, delta, key) != 0


def test_a_mask_is_the_same_for_all_replicas_and_codecs_and_fair_over_rounds():
    delta, num_rounds = np.ones(100, f32), 500
    masks = [kept("feddropout:density=0.1", delta, Key(7, 0, r, 0)) for r in range(1, num_rounds + 1)]
    # Binomial(500, 0.1): its standard deviation is 6.7; that of all, 67.
    counts = np.sum(masks, axis=0)
    assert abs(counts - 50).max() < 5 * 6.7 and abs(counts.sum() - 10 * num_rounds) < 5 * 67
    assert np.array_equal(kept("dare:density=0.1", -delta, Key(7, 0, 1, 3)), masks[0])
    assert not np.array_equal(masks[0], masks[1])


def test_dare_is_right_on_average():
    num_samples = 2000
    vector = np.random.default_rng(0).uniform(-1, 1, 64).astype(f32)
    samples = through("dare:density=0.25", np.tile(vector, num_samples), Key(1, 0, 1, 0)).reshape(-1, 64)
    error = np.abs(samples.mean(axis=0, dtype=np.float64) - vector)
    assert (error <= 5 * samples.std(axis=0) / num_samples**0.5).all()
    assert abs((samples == 0).mean() - 0.75) < 5 * (0.75 * 0.25 / samples.size) ** 0.5


def test_values_for_which_there_is_no_room_are_dropped():
    """None are in practice: six standard deviations."""
    delta, key = np.arange(1, 101, dtype=f32), Key(7, 0, 1, 0)
    with patch.object(FedDropout, "num_values", lambda self, num_elements: 30):
        decoded = through("feddropout:density=0.5", delta, key)
    expected = through("feddropout:density=0.5", delta, key)
    last = np.flatnonzero(expected)[29]
    assert np.array_equal(decoded[: last + 1], expected[: last + 1])
    assert not decoded[last + 1 :].any() and expected[last + 1 :].any()


@example(seed=0, length=300, density=1.0)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 7, 64, 300]), st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_keeps_the_largest_magnitudes_and_of_equal_ones_the_first(seed, length, density):
    vector = np.random.default_rng(seed).integers(-4, 5, length).astype(f32)
    kept = codec(f"topk:density={density}").num_values(length)
    order = sorted(range(length), key=lambda i: (-abs(vector[i]), i))
    expected = np.zeros(length, f32)
    expected[order[:kept]] = vector[order[:kept]]
    assert np.array_equal(through(f"topk:density={density}", vector), expected)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@settings(max_examples=50)
@given(vector=vectors(lengths=(1, 37, 256, 700)), seed=st.integers(0, 2**32 - 1), octaves=st.integers(0, 30))
def test_pulse_sends_the_changes_that_the_model_sees(how, vector, seed, octaves):
    rng = np.random.default_rng(seed)
    outer = rng.permutation(vector) * f32(2.0**octaves) if np.abs(vector).max() < 2.0**90 else -vector
    for spec in ("pulse:density=1", "pulse:density=1,mask=fp32", "pulse:density=0.2"):
        with implementation(how):
            payload = encode(spec, vector, outer=outer)
        assert payload.numpy().tobytes() == reference.encode(spec, vector, outer=outer)
        sent = decode(spec, payload, len(vector))
        with np.errstate(over="ignore"):
            new = torch.from_numpy(outer - vector), torch.from_numpy(outer - sent)
        if "mask" in spec:  # nothing is lost: the limit of dense FP32
            assert torch.equal(new[1], new[0])
        elif spec.endswith("=1"):
            assert torch.equal(new[1].bfloat16(), new[0].bfloat16())
            assert not sent[(new[0].bfloat16() == torch.from_numpy(outer).bfloat16()).numpy()].any()


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([1, 63, 64, 700, 4096, 5000]),
    form=st.sampled_from([(64, 4), (512, 512), (4096, 64)]),
    magnitudes=st.sampled_from([3, 30, 1 << 20]),
)
def test_sparseloco_keeps_the_largest_of_each_block_to_a_quarter_of_their_range(
    how, seed, length, form, magnitudes
):
    block, k = form
    vector = np.random.default_rng(seed).integers(-magnitudes, magnitudes + 1, length).astype(f32)
    with implementation(how):
        decoded = through(f"sparseloco:block={block},k={k}", vector)
    for start in range(0, length, block):
        mine, sent = vector[start : start + block], decoded[start : start + block]
        order = sorted(range(len(mine)), key=lambda i: (-abs(mine[i]), i))
        kept = order[: -(-len(mine) * k // block)]
        assert not sent[order[len(kept) :]].any()
        least, most = (abs(mine[i]) for i in (kept[-1], kept[0]))
        assert np.abs(sent - mine)[kept].max() <= (most - least) / 4 + most * 2**-7  # the bounds are in BF16


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


def test_a_block_with_another_number_of_places_is_refused():
    wire, other = codec("sparseloco:block=8,k=4"), codec("topk:density=0.5")
    of_one_block = torch.cat([torch.ones(6), torch.zeros(8), torch.ones(2)])
    payload, places = wire.encode(torch.ones(16)), other.encode(of_one_block)
    assert wire.places_bytes(16) == other.places_bytes(16)
    payload[HEADER_BYTES:][: wire.places_bytes(16)] = places[HEADER_BYTES:][: wire.places_bytes(16)]
    with pytest.raises(ValueError, match="holds places or values that are never written"):
        wire.decode(sealed(payload), 16)
