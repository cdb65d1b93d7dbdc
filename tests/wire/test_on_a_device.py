"""The codecs on a device for which the host does not wait; see tests/fake_device.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_device import FakeDevice
from tests.processes import run_replicas
from tests.wire.cases import NAMES, SPARSE_SPECS, STOCHASTIC_SPECS, sealed

from diloco.errors import PayloadError
from diloco.wire import Key, codec
from diloco.wire.formats import HEADER_BYTES


def without_a_wait(specs: list[str]) -> list[str]:
    """The codecs for which the host had to read something, or that gave other bits than the CPU."""
    wrong = []
    delta = torch.randn(700, generator=torch.Generator().manual_seed(0))
    key = Key(3, 1, 2, 1)
    with FakeDevice() as device:
        for spec in specs:
            wire = codec(spec)
            expected = wire.encode(delta, key, base=5)
            total = torch.linspace(-1, 1, 700)
            delta_N, total_N = device.wrapped(delta.clone()), device.wrapped(total.clone())
            device.clear()
            payload, is_finite = wire.packed(delta_N, key)
            wire.decode_into(total_N, expected, key, add=True)
            assert payload.device == is_finite.device == device.device and device.launches
            if device.host_reads:
                wrong.append(f"{spec} reads {device.host_reads}")
            assert len(device.to_device) == 1, f"{spec} copies more than the payload to the device"
            host = wire.seal(payload.cpu(), 700, base=5)
            mine, theirs = total_N.inner, wire.decode_into(total, expected, key, add=True)
            if not (torch.equal(host, expected) and torch.equal(mine, theirs) and is_finite):
                wrong.append(f"{spec} has other bits")
            for value in (float("nan"), float("-inf")):
                delta_N.inner[300] = value
                assert not wire.packed(delta_N, key)[1], spec
                delta_N.inner.copy_(delta)
        assert not device.races
    return wrong


@pytest.mark.slow
def test_every_codec_encodes_and_decodes_without_a_wait_and_with_the_bits_of_a_cpu():
    assert run_replicas(without_a_wait, 1, [*NAMES, *STOCHASTIC_SPECS, *SPARSE_SPECS]) == [[]]


@pytest.mark.parametrize("spec", [*NAMES, "topk:density=0.3,values=int4", "dare:density=0.3,values=e4m3"])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), length=st.sampled_from([0, 1, 31, 257, 640]), zeros=st.floats(0, 1))
def test_a_body_is_judged_without_being_decoded_as_when_it_is(spec, seed, length, zeros):
    wire, generator = codec(spec), torch.Generator().manual_seed(seed)
    payload = wire.encode(torch.randn(length, generator=generator))
    body = payload[HEADER_BYTES:]
    damage = torch.randint(0, 256, body.shape, generator=generator)
    body.copy_(torch.where(torch.rand(body.shape, generator=generator) < zeros**4, damage, body))
    try:
        wire.decode(sealed(payload), length)
        is_sound = True
    except PayloadError:
        is_sound = False
    assert bool(wire.is_sound(body.clone(), length, Key())) == is_sound
