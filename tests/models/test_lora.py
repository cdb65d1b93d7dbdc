"""Adapters: their settings, and that nothing else is trained, stored or exported."""

import sys
import warnings

import pytest
import torch
from tests.models.gpt2 import write_config, write_model

from diloco.errors import UserError
from diloco.models.hugging_face_config import hugging_face_model
from diloco.models.pretrained import parse_lora

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

TOKENS = torch.arange(20).view(1, 20)


@pytest.fixture(autouse=True)
def _quiet():
    """Let transformers and peft warn of what they like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8", "'8' is not an option of it, or given twice (it has: rank=INTEGER"),
        ("rank=8,rank=8", "'rank=8' is not an option of it, or given twice"),
        ("alpha=8", "it needs a rank"),
        ("rank=x", "it needs a rank, and numbers"),
        ("rank=0", "rank must be from 1 to 65535"),
        ("rank=8,alpha=inf", "alpha above 0"),
        ("rank=8,targets=", "no target empty"),
    ],
)
def test_settings_that_are_none_are_refused(text, sentence):
    with pytest.raises(UserError) as refusal:
        parse_lora(text)
    assert sentence in str(refusal.value) and str(refusal.value).startswith(f"model.lora={text}: ")
    assert refusal.value.field == "model.lora"


def test_adapters_begin_as_the_model_and_are_all_that_is_trained(folder):
    config = hugging_face_model(str(folder), lora="rank=2,targets=c_attn")
    one, same, other = (config.initial(seed=seed) for seed in (0, 0, 1))
    base = hugging_face_model(str(folder)).initial(seed=0)
    with torch.no_grad():
        assert torch.equal(one(TOKENS), base(TOKENS)), "B is zero"
    trained = [name for name, parameter in one.named_parameters() if parameter.requires_grad]
    assert list(one.state_dict()) == trained and len(trained) == 2 * 4
    assert sum(value.numel() for value in one.state_dict().values()) == 4 * 2 * (32 + 3 * 32)
    assert config.num_trained_params == 4 * 2 * (32 + 3 * 32) < config.num_matrix_params
    drawn = "model.base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert torch.equal(one.state_dict()[drawn], same.state_dict()[drawn])
    assert not torch.equal(one.state_dict()[drawn], other.state_dict()[drawn])
    one(TOKENS).sum().backward()
    assert [name for name, parameter in one.named_parameters() if parameter.grad is not None] == trained


def test_on_meta_the_weights_are_not_read(folder):
    config = hugging_face_model(str(folder), lora="rank=2")
    with torch.device("meta"):
        model = config.build(seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_cannot_be_adapted_is_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"adapts weights, and .* has none: leave it out") as refusal:
        hugging_face_model(str(write_config(tmp_path)), lora="rank=2")
    assert refusal.value.field == "model.lora"
    with pytest.raises(UserError, match=r"model\.lora=rank=2,targets=q_proj does not suit the model: Target modu"):
        hugging_face_model(str(folder), lora="rank=2,targets=q_proj").build(seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"peft is not installed: run pip install '\.\[lora\]'"):
        hugging_face_model(str(folder), lora="rank=2").build(seed=0)
