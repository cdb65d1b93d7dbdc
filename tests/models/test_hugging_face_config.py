"""The look-up of a model of `transformers`."""

import json
import math
from dataclasses import replace

import pytest
from tests.models.gpt2 import write_config, write_model

from diloco.models import hugging_face_config
from diloco.models.families import load_family
from diloco.models.hugging_face_config import (
    HuggingFaceConfig,
    hugging_face_model,
    transformers_config,
    weight_files,
)

pytestmark = pytest.mark.filterwarnings("default")  # of transformers


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("transformers")


def test_a_directory_a_config_alone_and_a_family_by_its_path(tmp_path):
    fresh = hugging_face_model(str(write_config(tmp_path / "fresh")))
    alone = hugging_face_model(str(tmp_path / "fresh" / "config.json"))
    assert replace(alone, hf=fresh.hf) == fresh and not fresh.weights
    trained = hugging_face_model(str(write_model(tmp_path / "trained")))
    assert len(trained.weights) == 64 and trained.hf == str(tmp_path / "trained")
    assert load_family(fresh.family) is HuggingFaceConfig


def test_a_name_on_the_hub_is_kept_and_its_files_are_looked_up(tmp_path, monkeypatch):
    here = hugging_face_model(str(write_model(tmp_path / "gpt2")))
    asked = []

    def hub_file(name, files):
        asked.append((name, *files))
        return next(path for path in (tmp_path / "gpt2" / file for file in files) if path.exists())

    monkeypatch.setattr(hugging_face_config, "hub_file", hub_file)
    config = hugging_face_model("some/gpt2")
    assert config == replace(here, hf="some/gpt2")
    assert {name for name, *_ in asked} == {"some/gpt2"} and ("some/gpt2", "config.json") in asked
    assert [*config.initial(seed=0).state_dict()], "the weights are found again"


@pytest.mark.parametrize("infinity", ['{"__float__": "Infinity"}', "Infinity"])
def test_a_number_without_end_is_read_as_transformers_writes_it(infinity, tmp_path):
    sizes = '"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 2, "num_hidden_layers": 2'
    content = f'{{"model_type": "mamba2", {sizes}, "time_step_limit": [0.0, {infinity}]}}'
    (tmp_path / "config.json").write_text(content)
    config = hugging_face_model(str(tmp_path))
    assert [*transformers_config(config.architecture).time_step_limit] == [0.0, math.inf]


def test_a_bert_that_reads_no_further_is_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "is_decoder": True}))
    assert hugging_face_model(str(tmp_path)).num_layers == 12


def test_the_weights_are_those_that_transformers_takes_first(tmp_path):
    write_config(tmp_path)
    for name in ("model.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    config = hugging_face_model(str(tmp_path))
    assert weight_files(config.hf) == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(config.hf) == [tmp_path / "a.safetensors"]
