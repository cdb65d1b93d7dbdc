"""Small models of `transformers` as tests write them, and a process in which each test takes them."""

import json
from pathlib import Path

SIZES = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 257}


def write_config(folder: Path, **changes: object) -> Path:
    """A directory with the config of a GPT-2 of bytes, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "gpt2", **SIZES, "bos_token_id": 256, "eos_token_id": 256} | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_model(folder: Path, **changes: object) -> Path:
    """The same with weights that nobody has trained, as `save_pretrained` writes them."""
    import torch
    import transformers

    values = {**SIZES, "bos_token_id": 256, "eos_token_id": 256} | changes
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**values)).save_pretrained(folder)
    return folder
