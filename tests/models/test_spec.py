import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from tests.ports import free_port
from torch import nn

from diloco.data.config import DataConfig
from diloco.errors import UserError
from diloco.evaluation.likelihoods import likelihoods
from diloco.models.language_model import LanguageModel
from diloco.models.spec import ModelConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.loop import train
from diloco.training.prepare import prepare_run
from diloco.training.records.export import export_run
from diloco.training.records.finished import evaluate_run
from diloco.training.records.runs import read_config


@dataclass(frozen=True, kw_only=True)
class GatedConfig(ModelConfig):
    """A recurrent model without attention: each block mixes a token with the running mean of those before it."""

    def build(self, *, seed):
        return GatedModel(self, seed=seed)

    @property
    def num_matrix_params(self):
        return 2 * self.num_layers * self.width**2 + self.vocab_size * self.width


class GatedModel(LanguageModel):
    def __init__(self, config, *, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
            self.blocks = nn.ModuleList(GatedBlock(config.width) for _ in range(config.num_layers))

    def forward(self, tokens, cache=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.embedding.weight)


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_and_value = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x):
        means = x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]
        gate, value = self.gate_and_value(means).chunk(2, dim=-1)
        return x + gate.sigmoid() * value


def test_a_family_of_ones_own_is_trained_stored_and_evaluated(tmp_path, small_corpus, monkeypatch):
    unresolved = replace(
        recipe("tiny"),
        model=GatedConfig(num_layers=4, width=16),
        data=DataConfig(train=(str(small_corpus),), held_out_fraction=0.1, cache=tmp_path / "data"),
        num_replicas=1,
        name="run",
        runs=tmp_path,
    )
    config = resolved(prepare_run(unresolved))
    with torch.device("meta"):
        model = config.model.build(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.model.num_matrix_params
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    summary = train(config, resume=False).summary
    assert summary["eval_loss"] < math.log(257) - 0.5, "chance is log 257"
    assert read_config(config.directory).model == config.model
    assert evaluate_run(config.directory)["eval_loss"] == pytest.approx(summary["eval_loss"])
    with pytest.raises(UserError, match="transformers has no class that computes GatedConfig's model"):
        export_run(config.directory, "hf", tmp_path / "exported")
    with pytest.raises(UserError, match="GatedModel offers no cache"):
        likelihoods(model, [([1], [2])], max_length=8, device=torch.device("cpu"))


def test_sizes_and_data_need_no_torch_and_a_model_on_meta_no_compiler():
    code = """
import importlib, pkgutil, sys
import diloco.data
from diloco.models.decoder_config import DecoderConfig
from diloco.models.families import load_family
config = DecoderConfig(num_layers=2, num_heads=2, width=8, vocab_size=11)
for module in pkgutil.iter_modules(diloco.data.__path__):
    importlib.import_module(f"diloco.data.{module.name}")
heavy = {"torch", "tokenizers", "sentencepiece", "pyarrow", "datasets"}
assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)
import torch
with torch.device("meta"):
    config.build(seed=0)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
