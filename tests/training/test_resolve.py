from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import CheckpointConfig, DilocoConfig, TrainConfig
from diloco.training.config.recipes import scaling_laws, tiny
from diloco.training.config.resolve import identity, resolve, shared_facts


def resolved(config: TrainConfig) -> TrainConfig:
    return resolve(config, vocab_size=257, prepared=Path("prepared"))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("streaming_overlapped_fp4", (1, "strided", 0.5, "e3m0")),
        ("streaming", (0, "strided", 0.0, "fp32")),
        ("diloco", (0, "whole", 0.0, "fp32")),
        ("data_parallel", (None, None, None, None)),
    ],
)
def test_a_method_fills_in_the_values_that_were_left_out(method, expected):
    diloco = resolved(replace(tiny(), method=method)).diloco
    assert (diloco.overlap_steps, diloco.fragments, diloco.mixing, diloco.wire) == expected


def test_values_that_were_given_stay():
    settings = DilocoConfig(sync_every=10, overlap_steps=7, mixing=0.25, wire="bf16")
    assert resolved(replace(tiny(), method="diloco", diloco=settings)).diloco == replace(
        settings, fragments="whole"
    )


def test_the_length_of_the_run_sets_warm_up_and_weight_decay():
    config = resolved(tiny())
    assert config.num_steps == 60
    assert (config.optimizer.warmup_steps, config.optimizer.weight_decay) == (6, 1 / 60)


@pytest.mark.parametrize(("every_steps", "expected"), [(20, 3), (5, 5), (1, 13), (0, 3)])
def test_left_out_as_many_checkpoints_are_kept_as_replicas_apart_need(every_steps, expected):
    assert (
        resolved(replace(tiny(), checkpoint=CheckpointConfig(every_steps=every_steps))).checkpoint.keep == expected
    )


@pytest.mark.parametrize(
    ("config", "sentence", "field"),
    [
        (
            replace(tiny(), model=DecoderConfig(num_layers=2, num_heads=2, width=8, vocab_size=100)),
            "model.vocab_size=100 is smaller than the tokenizer's 257",
            "model.vocab_size",
        ),
        (scaling_laws("35M"), "model.vocab_size=32768 is more than twice the tokenizer's 257", "model.vocab_size"),
        (
            replace(tiny(), optimizer=replace(tiny().optimizer, warmup_steps=60)),
            "optimizer.warmup_steps=60 leaves nothing of the run's 60 steps",
            "optimizer.warmup_steps",
        ),
        (
            replace(tiny(), optimizer=replace(tiny().optimizer, schedule="wsd", decay_fraction=0.95)),
            "optimizer.decay_fraction=0.95 of 60 steps begins before the warm-up of 6 steps has ended",
            "optimizer.decay_fraction",
        ),
        (
            replace(tiny(), diloco=replace(tiny().diloco, freeze=True, fragments="whole")),
            "diloco.freeze with diloco.fragments=whole",
            "diloco.freeze",
        ),
    ],
)
def test_contradictions_name_the_field(config, sentence, field):
    with pytest.raises(UserError, match=sentence) as error:
        resolved(config)
    assert error.value.field == field


def test_a_run_is_known_by_its_settings_and_not_by_its_name_or_place():
    config = tiny()
    assert not {"method", "diloco.wire", "name", "data.cache"} & identity(config).keys()
    assert identity(replace(config, diloco=replace(config.diloco, wire="int8")))["diloco.wire"] == "int8"
    data = replace(config.data, cache=Path("elsewhere"))
    same = replace(config, name="a", runs=Path("b"), recipe="c", timeout_seconds=5.0, data=data)
    assert identity(same) == identity(config)
    assert identity(replace(config, diloco=replace(config.diloco, wire="e3m0"))) == identity(config)
    for change in ({"seed": 1}, {"precision": "fp32"}, {"method": "streaming"}, {"num_tokens": 61440}):
        assert identity(replace(config, **change)) != identity(config)


def test_replicas_may_differ_in_where_they_compute_and_in_nothing_that_is_computed():
    config = tiny()
    assert shared_facts(replace(config, device="cpu", runs=Path("x"))) == shared_facts(config)
    for change in ({"seed": 1}, {"name": "x"}, {"diloco": replace(config.diloco, offload=True)}):
        assert shared_facts(replace(config, **change)) != shared_facts(config)
