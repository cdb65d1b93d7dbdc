"""A run's outer parameters, as other programs read them."""

import json

import pytest
import safetensors.torch
import torch

from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError
from diloco.training.export import export_run
from diloco.training.finished import run_parameters
from diloco.training.runs import read_config


def test_the_export_has_our_names(finished_run, tmp_path):
    export_run(finished_run, "safetensors", tmp_path / "out")
    config = read_config(finished_run)
    model = config.model.build(seed=1)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    outer = run_parameters(finished_run, "outer")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), outer.parameters(), strict=True))
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["width"] == config.model.width and described["tokenizer"] == "bytes"
    with pytest.raises(UserError, match="out is not empty: set output to a new directory"):
        export_run(finished_run, "hf", tmp_path / "out")


@pytest.mark.filterwarnings("default")  # of transformers
def test_transformers_loads_the_export_and_generates(finished_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    export_run(finished_run, "hf", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours, _ = run_parameters(finished_run, "outer")
    text = "the cat sees salt, né"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = load_tokenizer("bytes").encode([text])[0].tolist()
    assert ids[0].tolist() == [256, *expected]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=2e-5, rtol=1e-4)
    written = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=256)[0]
    tokens = ids
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], dim=1)
    assert written.tolist() == tokens[0].tolist()
    assert tokenizer.decode(written, skip_special_tokens=True).startswith(text)
