import subprocess
import sys


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
