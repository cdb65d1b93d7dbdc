import time

import torch

from diloco.measure.timing import shortest_seconds, torch_threads


def test_the_shortest_run_counts():
    durations = iter([0.2, 0.02, *[0.05] * 20])
    seconds = shortest_seconds(lambda: time.sleep(next(durations)), torch.device("cpu"))
    assert 0.02 <= seconds < 0.05


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
