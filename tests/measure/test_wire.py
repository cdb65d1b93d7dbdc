import pytest
import torch

from diloco.errors import UserError
from diloco.measure.wire import measure_wire
from diloco.wire import CODECS, codec


def test_bits_and_error_are_those_of_the_codec_and_speeds_are_positive():
    gradient_N = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 1e-4
    measurements = {one.wire: one for one in measure_wire(gradient_N=gradient_N, num_values=10_000)}
    assert list(measurements) == [codec(name).spec for name in CODECS]
    for spec, measured in measurements.items():
        wire = codec(spec)
        assert measured.bits_per_value == 8 * wire.payload_bytes(10_000) / 10_000
        error_N = wire.decode(wire.encode(gradient_N), 3000) - gradient_N
        assert measured.relative_error == pytest.approx((error_N.norm() / gradient_N.norm()).item())
        assert [speed.num_threads for speed in measured.speeds] == sorted({1, torch.get_num_threads()})
        for speed in measured.speeds:
            assert min(speed.copy_gbyte_s, speed.encode_gbyte_s, speed.decode_add_gbyte_s) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"specs": ["fp8"]}, "'fp8' is not a codec"),
        ({"num_values": 0}, "num_values must be at least 1, not 0"),
        ({"gradient_N": torch.zeros(3)}, "the gradient holds nothing but zeros"),
    ],
)
def test_impossible_measurements_are_refused(changes, message):
    arguments = {"specs": ["fp32"], "gradient_N": torch.ones(3), "num_values": 10, **changes}
    with pytest.raises(UserError, match=message):
        list(measure_wire(arguments.pop("specs"), **arguments))
