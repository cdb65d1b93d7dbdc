"""A model's number of parameters, in its blocks and outside them."""

import math
from dataclasses import dataclass

from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder's parameters: L equal blocks, and embeddings.

    Raises:
        UserError: if no model has these sizes.

    >>> size = ModelSize(num_params=1.2e9, num_layers=24, width=2048, vocab_size=32_000)
    >>> size.outside_params, round(size.block_params)
    (65536000, 47269333)
    """

    num_params: float
    """N, all parameters."""
    num_layers: int
    """L, transformer blocks."""
    width: int | None = None
    """D; None is the width at which 12·L·D² and the embeddings add up to N."""
    vocab_size: int = 32_000
    """V."""
    tied_embeddings: bool = True
    """Whether the head shares the embeddings' matrix."""

    def __post_init__(self) -> None:
        """Refuse impossible sizes."""
        for name in ("num_params", "num_layers", "width", "vocab_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {value}", name)
        if self.outside_params >= self.num_params:
            raise UserError(
                f"num_params={self.num_params:g} leaves nothing for blocks beside vocab_size={self.vocab_size} "
                f"embeddings of width={self.width}",
                *("num_params", "vocab_size", "width"),
            )

    @property
    def outside_params(self) -> float:
        """Parameters of embeddings and head, which form the last fragment."""
        matrices = 1 if self.tied_embeddings else 2
        if self.width is not None:
            return matrices * self.vocab_size * self.width
        a, b = 12 * self.num_layers, matrices * self.vocab_size
        return b * (math.sqrt(b**2 + 4 * a * self.num_params) - b) / (2 * a)

    @property
    def block_params(self) -> float:
        """Parameters of one block."""
        return (self.num_params - self.outside_params) / self.num_layers
