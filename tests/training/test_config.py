from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.training.config.config import (
    AdamWConfig,
    CheckpointConfig,
    DilocoConfig,
    ElasticConfig,
    EvaluationConfig,
)
from diloco.training.config.recipes import tiny


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 3}, "global_batch=8 must be a multiple of num_replicas=3"),
        ({"micro_batch": 3}, "micro_batch=3 must divide a process's share of the batch, 4"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
        ({"timeout_seconds": 1e15}, "timeout_seconds must be above 0 and at most 1e7"),
        ({"method": "data_parallel", "checkpoint": CheckpointConfig(keep=2)}, "1 steps apart, so keep at least 3"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0"),
        ({"shards_per_replica": 0}, "shards_per_replica must be at least 1, not 0"),
        ({"shards_per_replica": 3}, "global_batch=8 must be a multiple of num_replicas=2 · shards_per_replica=3"),
        ({"method": "data_parallel", "ddp_per_replica": 2}, "ddp_per_replica=2 with method=data_parallel"),
        ({"method": "data_parallel", "num_connections": 2}, "num_connections=2 means nothing to data_parallel"),
        ({"num_connections": 0}, "num_connections must be at least 1"),
        (
            {"rendezvous": "run", "ddp_per_replica": 2},
            "ddp_per_replica=2 with rendezvous=run: take shards_per_replica",
        ),
        (
            {"rendezvous": "run", "replica_batch": 3, "shards_per_replica": 2},
            "replica_batch=3 must be a multiple of shards_per_replica=2",
        ),
        ({"checkpoint": CheckpointConfig(every_steps=-1)}, "checkpoint.every_steps must be at least 0, not -1"),
        ({"checkpoint": CheckpointConfig(keep=0)}, "checkpoint.keep must be at least 1, not 0"),
        ({"checkpoint": CheckpointConfig(every_steps=5, keep=3)}, "11 steps apart, so keep at least 5"),
    ],
)
def test_contradictions_name_both_values_and_the_field(change, message):
    with pytest.raises(UserError, match=message) as error:
        replace(tiny(), **change)
    assert error.value.field is not None and error.value.field in str(error.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (AdamWConfig, {"learning_rate": 0.0}, r"optimizer.learning_rate must be above 0 and finite, not 0\.0"),
        (AdamWConfig, {"beta2": 1.0}, r"optimizer.beta2 must be at least 0 and below 1, not 1\.0"),
        (AdamWConfig, {"weight_decay": float("nan")}, r"optimizer.weight_decay must be at least 0 and finite"),
        (DilocoConfig, {"outer_learning_rate": 0.0}, r"diloco.outer_learning_rate must be above 0 and finite"),
        (DilocoConfig, {"mixing": 1.0}, r"diloco.mixing must be at least 0 and below 1, not 1\.0"),
        (DilocoConfig, {"mixing": -0.1}, r"diloco.mixing must be at least 0 and below 1, not -0\.1"),
        (DilocoConfig, {"outer_momentum": 1.0}, r"diloco.outer_momentum must be at least 0 and below 1, not 1\.0"),
        (EvaluationConfig, {"batch": 0}, r"evaluation.batch must be at least 1, not 0"),
        (ElasticConfig, {"num_slots": 0}, r"elastic.num_slots must be at least 1 and below 2\^16, not 0"),
        (ElasticConfig, {"max_local_steps": 0}, r"elastic.max_local_steps must be at least 1 and below 2\^31"),
        (ElasticConfig, {"max_stale": -1}, r"elastic.max_stale must be at least 0 and below 2\^31, not -1"),
    ],
)
def test_a_field_out_of_its_range_is_named(kind, fields, message):
    with pytest.raises(UserError, match=message) as error:
        kind(**fields)
    assert error.value.field == message.split()[0]


@pytest.mark.parametrize(("num_tokens", "choice"), [(1000, "512 or 1024"), (100, "512 or more")])
def test_a_budget_of_broken_steps_is_never_rounded_here(num_tokens, choice):
    with pytest.raises(UserError, match=rf"num_tokens={num_tokens} is no whole number of steps .*take {choice}"):
        _ = replace(tiny(), num_tokens=num_tokens).num_steps
    assert replace(tiny(), num_tokens=1024).num_steps == 2


def test_one_replica_needs_no_spare_checkpoint():
    assert replace(tiny(), num_replicas=1, checkpoint=CheckpointConfig(every_steps=5, keep=1))


@pytest.mark.parametrize(
    ("offsets", "first_sync", "expected"),
    [(None, "full_period", 11), ((3, 7), "full_period", 14), ((3, 7), "early", 11)],
)
def test_replicas_may_be_as_far_apart_as_the_first_sync_lets_them(offsets, first_sync, expected):
    diloco = replace(tiny().diloco, offsets=offsets, first_sync=first_sync)
    assert replace(tiny(), diloco=diloco).steps_apart == expected
