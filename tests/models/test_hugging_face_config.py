"""The look-up of a model of `transformers`, and one sentence for what is none."""

import json
import sys
from dataclasses import replace

import pytest
from diloco.models.pretrained import transformers_config, weight_files
from tests.models.gpt2 import write_config, write_model

from diloco.errors import FileError, UserError
from diloco.models import pretrained
from diloco.models.families import load_family
from diloco.models.hugging_face_config import HuggingFaceConfig, hugging_face_model

pytestmark = pytest.mark.filterwarnings("default")  # of transformers


@pytest.fixture(autouse=True)
def _installed():
    pytest.importorskip("transformers")


def refused(name: object, **values: object) -> str:
    with pytest.raises(UserError) as refusal:
        hugging_face_model(str(name), **values)
    assert refusal.value.field in ("model.hf", "model.lora") and "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_directory_a_config_alone_and_a_family_by_its_path(tmp_path):
    fresh = hugging_face_model(str(write_config(tmp_path / "fresh")))
    alone = hugging_face_model(str(tmp_path / "fresh" / "config.json"))
    assert replace(alone, hf=fresh.hf) == fresh and not fresh.weights
    trained = hugging_face_model(str(write_model(tmp_path / "trained")))
    assert len(trained.weights) == 64 and trained.hf == str(tmp_path / "trained")
    assert load_family(fresh.family) is HuggingFaceConfig


@pytest.mark.timeout(40)  # the libraries' own attempts take a minute
def test_what_is_no_model_is_one_sentence(tmp_path, monkeypatch):
    for name in (tmp_path, "no model"):
        assert "is neither a directory with a config.json, nor such a file, nor the name of a" in refused(name)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert "the Hugging Face Hub does not answer at http://127.0.0.1:9" in refused("nowhere/gpt2")


def test_a_name_on_the_hub_is_kept_and_its_files_are_looked_up(tmp_path, monkeypatch):
    here = hugging_face_model(str(write_model(tmp_path / "gpt2")))
    asked = []

    def hub_file(name, files):
        asked.append((name, *files))
        return next(path for path in (tmp_path / "gpt2" / file for file in files) if path.exists())

    monkeypatch.setattr(pretrained, "hub_file", hub_file)
    config = hugging_face_model("some/gpt2")
    assert config == replace(here, hf="some/gpt2")
    assert {name for name, *_ in asked} == {"some/gpt2"} and ("some/gpt2", "config.json") in asked
    assert [*config.initial(seed=0).state_dict()], "the weights are found again"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "t5"}, "a model of type t5 is no causal language model: choose another"),
        ({"model_type": "bert"}, "a model of type bert is no causal language model: choose another"),
        ({"model_type": "nothing"}, "transformers knows no model_type='nothing' here"),
        ({"n_layer": 2}, "transformers knows no model_type=None here"),
        ({"model_type": "gpt2", "n_layer": "two"}, "transformers refuses its config.json: "),
    ],
)
def test_what_is_no_causal_language_model_is_refused(values, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert sentence in refused(tmp_path)


def test_a_bert_that_reads_no_further_is_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "is_decoder": True}))
    assert hugging_face_model(str(tmp_path)).num_layers == 12


def test_pickled_weights_and_shards_elsewhere_are_refused(tmp_path):
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "has its weights as a pickle: save them as model.safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "a shard lies outside of its directory" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert "has no a.safetensors" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json can't be read: "):
        hugging_face_model(str(tmp_path))


def test_a_tokenizer_or_a_sequence_that_does_not_fit_is_refused(tmp_path):
    config = hugging_face_model(str(write_config(tmp_path)))
    assert config.fitted(vocab_size=257, sequence_length=64) is config
    for sizes, field, sentence in (
        ((258, 64), "data.tokenizer", "has vocab_size=257, fewer than the 258 entries of data.tokenizer: choose"),
        ((257, 65), "sequence_length", "has max_position_embeddings=64, fewer than the 65 tokens of sequence_"),
        ((100, 64), "model.hf", "has a vocabulary of 257, more than twice the tokenizer's 100"),
    ):
        with pytest.raises(UserError, match=sentence) as refusal:
            config.fitted(vocab_size=sizes[0], sequence_length=sizes[1])
        assert refusal.value.field == field


def test_without_transformers_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    write_config(tmp_path, n_layer=3)
    transformers_config.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is not installed: run pip install '.[transformers]'" in refused(tmp_path)


@pytest.mark.parametrize("architecture", ["", "[]", "{}", '{"model_type": 1}', "[" * 100_000])
def test_a_stored_architecture_that_is_none_is_refused(architecture):
    with pytest.raises(UserError, match=r"model\.architecture is no config\.json of transformers"):
        HuggingFaceConfig(num_layers=1, width=1, vocab_size=1, architecture=architecture)


def test_the_weights_are_those_that_transformers_takes_first(tmp_path):
    write_config(tmp_path)
    for name in ("model.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    config = hugging_face_model(str(tmp_path))
    assert weight_files(config.hf) == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(config.hf) == [tmp_path / "a.safetensors"]
