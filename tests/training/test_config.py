"""The config of a run: written and read, resolved, compared, and made from a recipe and a file."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.training.cases import resolved

from diloco.models.decoder_config import DecoderConfig
from diloco.scaling.hyperparameters import hyperparameters
from diloco.training.config.config import (
    CheckpointConfig,
    DilocoConfig,
    TrainConfig,
    differences,
    differences_from_defaults,
    fields_with,
    from_json,
    to_json,
    trait,
    with_value,
)
from diloco.training.config.recipes import RECIPES, laptop, recipe, recipe_of, scaling_laws, tiny
from diloco.training.config.resolve import (
    Budget,
    parse_tokens,
    read_config_file,
    resolve,
    shared_facts,
    with_budget,
)


def test_one_replica_needs_no_spare_checkpoint():
    assert replace(tiny(), num_replicas=1, checkpoint=CheckpointConfig(every_steps=5, keep=1))


@pytest.mark.parametrize(
    ("offsets", "first_sync", "expected"),
    [(None, "full_period", 11), ((3, 7), "full_period", 14), ((3, 7), "early", 11)],
)
def test_replicas_may_be_as_far_apart_as_the_first_sync_lets_them(offsets, first_sync, expected):
    diloco = replace(tiny().diloco, offsets=offsets, first_sync=first_sync)
    assert replace(tiny(), diloco=diloco).steps_apart == expected


CONFIG = replace(tiny(), diloco=DilocoConfig(sync_every=10, overlap_steps=(0, 3), offsets=(0, 1, 2)))


def test_json_gives_the_config_back():
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(CONFIG)))) == CONFIG


@dataclass(frozen=True, kw_only=True)
class OtherConfig(DecoderConfig):
    """A family of its own."""

    num_experts: int = 1


def test_a_model_of_another_family_comes_back_and_the_decoders_json_names_none():
    assert "family" not in to_json(CONFIG)["model"]
    other = replace(CONFIG, model=OtherConfig(num_layers=4, num_heads=2, width=32, num_experts=8))
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(other)))) == other
    assert differences(CONFIG, other).keys() == {"model"}
    assert differences_from_defaults(other)["model.family"] == f"{__name__}.OtherConfig"


def test_differences_name_nested_fields():
    one, other = tiny(), replace(tiny(), seed=1, diloco=replace(tiny().diloco, wire="bf16"))
    assert differences(one, other) == {"seed": (0, 1), "diloco.wire": (None, "bf16")}


def test_fields_with_a_trait_are_named_with_its_value():
    @dataclass
    class Inner:
        one: int = field(default=1, metadata=trait(planned=True))
        two: int = 2

    @dataclass
    class Outer:
        inner: Inner
        whole: Inner = field(metadata=trait(column=True))
        other: int = field(metadata=trait(planned=True, column=True))

    Outer.__annotations__ |= {"inner": Inner, "whole": Inner}
    assert fields_with(Outer, "planned") == {"inner.one": True, "whole.one": True, "other": True}
    assert fields_with(Outer, "column") == {"whole": True, "other": True}
    with pytest.raises(AssertionError, match="no field of Outer has the trait 'colum'"):
        fields_with(Outer, "colum")


def test_every_recipe_is_a_run_that_can_be_resolved():
    for make in RECIPES.values():
        config = make()
        vocab_size = config.model.vocab_size or 257
        assert resolve(config, vocab_size=vocab_size, prepared=Path("p")).num_steps == config.num_steps > 0


def test_the_ladder_recipes_follow_the_published_power_laws():
    config = scaling_laws("35M", num_replicas=2)
    assert config.optimizer.learning_rate == pytest.approx(3978.82 * 35_651_584**-0.78)
    assert config.global_batch == 32
    assert config.num_tokens == pytest.approx(20 * 35_651_584, rel=1e-3)
    # 36.2 sequences of the joint law are 12.1 of each of three replicas, 2^3.6
    assert scaling_laws("35M", num_replicas=3).global_batch == 3 * 16


@pytest.mark.parametrize(("method", "replicas"), [("diloco", 4), ("data_parallel", 2), ("diloco", 8)])
def test_a_ladder_recipe_has_the_values_of_its_method_and_its_replicas(method, replicas):
    config = recipe("4b", method=method, num_replicas=replicas)
    assert (config.method, config.num_replicas, config.recipe) == (method, replicas, "4b")
    tuned = hyperparameters(method, config.model.num_matrix_params, replicas)
    assert config.optimizer.learning_rate == tuned.learning_rate
    assert 2**-0.5 <= config.tokens_per_step / tuned.batch_tokens <= 2**0.5
    assert config.diloco.outer_learning_rate == tuned.outer_learning_rate
    assert recipe_of(config) == config


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
    diloco = resolved(method=method).diloco
    assert (diloco.overlap_steps, diloco.fragments, diloco.mixing, diloco.wire) == expected


def test_values_that_were_given_stay():
    settings = DilocoConfig(sync_every=10, overlap_steps=7, mixing=0.25, wire="bf16")
    assert resolved(method="diloco", diloco=settings).diloco == replace(settings, fragments="whole")


def test_the_length_of_the_run_sets_warm_up_and_weight_decay():
    config = resolved()
    assert config.num_steps == 60
    assert (config.optimizer.warmup_steps, config.optimizer.weight_decay) == (6, 1 / 60)


@pytest.mark.parametrize(("every_steps", "expected"), [(20, 3), (5, 5), (1, 13), (0, 3)])
def test_left_out_as_many_checkpoints_are_kept_as_replicas_apart_need(every_steps, expected):
    assert resolved(checkpoint=CheckpointConfig(every_steps=every_steps)).checkpoint.keep == expected


def test_replicas_may_differ_in_where_they_compute_and_in_nothing_that_is_computed():
    config = tiny()
    assert shared_facts(replace(config, device="cpu", runs=Path("x"))) == shared_facts(config)
    for change in ({"seed": 1}, {"name": "x"}, {"diloco": replace(config.diloco, offload=True)}):
        assert shared_facts(replace(config, **change)) != shared_facts(config)


SIZED = replace(tiny(), model=replace(tiny().model, vocab_size=257))
STEP = 8 * 64


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("30720", 30_720),
        ("1e6", 1e6),
        ("1M", 1e6),
        ("2.5k", 2500),
        ("1,000,000", 1e6),
        ("3G", 3e9),
        ("3b", 3e9),
        ("20x", 20 * SIZED.model.num_matrix_params),
        ("0.5X", 0.5 * SIZED.model.num_matrix_params),
    ],
)
def test_a_budget_is_tokens_or_a_multiple_of_the_parameters(text, tokens):
    assert parse_tokens(text).num_tokens(SIZED, epoch_tokens=1) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("budget", "num_steps"),
    [
        (Budget(100.4 * STEP, "tokens"), 100),
        (Budget(100.6 * STEP, "tokens"), 101),
        (Budget(STEP, "tokens"), 1),
        (Budget(3, "epochs"), round(3 * 12_345 / STEP)),
    ],
)
def test_a_budget_is_rounded_to_the_nearest_whole_step(budget, num_steps):
    assert with_budget(SIZED, budget, epoch_tokens=12_345) == replace(SIZED, num_tokens=num_steps * STEP)


def write(path, text):
    path.write_text(text)
    return path


def test_a_file_changes_the_fields_of_its_recipe(tmp_path):
    text = 'recipe = "tiny"\nseed = 3\nnum_tokens = "20x"\n[data]\ntrain = ["a", "b"]\n[diloco]\n'
    text += "overlap_steps = [1, 2]\n"
    config, budget = read_config_file(write(tmp_path / "run.toml", text), None)
    expected = replace(recipe("tiny"), seed=3, data=replace(laptop().data, train=("a", "b")))
    assert config == with_value(expected, "diloco.overlap_steps", (1, 2))
    assert budget == Budget(20.0, "tokens a parameter")
    same = read_config_file(write(tmp_path / "run.json", '{"seed": 3, "num_tokens": 1024}'), "tiny")
    assert same == (replace(recipe("tiny"), seed=3, num_tokens=1024), Budget(1024, "tokens"))
    assert read_config_file(write(tmp_path / "run.toml", "epochs = 2"), "tiny")[1] == Budget(2, "epochs")


def test_with_a_rendezvous_a_run_begins_with_one_replica_unless_the_file_says_otherwise(tmp_path):
    path = write(tmp_path / "run.toml", "replica_batch = 2")
    config, _ = read_config_file(path, "tiny", rendezvous="store")
    assert (config.rendezvous, config.num_replicas, config.replica_batch) == ("store", 1, 2)
    write(path, 'rendezvous = "other"')
    config, _ = read_config_file(path, "tiny")
    assert (config.rendezvous, config.num_replicas) == ("other", 1)
    assert read_config_file(path, "tiny", rendezvous="store")[0].rendezvous == "store"
    write(path, 'rendezvous = "other"\nnum_replicas = 4')
    assert read_config_file(path, "tiny")[0].num_replicas == 4
    assert read_config_file(write(path, "seed = 3"), "tiny")[0].num_replicas == recipe("tiny").num_replicas > 1


def test_the_file_of_the_docs_can_be_read():
    config, budget = read_config_file(Path(__file__).parents[2] / "docs/snippets/run.toml", None)
    assert config.recipe == "laptop" and config.diloco.sync_every == 50
    assert budget == Budget(20.0, "tokens a parameter")


def test_a_run_is_repeated_from_its_config(tmp_path):
    """Without its name, the place of a text that is prepared on demand, and the phases that its schedule had."""
    asked = with_value(replace(recipe("tiny"), seed=5), "data.cache", tmp_path / "data")
    started = with_value(replace(asked, name="first"), "data.prepared", tmp_path / "data" / "text")
    path = write(tmp_path / "config.json", json.dumps(to_json(started)))
    assert read_config_file(path, None) == (asked, Budget(asked.num_tokens, "tokens"))
    extended = with_value(with_value(started, "optimizer.start_step", 20), "optimizer.warmup_steps", 3)
    write(path, json.dumps(to_json(extended)))
    assert read_config_file(path, None)[0] == asked


def test_a_text_elsewhere_is_named_again_while_it_is_there(tmp_path):
    asked = with_value(recipe("tiny"), "data.prepared", tmp_path / "text")
    path = write(tmp_path / "config.json", json.dumps(to_json(asked)))
    assert read_config_file(path, None)[0].data.prepared is None
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "index.json").touch()
    assert read_config_file(path, None)[0].data.prepared == tmp_path / "text"
