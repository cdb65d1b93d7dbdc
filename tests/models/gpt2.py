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
    """The same with weights that nobody has trained, as `save_pretrained` writes them.

    That itself would import accelerate, DeepSpeed and more for seconds.
    """
    import safetensors.torch
    import torch
    import transformers

    values = {**SIZES, "bos_token_id": 256, "eos_token_id": 256} | changes
    config = transformers.GPT2Config(**values, architectures=["GPT2LMHeadModel"])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        state = transformers.GPT2LMHeadModel(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    config.save_pretrained(folder)
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
