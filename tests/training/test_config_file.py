"""Settings from a file: a recipe with changes, or another run's config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.training.config.config import to_json, with_value
from diloco.training.config.recipes import laptop, recipe
from diloco.training.config.resolve import Budget, read_config_file


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.toml", "seed = ", "run.toml can't be read: "),
        ("run.toml", "[diloco]\nsync_evry = 3", r"there is no field diloco.sync_evry: did you mean sync_every\?"),
        ("run.toml", "sync_every = 3", r"there is no field sync_every: did you mean diloco.sync_every\?$"),
        ("run.toml", "every_steps = 3", r"did you mean checkpoint.every_steps or evaluation.every_steps\?$"),
        ("run.toml", "[diloco]\nseed = 3", r"there is no field diloco.seed: did you mean seed\?$"),
        ("run.toml", 'recipe = "tini"', r"there is no recipe 'tini': did you mean tiny\?"),
        ("run.toml", 'recipe = "laptop"', "changes the recipe laptop, not tiny"),
        ("run.toml", "diloco = 3", "diloco is a section"),
        ("run.toml", "[seed]\nx = 1", "seed is no section"),
        ("run.toml", "seed = 'one'", "run.toml can't be read: seed: expected int"),
        ("run.toml", "num_tokens = '1MB'", "num_tokens=1MB is no number of tokens"),
        ("run.toml", "num_tokens = 9\nepochs = 3", "leave one of them out"),
        ("run.toml", "epochs = 'x'", "epochs='x' is no number"),
        ("run.toml", "epochs = true", "epochs=True is no number"),
        ("run.toml", 'recipe = ["tiny"]', r"there is no recipe \"\['tiny'\]\""),
        ("run.toml", "seed = 3\n" * (1 << 17), "run.toml can't be read: it has more than 1,048,576 bytes"),
        ("run.toml", "[diloco]\nouter_momentum = 3.0", "diloco.outer_momentum must be at least 0 and below 1"),
        ("run.json", "[]", "it is no object"),
        ("run.json", "{", "run.json can't be read"),
        ("run.yaml", "", "name a .toml file, or a .json"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        read_config_file(write(tmp_path / name, content), "tiny")


def test_a_file_that_is_absent_or_names_no_recipe_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_config_file(tmp_path / "absent.toml", "tiny")
    with pytest.raises(UserError, match="names no recipe: name one of laptop, tiny"):
        read_config_file(write(tmp_path / "run.toml", "seed = 3"), None)
