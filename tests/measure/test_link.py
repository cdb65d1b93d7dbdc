from types import SimpleNamespace
from typing import cast

import pytest
from tests.processes import run_replicas

import diloco
from diloco.exchange.transport import Transport
from diloco.measure import link
from diloco.measure.link import measure_link


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
    monkeypatch.setattr(link, "share", lambda exchange, value, kind=None: [value] * exchange.num_replicas)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: links.now))
    measured_gbit_s, latency_seconds = measure_link(cast("Transport", links))
    assert latency_seconds == pytest.approx(0.01, rel=1e-3)
    assert measured_gbit_s == pytest.approx(gbit_s, rel=1e-3)


def both_ends() -> tuple[float, float]:
    return measure_link(diloco.ProcessGroupExchange(timeout_seconds=20), seconds=0.05)


def test_both_ends_measure_the_same_link():
    (first, latency_seconds), (second, _) = run_replicas(both_ends, 2)
    assert 0.05 < first < 1000 and 0.2 < first / second < 5
    assert 0 < latency_seconds < 0.2
