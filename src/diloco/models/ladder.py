"""The sizes of the scaling-laws paper (arXiv 2503.09799, Table 3), vocabulary 32,768, sequences of 2,048."""

from diloco.errors import UserError
from diloco.models.decoder import DecoderConfig

VOCAB_SIZE = 32_768
SEQUENCE_LENGTH = 2_048

# name: (layers, heads, width)
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


def ladder(scale: str) -> DecoderConfig:
    """The decoder of a name in the paper's table.

    >>> ladder("35M")
    DecoderConfig(num_layers=6, num_heads=8, width=512, vocab_size=32768)
    """
    if scale not in LADDER:
        raise UserError(f"{scale!r} is not a size of the ladder: choose one of {', '.join(LADDER)}")
    num_layers, num_heads, width = LADDER[scale]
    return DecoderConfig(num_layers=num_layers, num_heads=num_heads, width=width, vocab_size=VOCAB_SIZE)


def num_matrix_params(config: DecoderConfig) -> int:
    """12·L·D² + V·D, the parameters the paper counts: all but the norms' gains."""
    return 12 * config.num_layers * config.width**2 + config.vocab_size * config.width
