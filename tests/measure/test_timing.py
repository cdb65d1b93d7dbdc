from types import SimpleNamespace

import torch

from diloco.measure import timing
from diloco.measure.timing import shortest_seconds, torch_threads


def test_the_shortest_run_counts(monkeypatch):
    ends = iter([0.0, 0.2, 0.2, 0.22, 0.22, 0.27, 0.27, 0.6])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    assert abs(shortest_seconds(lambda: None, torch.device("cpu")) - 0.02) < 1e-9


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
