import shutil
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.wire import reference
from tests.wire.cases import (
    BLOCKS,
    INTEGERS,
    SCALED_FLOATS,
    assert_same_bits,
    decode,
    encode,
    f32,
    implementation,
    through,
    vectors,
)

from diloco.wire import Key, blocks, codec
from diloco.wire.floats import E3M0
from diloco.wire.formats import FORMATS, HEADER_BYTES
from diloco.wire.kernels.native import Native


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=20)
@given(vector=vectors(lengths=(1, 7, 8, 33, 257)))
def test_a_decoded_value_is_the_nearest_of_all_that_the_block_can_hold(name, vector):
    """Try all values that the block can hold: distances in float64 are exact."""
    block, decoded = 8, through(f"{name}:block=8", vector)
    if name in INTEGERS:
        table = np.arange(-reference.Q[name], reference.Q[name] + 1.0)
    else:
        magnitudes = reference.FORMATS[name].magnitudes
        table = np.concatenate([-magnitudes, magnitudes])
    scales = encode(f"{name}:block=8", vector).numpy()[HEADER_BYTES:].tobytes()
    for i, start in enumerate(range(0, len(vector), block)):
        x, y = vector[start : start + block].astype(np.float64), decoded[start : start + block].astype(np.float64)
        scale = np.frombuffer(scales, "<f4", i + 1)[i] if name in INTEGERS else 2.0 ** (scales[i] - 127)
        nearest = np.abs(table * float(scale) - x[:, None]).min(axis=1)
        # An integer's quotient and product are rounded to FP32, which may favour the other of two neighbours.
        slack = np.abs(x) * 2.0**-22 if name in INTEGERS else 0
        assert (np.abs(y - x) <= nearest + slack).all()


@pytest.mark.parametrize("name", SCALED_FLOATS)
@settings(max_examples=20)
@given(vector=vectors())
def test_a_decoded_vector_is_its_own_image(name, vector):
    once = through(name, vector)
    assert_same_bits(through(name, once), once)


@pytest.mark.parametrize("name", BLOCKS)
def test_stochastic_rounding_is_right_on_average_and_independent_on_replicas(name):
    num_samples = 2000
    vector = np.random.default_rng(0).uniform(-1, 1, 64).astype(f32)
    vector[[3, 40]] = 0, -0.0
    spec, delta = f"{name}:block=64,stochastic=true", np.tile(vector, num_samples)
    payloads = [encode(spec, delta, Key(1, 0, 1, replica)) for replica in (0, 1)]
    assert not torch.equal(*payloads)
    decoded = decode(spec, payloads[0], len(delta))
    assert_same_bits(decode(f"{name}:block=64", payloads[0], len(delta)), decoded)
    samples = decoded.reshape(num_samples, 64).astype(np.float64)
    error = np.abs(samples.mean(axis=0) - vector)
    standard_error = samples.std(axis=0) / num_samples**0.5
    # An element so near to a value that its neighbour was seldom drawn has no standard error to speak of.
    seldom = 10 * np.ptp(samples, axis=0).max() / num_samples
    assert (error <= 5 * standard_error + seldom).all()
    assert (samples.std(axis=0) > 0).sum() > 30  # it is rounded at random


class _Halved(E3M0):
    """E3M0 under its name, with halves of its values, and all codes negative."""

    def codes(self, unit_BxK):
        return super().codes(unit_BxK) | 8

    def values(self, device):
        return super().values(device) / 2


@dataclass(frozen=True)
class _Signs(blocks.BlockCodec):
    """One bit an element under the mean magnitude, which native.c does not have."""

    name, bits, scale_bytes = "signs", 1, 4

    def quantize(self, delta_BxK, largest_B, random_BxK):
        return delta_BxK.abs().mean(dim=1), (delta_BxK < 0).to(torch.uint8)

    def factors(self, scales):
        return scales.view(torch.float32)

    def values(self, device):
        return torch.tensor([1.0, -1.0], device=device)


def test_a_subclass_with_a_built_ins_name_computes_its_own_maths():
    delta, mine = torch.tensor([1.0, 0.5, 2.0, 4.0]), _Halved(block=4)
    assert mine.spec == codec("e3m0:block=4").spec
    assert torch.equal(mine.decode(mine.encode(delta), 4), -delta / 2)


@pytest.mark.parametrize("registered", [False, True])
def test_a_codec_without_a_c_function_uses_the_torch_reference(registered, monkeypatch):
    if registered:
        monkeypatch.setitem(FORMATS, "signs", blocks.BlockCodec)
    wire, delta = _Signs(block=8), torch.tensor([1.0, -3.0, -2.0, 4.0, 5.0, -6.0, 7.0, 8.0, 0.5, -0.5])
    payload = wire.encode(delta)
    assert payload.numel() == wire.payload_bytes(10) == HEADER_BYTES + 2 * 4 + 2
    means = torch.tensor([4.5] * 8 + [1 / 8] * 2)  # the last block is padded with zeros
    assert torch.equal(wire.decode(payload, 10), means * delta.sign())


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="native.c needs a C compiler")
@pytest.mark.parametrize("name", BLOCKS)
def test_every_built_in_codec_runs_in_c(name):
    wire = codec(name)
    payload = wire.encode(torch.ones(300))
    done = {"return_value": True}
    with patch.object(Native, "pack", **done) as pack, patch.object(Native, "unpack", **done) as unpack:
        wire.encode(torch.ones(300))
        wire.decode(payload, 300)
        assert pack.call_count == unpack.call_count == 1
        with implementation("torch"):
            wire.encode(torch.ones(300))
        assert pack.call_count == 1
