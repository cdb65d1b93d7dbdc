import subprocess
import sys

import pytest

from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.models.spec import load_family


def test_sizes_need_no_torch_and_a_model_on_meta_no_compiler():
    code = """
import sys
import diloco.models.spec
from diloco.models.decoder_config import DecoderConfig
config = DecoderConfig(num_layers=2, num_heads=2, width=8, vocab_size=11)
assert "torch" not in sys.modules
import torch
with torch.device("meta"):
    config.build(seed=0)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_family_is_loaded_by_the_path_that_it_is_stored_by():
    config = DecoderConfig(num_layers=2, num_heads=2, width=8)
    assert load_family(config.family) is DecoderConfig


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("diloco.models.nothing.Config", "can't be imported here (No module named 'diloco.models.nothing')"),
        ("diloco.models.decoder_config.Nothing", "has no attribute 'Nothing'"),
        ("Nothing", "can't be imported here (Empty module name)"),
        ("pathlib.Path", "model.family='pathlib.Path' is no subclass of ModelConfig"),
    ],
)
def test_a_stored_family_that_is_none_is_refused(path, message):
    with pytest.raises(UserError) as refusal:
        load_family(path)
    assert message in str(refusal.value) and refusal.value.field == "model.family"
