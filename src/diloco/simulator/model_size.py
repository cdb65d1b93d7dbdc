"""Where a model's parameters are: in its blocks, or outside them."""

import math
from dataclasses import dataclass

from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder's parameters: L equal blocks, and embeddings.

    Raises:
        UserError: if there can be no such model; the message names what contradicts what.

    >>> size = ModelSize(num_params=1.2e9, num_layers=24, width=2048, vocab_size=32_000)
    >>> size.outside_params, round(size.block_params)
    (65536000, 47269333)
    """

    num_params: float
    """N, all of them."""
    num_layers: int
    """L."""
    width: int | None = None
    """D; None is what 12·L·D² and the embeddings make N of."""
    vocab_size: int = 32_000
    """V."""
    tied_embeddings: bool = True
    """Whether the head has no matrix of its own."""

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        for name in ("num_params", "num_layers", "width", "vocab_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be above 0 and finite, not {value}")
        if self.outside_params >= self.num_params:
            raise UserError(
                f"num_params={self.num_params:g} leaves nothing for blocks beside vocab_size={self.vocab_size} "
                f"embeddings of width={self.width}"
            )

    @property
    def outside_params(self) -> float:
        """Of embeddings and head, which form a fragment of their own."""
        matrices = 1 if self.tied_embeddings else 2
        if self.width is not None:
            return matrices * self.vocab_size * self.width
        a, b = 12 * self.num_layers, matrices * self.vocab_size
        return b * (math.sqrt(b**2 + 4 * a * self.num_params) - b) / (2 * a)

    @property
    def block_params(self) -> float:
        """Of one block."""
        return (self.num_params - self.outside_params) / self.num_layers
