"""A pre-LayerNorm decoder: QK-LayerNorm, RoPE, GELU, tied embeddings (arXiv 2503.09799, section 3).

Shapes: B sequences, T tokens, D width, H heads, K = D/H elements per head, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from diloco.models.language_model import LanguageModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class KeyValueCache:
    """Keys and values, per block, of the tokens that a decoder has read in each of B sequences."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def num_tokens(self) -> int:
        """Tokens read in each sequence."""
        return 0 if self._layers[0] is None else self._layers[0][0].shape[-2]

    def extend(self, layer: int, k_BxHxTxK: Tensor, v_BxHxTxK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a block's; return all of them."""
        if (before := self._layers[layer]) is not None:
            k_BxHxTxK = torch.cat([before[0], k_BxHxTxK], dim=-2)
            v_BxHxTxK = torch.cat([before[1], v_BxHxTxK], dim=-2)
        self._layers[layer] = k_BxHxTxK, v_BxHxTxK
        return k_BxHxTxK, v_BxHxTxK

    def select(self, rows_R: Tensor) -> "KeyValueCache":
        """A cache of R sequences, each a copy of one of the B."""
        selected = KeyValueCache(len(self._layers))
        selected._layers = [layer and (layer[0][rows_R], layer[1][rows_R]) for layer in self._layers]
        return selected


class Decoder(LanguageModel):
    """Tokens to the logits of the next token; `DecoderConfig` holds and checks the sizes.

    >>> model = Decoder(num_layers=2, num_heads=2, width=8, vocab_size=16, seed=0)
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(self, *, num_layers: int, num_heads: int, width: int, vocab_size: int, seed: int) -> None:
        super().__init__()
        assert vocab_size > 0, "the tokenizer's vocabulary was not filled in"
        self.head_width = width // num_heads
        self.embedding = _Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialise(seed)

    def parallelize(self, mesh: "DeviceMesh") -> None:
        """Cut the heads, the hidden units and the vocabulary over the processes of a mesh of one dimension."""
        from diloco.models.decoder_parallel import parallelize  # with DTensors, which take a second to import

        parallelize(self, mesh)

    def new_cache(self) -> KeyValueCache:
        """An empty cache."""
        return KeyValueCache(len(self.blocks))

    def forward(
        self, tokens_BxT: Int64[Tensor, "B T"], cache: KeyValueCache | None = None
    ) -> Float[Tensor, "B T V"]:
        """The logits of the next token at each position; with a cache, the tokens follow those read before."""
        x_BxTxD = self.embedding(tokens_BxT)
        first = 0 if cache is None else cache.num_tokens
        rotation = rotary(tokens_BxT.shape[1], self.head_width, tokens_BxT.device, first=first)
        for layer, block in enumerate(self.blocks):
            extend = None if cache is None else partial(cache.extend, layer)
            x_BxTxD = block(x_BxTxD, rotation, extend)
        return F.linear(self.norm(x_BxTxD), self.embedding.weight)

    def _initialise(self, seed: int) -> None:
        """Draw matrices from N(0, 1/fan_in); those that add to the residual stream are scaled by 1/√(2L)."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = 1 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not parameter.is_meta:
                scale = residual_scale if name.endswith(("attention.out.weight", "mlp_out.weight")) else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]), generator=generator)


class _Linear(nn.Linear):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing: `Decoder` initialises the weights once; on `meta` this would also import torch._dynamo."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: `Decoder` initialises the weights once."""


_Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = _Linear(width, 4 * width)
        self.mlp_out = _Linear(4 * width, width)

    def forward(self, x_BxTxD: Tensor, rotation: tuple[Tensor, Tensor], extend: _Extend | None = None) -> Tensor:
        """The residual stream after this block."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD), rotation, extend)
        return x_BxTxD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BxTxD))))


class Attention(nn.Module):
    """Causal self-attention; queries and keys are normalised per head before they are rotated."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.qkv = _Linear(width, 3 * width)
        self.out = _Linear(width, width)
        self.query_norm = nn.LayerNorm(width // num_heads, bias=False)
        self.key_norm = nn.LayerNorm(width // num_heads, bias=False)
        self.num_heads = num_heads

    def forward(self, x_BxTxD: Tensor, rotation: tuple[Tensor, Tensor], extend: _Extend | None = None) -> Tensor:
        """The values that each position attends to, up to itself and including those in the cache."""
        # Unbound where the linear layer has the three, so that their gradients are stacked as it reads them.
        qkv = self.qkv(x_BxTxD).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q_BxHxTxK, k_BxHxTxK, v_BxHxTxK = (part.transpose(1, 2) for part in qkv)
        q_BxHxTxK = rotate(self.query_norm(q_BxHxTxK), rotation).to(v_BxHxTxK.dtype)
        k_BxHxTxK = rotate(self.key_norm(k_BxHxTxK), rotation).to(v_BxHxTxK.dtype)
        if extend is None:
            y_BxHxTxK = causal_attention(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK)
        else:
            k_BxHxSxK, v_BxHxSxK = extend(k_BxHxTxK, v_BxHxTxK)
            num_queries, num_keys = q_BxHxTxK.shape[-2], k_BxHxSxK.shape[-2]
            seen_TxS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BxHxTxK.device)
            seen_TxS = seen_TxS.tril(num_keys - num_queries)
            y_BxHxTxK = F.scaled_dot_product_attention(q_BxHxTxK, k_BxHxSxK, v_BxHxSxK, attn_mask=seen_TxS)
        return self.out(y_BxHxTxK.transpose(1, 2).flatten(-2))


_SHORT = 512
"""Tokens up to which a CPU forms all scores in bfloat16: 2.3 times as fast as torch's flash attention at 256."""


def causal_attention(
    q_BxHxTxK: Float[Tensor, "B H T K"], k_BxHxTxK: Float[Tensor, "B H T K"], v_BxHxTxK: Float[Tensor, "B H T K"]
) -> Float[Tensor, "B H T K"]:
    """softmax(q kᵀ / √K) v, each position over those up to itself."""
    num_tokens, width = q_BxHxTxK.shape[-2:]
    is_short = q_BxHxTxK.device.type == "cpu" and q_BxHxTxK.dtype == torch.bfloat16 and num_tokens <= _SHORT
    if not is_short:
        return F.scaled_dot_product_attention(q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, is_causal=True)
    q_NxTxK, k_NxTxK, v_NxTxK = (x.flatten(0, 1) for x in (q_BxHxTxK / math.sqrt(width), k_BxHxTxK, v_BxHxTxK))
    later_TxT = q_NxTxK.new_full((num_tokens, num_tokens), -math.inf).triu(1)
    # With the dtype, since autocast would make it FP32 and round it again; torch sums in FP32 in any case.
    weights_NxTxT = torch.baddbmm(later_TxT, q_NxTxK, k_NxTxK.mT).softmax(dim=-1, dtype=q_NxTxK.dtype)
    return (weights_NxTxT @ v_NxTxK).unflatten(0, q_BxHxTxK.shape[:2])


def rotary(num_tokens: int, head_width: int, device: torch.device, first: int = 0) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, K) of RoPE with base 10,000, the halves of a head being rotated with each other.

    The sines of the first half, which the second is subtracted from, are negative. `first` is the position of the
    first of the T tokens.
    """
    channel_K2 = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    position_T = torch.arange(first, first + num_tokens, dtype=torch.float32, device=device)
    angle_TxK2 = torch.outer(position_T, 10_000.0 ** (-channel_K2 / head_width))
    sine_TxK2 = angle_TxK2.sin()
    return angle_TxK2.cos().repeat(1, 2), torch.cat([-sine_TxK2, sine_TxK2], dim=-1)


def rotate(
    x_BxHxTxK: Float[Tensor, "B H T K"], rotation: tuple[Float32[Tensor, "T K"], Float32[Tensor, "T K"]]
) -> Float32[Tensor, "B H T K"]:
    """RoPE (arXiv 2104.09864): position t turns the pair (x_i, x_{i+K/2}) by t·base^(−2i/K)."""
    cosine_TxK, sine_TxK = rotation
    halves_swapped = x_BxHxTxK.roll(x_BxHxTxK.shape[-1] // 2, dims=-1)
    return x_BxHxTxK * cosine_TxK + halves_swapped * sine_TxK
