import json
import time
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from tests.processes import run_replicas

import diloco
from diloco import measure
from diloco.cli.main import main
from diloco.exchange.transport import Transport
from diloco.measure.measure import demo_gradient, load_gradient, measure_link, measure_wire
from diloco.wire import CODECS, codec


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_bits_and_error_are_those_of_the_codec_and_speeds_are_positive():
    gradient = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 1e-4
    found = {m.wire: m for m in measure_wire(gradient_N=gradient, num_values=10_000)}
    assert list(found) == [codec(name).spec for name in CODECS]
    for spec, measured in found.items():
        wire = codec(spec)
        assert measured.bits_per_value == 8 * wire.payload_bytes(10_000) / 10_000
        error = wire.decode(wire.encode(gradient), 3000) - gradient
        assert measured.relative_error == pytest.approx((error.norm() / gradient.norm()).item())
        assert [speed.num_threads for speed in measured.speeds] == sorted({1, torch.get_num_threads()})
        for speed in measured.speeds:
            assert min(speed.copy_gbyte_s, speed.encode_gbyte_s, speed.decode_add_gbyte_s) > 0


def test_a_gradient_is_read_from_a_file(tmp_path, capsys):
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "gradient.safetensors")
    assert torch.equal(load_gradient(tmp_path / "gradient.safetensors"), torch.tensor([0.0] * 4 + [1.0] * 6))
    command = ["bench", "wire", "--values", "1000", "--gradient", str(tmp_path / "gradient.safetensors")]
    main([*command, "--wires", "e3m0", "int2:block=64", "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert first["wire"] == "e3m0:block=256,stochastic=false" and first["relative_error"] == 0
    assert second["bits_per_value"] == pytest.approx(8 * (16 + 4 * 16 + 250) / 1000)
    main([*command, "--wires", "bf16"])
    assert "bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wires", "fp8"], "'fp8' is not a wire format"),
        (["--gradient", "nowhere.safetensors"], "nowhere.safetensors is no safetensors file"),
        (["--gradient", "README.md"], "README.md is no safetensors file"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, message, capsys, tmp_path):
    if "--gradient" not in arguments:
        save_file({"a": torch.ones(3)}, tmp_path / "gradient.safetensors")
        arguments += ["--gradient", str(tmp_path / "gradient.safetensors")]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "wire", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_demo_gradient_is_a_real_one():
    gradient = demo_gradient()
    assert gradient.dtype == torch.float32 and gradient.numel() == 1_214_976
    assert torch.isfinite(gradient).all() and 1e-5 < gradient.abs().mean() < 1e-1


class SlowLinks:
    """Exchanges among M replicas, of which nothing takes time but the payloads, on a link of so many Gbit/s."""

    replica = 0

    def __init__(self, num_replicas, gbit_s, latency_seconds):
        self.num_replicas, self._gbit_s, self._latency_seconds = num_replicas, gbit_s, latency_seconds

    def start(self, payloads, *_):
        num_bytes = sum(payload.numel() for payload in payloads.values())
        self._seconds = self._latency_seconds + 8e-9 * num_bytes / self._gbit_s
        self._payloads = payloads
        return self

    def wait(self):
        time.sleep(self._seconds)
        return self._payloads


@pytest.mark.parametrize(("num_replicas", "gbit_s"), [(2, 0.05), (3, 0.05), (5, 0.2)])
def test_a_link_is_measured_in_bits_that_a_replica_sends(num_replicas, gbit_s, monkeypatch):
    monkeypatch.setattr(measure, "share", lambda exchange, value: [value] * exchange.num_replicas)
    exchange = cast("Transport", SlowLinks(num_replicas, gbit_s, 0.02))
    found, latency = measure_link(exchange, seconds=0.2)
    assert latency == pytest.approx(0.02, rel=0.2)
    assert found == pytest.approx(gbit_s, rel=0.2)


def links() -> tuple[float, float]:
    return measure_link(diloco.ProcessGroupExchange(timeout_seconds=20), seconds=0.05)


def test_a_link_is_measured_from_both_ends():
    (first, latency), (second, _) = run_replicas(links, 2)
    assert 0.05 < first < 1000 and 0.2 < first / second < 5
    assert 0 < latency < 0.2
