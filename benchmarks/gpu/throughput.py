"""Tokens a second and utilization of the decoder, beside a plain loop of transformers' Llama at the same size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco.models.decoder import Decoder
from diloco.training.hardware import peak_flops
from gpu.place import Measurements, Place, Row

SCALES = ("550M", "35M", "180M", "1.3B")
_LENGTH, _MOST_SEQUENCES = 2048, 32


def measurements(place: Place) -> Measurements:
    kinds = {
        "ours": partial(_ours, dtype=torch.float32),
        "ours, bf16 parameters": partial(_ours, dtype=torch.bfloat16),
        "Llama": _llama,
    }
    return {
        f"{scale}, {name}{', compiled' if compiled else ''}": partial(_measured, place, scale, kind, compiled)
        for scale in (SCALES if not place.dry else SCALES[:1])
        for compiled in (True, False)
        for name, kind in kinds.items()
    }


Model = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], bool]
"""A model, the loss of a window under a forward pass, and True if it runs in autocast."""


def _ours(place: Place, scale: str, *, dtype: torch.dtype) -> Model:
    model = place.model(scale).to(dtype)

    def loss(forward: nn.Module, window_BxT1: Tensor) -> Tensor:
        return model.loss(forward(window_BxT1[:, :-1]), window_BxT1[:, 1:], 1e-4)[1]

    return model, loss, dtype == torch.float32


def _llama(place: Place, scale: str) -> Model:
    """A Llama as wide and deep, with as many heads and entries; its MLP of three matrices is 8/3 as wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = place.decoder(scale)
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.width,
        intermediate_size=-(-8 * ours.width // 3 // 64) * 64,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        max_position_embeddings=_LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with place.device:
        model = LlamaForCausalLM(config)

    def loss(forward: nn.Module, window_BxT1: Tensor) -> Tensor:
        logits = forward(input_ids=window_BxT1[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), window_BxT1[:, 1:].flatten())

    return model, loss, True


def _measured(place: Place, scale: str, kind: Callable[[Place, str], Model], compiled: bool) -> Row:
    """The largest batch that fits, by halves from 32 sequences."""
    num_sequences = place.size(_MOST_SEQUENCES, 2)
    while True:
        try:
            return _row(place, *kind(place, scale), num_sequences, compiled)
        except torch.OutOfMemoryError:
            if num_sequences == 1:
                return {"error": "a single sequence does not fit"}
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        num_sequences //= 2


def _row(place: Place, model: nn.Module, loss: Any, autocast: bool, num_sequences: int, compiled: bool) -> Row:
    """Tokens a second, MFU and memory of forward, backward, clipping and AdamW."""
    length = place.size(_LENGTH, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backend = "eager" if place.dry else "inductor"
    forward: Any = torch.compile(model, backend=backend) if compiled else model
    vocab_size, layers, width = _shape(model)
    window_BxT1 = place.window(num_sequences, length, vocab_size)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=autocast):
            value = loss(forward, window_BxT1)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    in_a_row = place.size(5, 1)  # as in training, where the host is a step ahead

    def steps() -> None:
        for _ in range(in_a_row):
            step()

    if not place.dry:
        torch.cuda.reset_peak_memory_stats()
    seconds = 1e-3 * place.milliseconds(steps, repeats=4) / in_a_row
    num_params = sum(parameter.numel() for parameter in model.parameters())
    tokens = num_sequences * length
    flops = (6 * num_params + 12 * layers * width * length) * tokens
    peak = peak_flops(place.device)
    return {
        "parameters": num_params,
        "sequences": num_sequences,
        "step_ms": round(1e3 * seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "mfu": None if peak is None else round(flops / seconds / peak, 4),
        "peak_memory_gb": None if place.dry else round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def _shape(model: nn.Module) -> tuple[int, int, int]:
    """Vocabulary, layers and width of either model."""
    if isinstance(model, Decoder):
        return model.embedding.num_embeddings, len(model.blocks), model.embedding.embedding_dim
    config: Any = model.config
    return config.vocab_size, config.num_hidden_layers, config.hidden_size
