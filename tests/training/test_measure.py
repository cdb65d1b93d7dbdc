from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from diloco.exchange.transport import Transport
from diloco.training import measure
from diloco.training.config.recipes import recipe
from diloco.training.measure import (
    demo_gradient,
    load_gradient,
    measurable,
    measure_link,
    measure_wire,
    shortest_seconds,
    torch_threads,
)
from diloco.wire import CODECS, codec


def test_a_run_is_resolved_without_data():
    tiny = recipe("tiny")
    config = measurable(replace(tiny, data=replace(tiny.data, tokenizer="bpe:1000")))
    assert config.model.vocab_size == 1000 and config.micro_batch == config.process_batch
    assert measurable(tiny).model.vocab_size == 257


class SlowLinks:
    """Exchanges among M replicas, with a clock that payloads on a link of a given speed advance, and one stall."""

    replica = 0

    def __init__(self, num_replicas, gbit_s, latency_seconds):
        self.num_replicas, self._gbit_s, self._latency_seconds = num_replicas, gbit_s, latency_seconds
        self.now, self._stall_seconds = 0.0, 1.0

    def start(self, payloads, *_):
        num_bytes = sum(payload.numel() for payload in payloads.values())
        self._seconds = self._latency_seconds + 8e-9 * num_bytes / self._gbit_s
        return self

    def wait(self):
        self.now += self._seconds + self._stall_seconds
        self._stall_seconds = 0.0


@pytest.mark.parametrize(("num_replicas", "gbit_s"), [(2, 0.05), (5, 0.2), (2, 400.0)])
def test_bandwidth_counts_the_bits_that_a_replica_sends(num_replicas, gbit_s, monkeypatch):
    links = SlowLinks(num_replicas, gbit_s, 0.01)
    monkeypatch.setattr(measure, "share", lambda exchange, value, kind=None: [value] * exchange.num_replicas)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: links.now))
    measured_gbit_s, latency_seconds = measure_link(cast("Transport", links))
    assert latency_seconds == pytest.approx(0.01, rel=1e-3)
    assert measured_gbit_s == pytest.approx(gbit_s, rel=1e-3)


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


def test_a_gradient_is_read_from_a_file_in_the_order_of_its_names(tmp_path):
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "gradient.safetensors")
    assert torch.equal(load_gradient(tmp_path / "gradient.safetensors"), torch.tensor([0.0] * 4 + [1.0] * 6))


@pytest.mark.slow
def test_the_demo_gradient_is_that_of_a_trained_model():
    gradient_N = demo_gradient("tiny")
    assert gradient_N.dtype == torch.float32 and gradient_N.ndim == 1
    assert torch.isfinite(gradient_N).all() and 1e-5 < gradient_N.abs().mean() < 1e-1
    assert (gradient_N != 0).float().mean() > 0.7  # AdamW moves every parameter that a batch uses


def test_the_shortest_run_counts(monkeypatch):
    ends = iter([0.0, 0.2, 0.2, 0.22, 0.22, 0.27, 0.27, 0.6])
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    assert abs(shortest_seconds(lambda: None, torch.device("cpu")) - 0.02) < 1e-9


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
