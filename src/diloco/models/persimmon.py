"""The decoder as a stock class of `transformers`: Persimmon, with biases of zero, computes the same function.

Shapes: D width, H heads, K = D/H elements a head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.models.decoder_config import DecoderConfig


def persimmon_config(config: DecoderConfig, *, context: int, bos_id: int) -> dict[str, Any]:
    """The contents of `config.json`.

    Args:
        config: the decoder's.
        context: tokens in the sequences that it was trained on.
        bos_id: the token that precedes a document, and so ends the one before.
    """
    return {
        "architectures": ["PersimmonForCausalLM"],
        "model_type": "persimmon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu",
        "max_position_embeddings": context,
        "layer_norm_eps": 1e-5,
        "qk_layernorm": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        "rope_theta": 10_000.0,  # where transformers before 5 looks
        "partial_rotary_factor": 1.0,
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "dtype": "float32",
    }


def persimmon_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder's parameters under Persimmon's names: Q, K, V of each head in a row, and zeros for biases."""
    renamed = {"model.embed_tokens.weight": state["embedding.weight"]}
    renamed |= _norm("model.final_layernorm", state["norm.weight"])
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        qkv_3xHxKxD = state[f"{ours}.attention.qkv.weight"].unflatten(0, (3, config.num_heads, -1))
        renamed |= _norm(f"{theirs}.input_layernorm", state[f"{ours}.attention_norm.weight"])
        renamed |= _norm(f"{theirs}.post_attention_layernorm", state[f"{ours}.mlp_norm.weight"])
        renamed |= _norm(f"{theirs}.self_attn.q_layernorm", state[f"{ours}.attention.query_norm.weight"])
        renamed |= _norm(f"{theirs}.self_attn.k_layernorm", state[f"{ours}.attention.key_norm.weight"])
        renamed |= _linear(f"{theirs}.self_attn.query_key_value", qkv_3xHxKxD.transpose(0, 1).flatten(0, 2))
        renamed |= _linear(f"{theirs}.self_attn.dense", state[f"{ours}.attention.out.weight"])
        renamed |= _linear(f"{theirs}.mlp.dense_h_to_4h", state[f"{ours}.mlp_in.weight"])
        renamed |= _linear(f"{theirs}.mlp.dense_4h_to_h", state[f"{ours}.mlp_out.weight"])
    return {name: value.contiguous().clone() for name, value in renamed.items()}


def _norm(name: str, gain_D: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": gain_D, f"{name}.bias": torch.zeros_like(gain_D)}


def _linear(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": weight, f"{name}.bias": torch.zeros_like(weight[:, 0])}
