"""The refusals of settings before anything is started: a table of calls, and a part of the sentence of each."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.training.cases import resolved

from diloco.errors import UserError
from diloco.schema import flat
from diloco.training.config.config import (
    CheckpointConfig,
    DilocoConfig,
    ElasticConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
    from_json,
    to_json,
)
from diloco.training.config.forecast import fitted
from diloco.training.config.recipes import recipe, scaling_laws, tiny
from diloco.training.config.resolve import Budget, epochs, parse_tokens, read_config_file, with_budget
from diloco.training.measure import load_gradient, measurable, measure_wire

HUGE = 1 << 40
FIELDS = flat(to_json(tiny()))
"""By dotted name: a refusal of a field says so to the command line, too, which spells its flag."""


def with_model(**sizes: int) -> dict[str, Any]:
    return {"model": replace(tiny().model, **sizes)}


def with_optimizer(**values: Any) -> dict[str, Any]:
    return {"optimizer": replace(tiny().optimizer, **values)}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_replicas": 3}, "global_batch=8 must be a multiple of num_replicas=3"),
    ({"micro_batch": 3}, "micro_batch=3 must divide a process's share of the batch, 4"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
    ({"timeout_seconds": 1e15}, "timeout_seconds must be above 0 and at most 1e7"),
    ({"method": "data_parallel", "checkpoint": CheckpointConfig(keep=2)}, "1 steps apart, so keep at least 3"),
    (
        {"optimizer": OptimizerConfig(name="schedule_free"), "precision": "bf16-params"},
        "optimizer.name=schedule_free with precision=bf16-params",
    ),
    ({"num_replicas": 0}, "num_replicas must be at least 1, not 0"),
    ({"shards_per_replica": 0}, "shards_per_replica must be at least 1, not 0"),
    ({"shards_per_replica": 3}, "global_batch=8 must be a multiple of num_replicas=2 · shards_per_replica=3"),
    (
        {"shards_per_replica": 8, "tensor_parallel": 2, "global_batch": 6, "micro_batch": None},
        "global_batch=6 must be a multiple of num_replicas=2 · shards_per_replica=8 / tensor_parallel=2:",
    ),
    (
        {"shards_per_replica": 2, "tensor_parallel": 4},
        "shards_per_replica=2 must be a multiple of tensor_parallel=4: it counts all processes",
    ),
    (
        {"shards_per_replica": 3, "tensor_parallel": 3},
        "tensor_parallel=3 must divide model.num_heads=2: each process has whole heads",
    ),
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
    *(
        ({name: HUGE}, f"{name} must be at most 65536, not {HUGE}")
        for name in ("num_replicas", "shards_per_replica", "tensor_parallel", "ddp_per_replica", "num_connections")
    ),
]
SECTIONS: list[tuple[type, dict[str, Any], str]] = [
    (OptimizerConfig, {"learning_rate": 0.0}, "optimizer.learning_rate must be above 0 and finite, not 0.0"),
    (OptimizerConfig, {"beta2": 1.0}, "optimizer.beta2 must be at least 0 and below 1, not 1.0"),
    (OptimizerConfig, {"weight_decay": math.nan}, "optimizer.weight_decay must be at least 0 and finite"),
    (
        OptimizerConfig,
        {"ns_steps": 0, "name": "muon"},
        "optimizer.ns_steps must be at least 1 and below 100, not 0",
    ),
    (
        OptimizerConfig,
        {"momentum": 0.5},
        "optimizer.momentum=0.5 means nothing to optimizer.name=adamw: leave it out, or take muon or sgd",
    ),
    (
        OptimizerConfig,
        {"schedule": "wsd", "name": "schedule_free"},
        "optimizer.schedule=wsd means nothing to optimizer.name=schedule_free",
    ),
    (DilocoConfig, {"outer_learning_rate": 0.0}, "diloco.outer_learning_rate must be above 0 and finite"),
    (DilocoConfig, {"mixing": 1.0}, "diloco.mixing must be at least 0 and below 1, not 1.0"),
    (DilocoConfig, {"mixing": -0.1}, "diloco.mixing must be at least 0 and below 1, not -0.1"),
    (DilocoConfig, {"outer_momentum": 1.0}, "diloco.outer_momentum must be at least 0 and below 1, not 1.0"),
    (EvaluationConfig, {"batch": 0}, "evaluation.batch must be at least 1, not 0"),
    (ElasticConfig, {"num_slots": 0}, "elastic.num_slots must be at least 1 and below 2^16, not 0"),
    (ElasticConfig, {"max_local_steps": 0}, "elastic.max_local_steps must be at least 1 and below 2^31"),
    (ElasticConfig, {"max_stale": -1}, "elastic.max_stale must be at least 0 and below 2^31, not -1"),
]
RESOLVED: list[tuple[TrainConfig, str]] = [
    (replace(tiny(), **with_model(vocab_size=100)), "model.vocab_size=100 is smaller than the tokenizer's 257"),
    (scaling_laws("35M"), "model.vocab_size=32768 is more than twice the tokenizer's 257"),
    (
        replace(tiny(), **with_optimizer(warmup_steps=60)),
        "optimizer.warmup_steps=60 leaves nothing of the run's 60 steps",
    ),
    (
        replace(tiny(), **with_optimizer(schedule="wsd", decay_fraction=0.95)),
        "optimizer.decay_fraction=0.95 of 60 steps begins before the warm-up of 6 steps has ended",
    ),
    (
        replace(tiny(), diloco=replace(tiny().diloco, freeze=True, fragments="whole")),
        "diloco.freeze with diloco.fragments=whole",
    ),
    (replace(tiny(), num_tokens=1000), "is no whole number of steps of global_batch·sequence_length=512"),
    (replace(tiny(), num_tokens=100), "512 tokens: take 512 or more"),
]
JSON: list[tuple[dict[str, Any], str]] = [
    ({"num_replicas": "two"}, "num_replicas: expected int, got str"),
    ({"diloco": {"fragments": "foo"}}, "diloco.fragments: invalid enum value 'foo'"),
    ({"model": 3}, "it has no object as model"),
    ({"model": {"num_layers": 1}}, "model: object missing required field width"),
    ({"model": {"family": "nowhere.Config"}}, "model.family='nowhere.Config' is not known here"),
    ({"model": {"family": []}}, "model.family='[]' is not known here"),
    ({"diloco": {"overlap_steps": [1, "x"]}}, "diloco.overlap_steps[1]: expected int, got str"),
    ({"compile": 1}, "compile: expected bool, got int"),
    ({"runs": 3}, "runs: expected a path, got 3"),
    ({"optimizer": {"moment": 0.5}}, "unknown field optimizer.moment"),
]
FILES = [
    ("run.toml", "seed = ", "run.toml can't be read: "),
    ("run.toml", "[diloco]\nsync_evry = 3", "there is no field diloco.sync_evry: did you mean sync_every?"),
    ("run.toml", "sync_every = 3", "there is no field sync_every: did you mean diloco.sync_every?"),
    ("run.toml", "every_steps = 3", "did you mean checkpoint.every_steps or evaluation.every_steps?"),
    ("run.toml", "[diloco]\nseed = 3", "there is no field diloco.seed: did you mean seed?"),
    ("run.toml", 'recipe = "tini"', "there is no recipe 'tini': did you mean tiny?"),
    ("run.toml", 'recipe = "laptop"', "changes the recipe laptop, not tiny"),
    ("run.toml", "diloco = 3", "diloco is a section"),
    ("run.toml", "[seed]\nx = 1", "seed is no section"),
    ("run.toml", "num_tokens = '1MB'", "num_tokens=1MB is no number of tokens"),
    ("run.toml", "num_tokens = 9\nepochs = 3", "leave one of them out"),
    ("run.toml", "epochs = 'x'", "epochs='x' is no number"),
    ("run.toml", 'recipe = ["tiny"]', "there is no recipe \"['tiny']\""),
    ("run.toml", "seed = 3\n" * (1 << 17), "run.toml can't be read: it has more than 1,048,576 bytes"),
    ("run.toml", "[diloco]\nouter_momentum = 3.0", "diloco.outer_momentum must be at least 0 and below 1"),
    ("run.json", "[]", "it is no object"),
    ("run.json", "{", "run.json can't be read"),
    ("run.yaml", "", "name a .toml file, or a .json"),
]
SIZED = replace(tiny(), **with_model(vocab_size=257))
OTHERS: list[tuple[Callable[[], object], str]] = [
    *(
        (partial(parse_tokens, text), f"num_tokens={text} ")
        for text in ("", "x", "1MB", "-1", "1e", "nan", "M1", "1 x", "0", "0x", "1e999")
    ),
    *((partial(epochs, n), f"epochs={n} must be above 0 and finite") for n in (0.0, -1.0, math.nan, math.inf)),
    (
        partial(with_budget, SIZED, Budget(7, "tokens"), epoch_tokens=1),
        "7 tokens are less than half a step of global_batch·sequence_length=512 tokens",
    ),
    (
        partial(with_budget, SIZED, Budget(1e30, "tokens a parameter"), epoch_tokens=1),
        "e+34 are more than any run can take",
    ),
    (partial(fitted, recipe("4b"), 1e9), "can't be cut into shares that fit into 1 GB"),
    (
        partial(measurable, replace(tiny(), num_replicas=1)),
        "num_replicas=1, but a link has two ends: take 2 or more",
    ),
    *(
        (lambda arguments=arguments: [*measure_wire(**{"specs": ["fp32"], **arguments})], sentence)
        for arguments, sentence in [
            ({"specs": ["fp8"], "gradient_N": torch.ones(3), "num_values": 10}, "'fp8' is not a codec"),
            ({"gradient_N": torch.ones(3), "num_values": 0}, "num_values must be at least 1, not 0"),
            ({"gradient_N": torch.zeros(3), "num_values": 10}, "the gradient holds nothing but zeros"),
        ]
    ),
]


def refusals() -> Iterator[tuple[Callable[[], object], str]]:
    """Each call, and a part of the sentence with which it is refused."""
    for changes, sentence in CONFIGS:
        yield partial(replace, tiny(), **changes), sentence
    for section, values, sentence in SECTIONS:
        yield partial(section, **values), sentence
    for config, sentence in RESOLVED:
        yield partial(resolved, config), sentence
    for changes, sentence in JSON:
        yield partial(from_json, TrainConfig, json.loads(json.dumps(to_json(tiny()))) | changes), sentence
    yield from OTHERS


@pytest.mark.parametrize(("call", "sentence"), [pytest.param(*row, id=row[1]) for row in refusals()])
def test_settings_with_which_nothing_can_be_trained_are_refused(call, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        call()
    first = re.split("[ =]", sentence)[0]
    if first in FIELDS:
        assert error.value.field == first


@pytest.mark.parametrize(("name", "content", "sentence"), FILES, ids=[sentence for *_, sentence in FILES])
def test_a_file_that_is_no_config_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_config_file(tmp_path / name, "tiny")


def test_a_file_that_is_absent_or_names_no_recipe_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_config_file(tmp_path / "absent.toml", "tiny")
    (tmp_path / "run.toml").write_text("seed = 3")
    with pytest.raises(UserError, match="names no recipe: name one of laptop, tiny"):
        read_config_file(tmp_path / "run.toml", None)


@pytest.mark.parametrize("content", [None, b"a text"])
def test_a_file_that_holds_no_gradient_is_refused(content, tmp_path):
    path = tmp_path / "gradient.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"gradient\.safetensors can't be read: "):
        load_gradient(path)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (with_model(width=HUGE), ("model.width", "model.vocab_size", "model.num_layers")),
        (with_model(num_layers=4096, width=1 << 20), ("model.width", "model.num_layers", "model.vocab_size")),
        ({"sequence_length": HUGE, "num_tokens": 8 * HUGE}, ("sequence_length", "model.vocab_size")),
        ({"global_batch": HUGE, "num_tokens": 64 * HUGE}, ("global_batch", "sequence_length")),
        ({"evaluation": EvaluationConfig(batch=HUGE)}, ("evaluation.batch", "model.vocab_size")),
    ],
)
def test_sizes_beyond_the_memory_are_refused_with_fields_and_bytes(changes, fields):
    refused = pytest.raises(UserError, match=r"alone take [\d,]+ bytes, and no machine has more than [\d,]+")
    with refused as refusal:
        resolved(**changes)
    assert refusal.value.fields[: len(fields)] == fields
