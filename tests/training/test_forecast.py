"""The forecast of a run, against what the run then was."""

from dataclasses import replace

import pytest
from tests.training.runs import summary

from diloco.training.config.forecast import forecast
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import resolve
from diloco.training.records.runs import read_config


def test_the_bytes_are_those_that_the_run_sent(finished_run):
    result, was = forecast(read_config(finished_run)), summary(finished_run)
    assert result.num_params == was["num_params"]
    assert result.bytes_sent == was["bytes_sent_per_replica"]
    assert result.data_parallel_bytes == was["data_parallel_bytes_per_replica"]


@pytest.mark.parametrize(("method", "num_copies"), [("streaming", 6), ("data_parallel", 4)])
def test_memory_counts_a_copy_for_parameters_gradients_moments_and_outer_state(tmp_path, method, num_copies):
    config = resolve(replace(tiny(), method=method), vocab_size=257, prepared=tmp_path)
    result = forecast(config)
    assert result.state_bytes == num_copies * 4 * result.num_params
    assert result.logits_bytes == 2 * 2 * 4 * 64 * 257
    assert forecast(replace(config, precision="fp32")).logits_bytes == 2 * 4 * 4 * 64 * 257
    assert (result.schedule is None) == (method == "data_parallel")


def test_data_parallel_sends_at_every_step(tmp_path):
    config = resolve(replace(tiny(), method="data_parallel"), vocab_size=257, prepared=tmp_path)
    result = forecast(config)
    assert result.bytes_sent == result.data_parallel_bytes == 60 * result.sync_bytes[0]
