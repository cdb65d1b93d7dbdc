from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.training.config.config import EvaluationConfig, TrainConfig
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import resolve

HUGE = 1 << 40


def with_model(**sizes: int) -> TrainConfig:
    return replace(tiny(), model=replace(tiny().model, **sizes))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (with_model(width=HUGE), ("model.width", "model.vocab_size", "model.num_layers")),
        (with_model(num_layers=HUGE), ("model.num_layers", "model.vocab_size", "model.width")),
        (replace(tiny(), sequence_length=HUGE, num_tokens=8 * HUGE), ("sequence_length", "model.vocab_size")),
        (replace(tiny(), global_batch=HUGE, num_tokens=64 * HUGE), ("global_batch", "sequence_length")),
        (replace(tiny(), evaluation=EvaluationConfig(batch=HUGE)), ("evaluation.batch", "model.vocab_size")),
    ],
)
def test_sizes_beyond_the_memory_are_refused_with_fields_and_bytes(config, fields):
    with pytest.raises(
        UserError, match=r"alone take [\d,]+ bytes, and no machine has more than [\d,]+"
    ) as refusal:
        resolve(config, vocab_size=257, prepared=Path())
    assert refusal.value.fields[: len(fields)] == fields


def test_sizes_that_fit_are_taken():
    assert resolve(tiny(), vocab_size=257, prepared=Path()).model.vocab_size == 257


@pytest.mark.parametrize("field", ["num_replicas", "shards_per_replica", "ddp_per_replica", "num_connections"])
def test_numbers_of_processes_and_connections_are_bounded(field):
    with pytest.raises(UserError, match=rf"{field} must be at most 65536, not {HUGE}"):
        replace(tiny(), **{field: HUGE})
