import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from diloco.models.decoder import DecoderConfig
from diloco.training.config import (
    AdamWConfig,
    CheckpointConfig,
    DilocoConfig,
    EvaluationConfig,
    TrainConfig,
    resolve,
)
from diloco.training.loop import learning_rate
from diloco.training.recipes import RECIPES, scaling_laws, tiny
from diloco.training.runs import claim, claim_together, resumable, resume_config
from diloco.training.traits import differences, from_json, to_json
from diloco.training.world import alone


def resolved(config: TrainConfig) -> TrainConfig:
    return resolve(config, vocab_size=257, prepared=Path("prepared"))


@pytest.mark.parametrize(
    ("method", "expected"),
    [("streaming", (1, "strided", 0.5, "e3m0")), ("diloco", (0, "whole", 0.0, "fp32"))],
)
def test_a_method_fills_in_what_was_left_to_it(method, expected):
    diloco = resolved(replace(tiny(), method=method)).diloco
    assert (diloco.overlap_steps, diloco.fragments, diloco.mixing, diloco.wire) == expected


def test_what_was_asked_for_stays():
    asked = DilocoConfig(sync_every=10, overlap_steps=7, mixing=0.25, wire="bf16")
    assert resolved(replace(tiny(), method="diloco", diloco=asked)).diloco == replace(asked, fragments="whole")


def test_the_length_of_the_run_sets_warm_up_and_weight_decay():
    config = resolved(tiny())
    assert config.num_steps == 60
    assert (config.optimizer.warmup_steps, config.optimizer.weight_decay) == (6, 1 / 60)


def test_the_learning_rate_warms_up_to_the_peak_and_ends_at_five_percent():
    config = resolved(tiny())
    peak = config.optimizer.learning_rate
    rates = [learning_rate(config, step) for step in range(1, 61)]
    assert rates[:6] == pytest.approx([peak * step / 6 for step in range(1, 7)])
    assert rates[5 + 27] == pytest.approx(peak * (0.05 + 0.95 / 2))
    assert rates[-1] == pytest.approx(0.05 * peak)
    assert all(a > b for a, b in pairwise(rates[5:]))


def test_json_gives_the_config_back():
    config = replace(resolved(tiny()), diloco=DilocoConfig(sync_every=10, overlap_steps=(0, 3), offsets=(0, 1, 2)))
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config)))) == config


def test_an_unknown_field_is_an_error():
    values = to_json(tiny())
    values["optimizer"]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"unknown field optimizer\.momentum"):
        from_json(TrainConfig, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 3}, "global_batch=8 must be a multiple of num_replicas=3"),
        ({"num_tokens": 1000}, "num_tokens=1000 is no whole number of steps .*take 512 or 1024"),
        ({"num_tokens": 100}, "take 512 or more"),
        ({"micro_batch": 3}, "micro_batch=3 must divide a process's share of the batch, 4"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
        ({"timeout_seconds": 1e15}, "timeout_seconds must be above 0 and at most 1e7"),
        ({"method": "data_parallel", "checkpoint": CheckpointConfig(keep=2)}, "1 steps apart, so keep at least 3"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0"),
        ({"shards_per_replica": 0}, "num_shards must be at least 1, not 0"),
        ({"shards_per_replica": 3}, "global_batch=8 must be a multiple of num_replicas=2 · shards_per_replica=3"),
        ({"method": "data_parallel", "shards_per_replica": 2}, "shards_per_replica=2 with method=data_parallel"),
        ({"method": "data_parallel", "num_connections": 2}, "num_connections=2 means nothing to data_parallel"),
        ({"num_connections": 0}, "num_connections must be at least 1"),
        ({"checkpoint": CheckpointConfig(every_steps=5, keep=3)}, "11 steps apart, so keep at least 5"),
    ],
)
def test_contradictions_name_both_values(change, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny(), **change)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (AdamWConfig, {"learning_rate": 0.0}, r"optimizer.learning_rate must be above 0 and finite, not 0\.0"),
        (AdamWConfig, {"beta2": 1.0}, r"optimizer.beta2 must be at least 0 and below 1, not 1\.0"),
        (AdamWConfig, {"weight_decay": float("nan")}, r"optimizer.weight_decay must be at least 0 and finite"),
        (EvaluationConfig, {"batch": 0}, r"evaluation.batch must be at least 1, not 0"),
    ],
)
def test_a_field_out_of_its_range_is_named(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_one_replica_needs_no_spare_checkpoint():
    assert replace(tiny(), num_replicas=1, checkpoint=CheckpointConfig(every_steps=5, keep=1))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    small = replace(tiny(), model=DecoderConfig(num_layers=2, num_heads=2, width=8, vocab_size=100))
    with pytest.raises(ValueError, match="vocab_size=100 is smaller than the tokenizer's 257"):
        resolved(small)


def test_a_vocabulary_that_the_tokenizer_would_hardly_use_is_refused():
    with pytest.raises(ValueError, match="vocab_size=32768 is more than twice the tokenizer's 257"):
        resolved(scaling_laws("35M"))


def test_a_warm_up_that_never_ends_and_a_freeze_of_nothing_are_refused():
    with pytest.raises(ValueError, match="warmup_steps=60 leaves nothing of the run's 60 steps"):
        resolved(replace(tiny(), optimizer=replace(tiny().optimizer, warmup_steps=60)))
    with pytest.raises(ValueError, match=r"diloco.freeze with diloco.fragments=whole"):
        resolved(replace(tiny(), diloco=replace(tiny().diloco, freeze=True, fragments="whole")))


def test_every_recipe_is_a_run_that_can_be_resolved():
    for recipe in RECIPES.values():
        config = recipe()
        vocab_size = config.model.vocab_size or 257
        assert resolve(config, vocab_size=vocab_size, prepared=Path("p")).num_steps == config.num_steps > 0


def test_the_ladder_recipes_follow_the_published_power_laws():
    config = scaling_laws("35M", num_replicas=2)
    assert config.optimizer.learning_rate == pytest.approx(0.0059, rel=0.01)
    assert config.global_batch == 32
    assert config.num_tokens == pytest.approx(20 * 35_651_584, rel=1e-3)
    # 36.2 sequences are 12.1 of each of three replicas, 2^3.6
    assert scaling_laws("35M", num_replicas=3).global_batch == 3 * 16


def test_differences_name_nested_fields():
    one, other = tiny(), replace(tiny(), seed=1, diloco=replace(tiny().diloco, wire="bf16"))
    assert differences(one, other) == {"seed": (0, 1), "diloco.wire": (None, "bf16")}


@pytest.fixture
def run(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "index.json").write_text("{}")
    config = resolve(replace(tiny(), name="r", runs=tmp_path), vocab_size=257, prepared=prepared)
    claim(config)
    return config


@pytest.mark.parametrize(
    ("offsets", "first_sync", "expected"),
    [(None, "full_period", 11), ((3, 7), "full_period", 14), ((3, 7), "early", 11)],
)
def test_replicas_may_be_as_far_apart_as_the_first_sync_lets_them(offsets, first_sync, expected):
    diloco = replace(tiny().diloco, offsets=offsets, first_sync=first_sync)
    assert replace(tiny(), diloco=diloco).steps_apart == expected


@pytest.mark.parametrize(("every_steps", "expected"), [(20, 3), (5, 5), (1, 13), (0, 3)])
def test_left_out_as_many_checkpoints_are_kept_as_replicas_apart_need(every_steps, expected, tmp_path):
    asked = replace(tiny(), checkpoint=CheckpointConfig(every_steps=every_steps))
    assert resolve(asked, vocab_size=257, prepared=tmp_path).checkpoint.keep == expected


def test_a_resume_takes_the_runs_own_config(run):
    assert resume_config(run.directory, resumable(run.directory)) == run


def test_a_resume_may_change_what_does_not_change_the_run(run):
    saved = resumable(run.directory)
    asked = replace(saved, timeout_seconds=5.0, checkpoint=replace(saved.checkpoint, keep=9))
    found = resume_config(run.directory, asked)
    assert (found.timeout_seconds, found.checkpoint.keep) == (5.0, 9)
    unsaid = replace(saved, model=replace(saved.model, vocab_size=0))
    assert resume_config(run.directory, unsaid) == run
    often = replace(saved, checkpoint=replace(saved.checkpoint, every_steps=1))
    assert resume_config(run.directory, often).checkpoint.keep == 13


@pytest.mark.parametrize(("num_shards", "micro_batch"), [(2, 2), (4, 1), (1, 2)])
def test_a_resume_on_other_shards_takes_micro_batches_that_divide_their_share(tmp_path, num_shards, micro_batch):
    """A replica's 12 sequences, in passes of 4 at the most, over two shards before."""
    (tmp_path / "index.json").write_text("{}")
    asked = replace(
        tiny(), name="r", runs=tmp_path, global_batch=24, num_tokens=24 * 64, shards_per_replica=2, micro_batch=2
    )
    claim(resolve(asked, vocab_size=257, prepared=tmp_path))
    found = resume_config(asked.directory, replace(resumable(asked.directory), shards_per_replica=num_shards))
    assert (found.num_shards, found.micro_batch) == (num_shards, micro_batch)


def test_a_resume_that_would_be_another_run_is_refused(run):
    with pytest.raises(ValueError, match=r"started with seed=0, and now 3 is asked for"):
        resume_config(run.directory, replace(resumable(run.directory), seed=3))


def test_a_resume_may_take_smaller_passes(run):
    saved = resumable(run.directory)
    assert resume_config(run.directory, replace(saved, micro_batch=2)).micro_batch == 2
    smaller = replace(saved, evaluation=replace(saved.evaluation, batch=1))
    assert resume_config(run.directory, smaller).evaluation.batch == 1


def test_a_resume_without_its_data_names_the_flag(run):
    (run.data.prepared / "index.json").unlink()
    with pytest.raises(ValueError, match=r"the data of run r is no longer in .*prepared: .* by --data.prepared"):
        resume_config(run.directory, resumable(run.directory))


@pytest.mark.parametrize("name", ["r", "seeds/r"])
def test_a_claimed_directory_is_the_runs_own_whatever_its_name(tmp_path, name):
    (tmp_path / "index.json").write_text("{}")
    config = resolve(replace(tiny(), num_replicas=1, name=name, runs=tmp_path), vocab_size=257, prepared=tmp_path)
    claim_together(config, alone(config))
    with pytest.raises(ValueError, match="already holds a run"):
        claim_together(config, alone(config))


def test_a_directory_is_claimed_once(run):
    with pytest.raises(ValueError, match="already holds a run: choose another --name"):
        claim(run)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        resumable(tmp_path)
