"""The sizes of the decoder, the ladder of the scaling-laws paper, and the export to `transformers`. No torch.

Shapes: D width, H heads, K = D/H elements per head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.models.spec import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The size of a decoder: 12·L·D² + V·D parameters in matrices, and the gains of its norms."""

    num_heads: int
    """Attention heads; must divide the width into an even number of elements per head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least("num_heads", 1)
        if self.width % (2 * self.num_heads):
            raise UserError(
                f"model.width={self.width} must be a multiple of twice model.num_heads={self.num_heads}: "
                "each head needs an even number of elements for RoPE",
                "model.width",
                "model.num_heads",
            )

    def build(self, *, seed: int) -> "Decoder":
        """A `Decoder` of this size."""
        from diloco.models.decoder import Decoder  # with torch, which sizes do not need

        return Decoder(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            width=self.width,
            vocab_size=self.vocab_size,
            seed=seed,
        )

    def check_tensor_parallel(self, number: int) -> None:
        """Refuse a number of processes that does not divide the heads.

        Raises:
            UserError: with both numbers.
        """
        if self.num_heads % number:
            raise UserError(
                f"tensor_parallel={number} must divide model.num_heads={self.num_heads}: each process has whole "
                "heads",
                *("tensor_parallel", "model.num_heads"),
            )

    @property
    def num_matrix_params(self) -> int:
        """12·L·D² + V·D, all parameters but the gains of norms.

        >>> DecoderConfig(num_layers=1, num_heads=1, width=2, vocab_size=5).num_matrix_params
        58
        """
        return 12 * self.num_layers * self.width**2 + self.vocab_size * self.width

    @property
    def num_params(self) -> int:
        """The matrices and the gains: of two norms of the width and two of a head per layer, and of the last norm.

        >>> DecoderConfig(num_layers=1, num_heads=1, width=2, vocab_size=5).num_params
        68
        """
        gains = 2 * self.num_layers * (self.width + self.width // self.num_heads) + self.width
        return self.num_matrix_params + gains

    def to_hugging_face(
        self, state: Mapping[str, "Tensor"], *, context: int, bos_id: int
    ) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
        """The same model as `transformers.PersimmonForCausalLM`, which adds biases: here, zeros."""
        return _persimmon_config(self, context=context, bos_id=bos_id), _persimmon_state(self, state)


SEQUENCE_LENGTH = 2_048
"""Tokens per sequence in arXiv 2503.09799."""

LADDER = {
    "35M": (6, 8, 512),
    "90M": (9, 12, 768),
    "180M": (12, 16, 1024),
    "330M": (15, 20, 1280),
    "550M": (18, 24, 1536),
    "1.3B": (24, 32, 2048),
    "2.4B": (30, 40, 2560),
    "4B": (36, 48, 3072),
    "10B": (48, 64, 4096),
}
"""Layers, heads and width of each size in arXiv 2503.09799, Table 3."""


def ladder(scale: str) -> DecoderConfig:
    """The decoder of a name in the paper's table, with its vocabulary of 32,768.

    Raises:
        UserError: if the table has no such name.

    >>> ladder("35M")
    DecoderConfig(num_layers=6, width=512, vocab_size=32768, num_heads=8)
    """
    if scale not in LADDER:
        raise UserError(f"{scale!r} is not a size of the ladder: choose one of {', '.join(LADDER)}")
    num_layers, num_heads, width = LADDER[scale]
    return DecoderConfig(num_layers=num_layers, num_heads=num_heads, width=width, vocab_size=32_768)


def _persimmon_config(config: DecoderConfig, *, context: int, bos_id: int) -> dict[str, Any]:
    """The contents of `config.json`; BOS precedes a document, and so ends the one before."""
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


def _persimmon_state(config: DecoderConfig, state: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
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


def _norm(name: str, gain_D: "Tensor") -> dict[str, "Tensor"]:
    return {f"{name}.weight": gain_D, f"{name}.bias": gain_D.new_zeros(gain_D.shape)}


def _linear(name: str, weight: "Tensor") -> dict[str, "Tensor"]:
    return {f"{name}.weight": weight, f"{name}.bias": weight.new_zeros(len(weight))}
