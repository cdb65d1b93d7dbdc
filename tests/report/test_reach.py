"""The size and the time that would make a model speak, beside values that were computed by hand."""

from dataclasses import replace

import pytest

from diloco.models.decoder_config import DecoderConfig
from diloco.report.reach import FINDINGS, reach, training_seconds
from diloco.training.config.recipes import recipe


def test_times_are_six_operations_for_each_of_twenty_tokens_per_parameter():
    # 10M parameters, 200M tokens: 6 · 1e7 · 2e8 = 1.2e16 operations; at 0.1 TFLOP/s 1.2e5 s.
    assert training_seconds(10e6, 0.1e12) == pytest.approx(1.2e5)
    # 1.5B parameters, 30B tokens: 6 · 1.5e9 · 3e10 = 2.7e20; at 66 TFLOP/s 4.09e6 s, 47 days.
    assert training_seconds(1.5e9, 66e12) / 86_400 == pytest.approx(47.35, abs=0.01)


def laptop():
    config = recipe("laptop")
    return replace(config, model=replace(config.model, vocab_size=257))


def test_a_laptops_run_is_told_its_own_pace_and_a_gpus():
    config = laptop()
    # 12·6·128² + 257·128 and 2,432 gains; · 6 · 20,000 tokens/s = 0.1458 TFLOP/s: 10M take 22.9 hours.
    assert config.model.num_params == 1_212_544 + 2_432
    far = reach(config, num_tokens=2_867_200, tokens_per_second=20_000)
    assert far is not None and far.this.startswith("This model has 1.21M parameters and has read 2.87M tokens.")
    assert far.table.columns == ["parameters", "time here", "time, RTX 4090", "writes"]
    assert [row[:3] for row in far.table.rows] == [
        ["10M", "23 hours", "3 minutes"],
        ["125M", "149 days", "8 hours"],
        ["1.5B", "59 years", "47 days"],
    ]
    assert "0.15 TFLOP/s" in far.about and "66 TFLOP/s, 40% of its peak, which is assumed" in far.about


def test_a_run_without_a_pace_is_told_the_gpus_alone():
    far = reach(laptop(), num_tokens=0, tokens_per_second=None)
    assert far is not None and far.table.columns == ["parameters", "time, RTX 4090", "writes"]
    assert "this run reached" not in far.about


def test_a_large_model_is_told_nothing():
    config = laptop()
    large = replace(config, model=DecoderConfig(num_layers=24, num_heads=16, width=2560, vocab_size=32_000))
    assert large.model.num_matrix_params > FINDINGS[-1].num_params
    assert reach(large, num_tokens=1, tokens_per_second=1.0) is None
