"""The sizes of the decoder: its config, and the ladder of the scaling-laws paper. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from diloco.errors import UserError
from diloco.models.spec import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The size of a decoder: 12·L·D² + V·D parameters in matrices, and the gains of its norms."""

    num_heads: int
    """Attention heads; must divide the width into an even number of elements a head."""

    def __post_init__(self) -> None:
        """Refuse sizes that make no decoder."""
        super().__post_init__()
        self._check_at_least("num_heads", 1)
        if self.width % (2 * self.num_heads):
            raise UserError(
                f"model.width={self.width} must be a multiple of twice model.num_heads={self.num_heads}: "
                "each head needs an even number of elements for RoPE",
                "model.width",
                "model.num_heads",
            )

    def build(self, *, seed: int) -> "LanguageModel":
        """A `Decoder` of this size."""
        # By name: decoder.py imports this file, and needs torch.
        return import_module("diloco.models.decoder").Decoder(self, seed=seed)

    @property
    def num_matrix_params(self) -> int:
        """12·L·D² + V·D, all parameters but the gains of norms.

        >>> DecoderConfig(num_layers=1, num_heads=1, width=2, vocab_size=5).num_matrix_params
        58
        """
        return 12 * self.num_layers * self.width**2 + self.vocab_size * self.width

    def to_hugging_face(
        self, state: Mapping[str, "Tensor"], *, context: int, bos_id: int
    ) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
        """The same model as `transformers.PersimmonForCausalLM`."""
        persimmon = import_module("diloco.models.persimmon")
        config = persimmon.persimmon_config(self, context=context, bos_id=bos_id)
        return config, persimmon.persimmon_state(self, state)


SEQUENCE_LENGTH = 2_048
"""Tokens a sequence in arXiv 2503.09799."""

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
