"""Random numbers that depend on a key alone: the same bits on every machine, device and version of PyTorch.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.wire.payload import Key

_LOW = 0xFFFFFFFF


def random_bits(key: Key, num_elements: int, device: torch.device, *, common: bool) -> Tensor:
    """32 random bits for each of N elements, as int64.

    Element i takes word i mod 4 of the counter (i div 4, fragment + part·2^16, round, replica + 1 + shard·2^16),
    under the key (seed mod 2^32, seed div 2^32).

    Args:
        key: the outer gradient's key.
        num_elements: N, at most 2^34.
        device: the device of the result.
        common: ignore the replica (the counter's last word is then shard·2^16).
    """
    assert num_elements <= 1 << 34, "a counter's first word has 32 bits"
    index = torch.arange(-(-num_elements // 4), dtype=torch.int64, device=device)
    *counter, key0, key1 = words(key, common=common)
    counter = [index, *(torch.full_like(index, word) for word in counter)]
    return torch.stack(philox(counter, (key0, key1)), dim=1).view(-1)[:num_elements]


def words(key: Key, *, common: bool) -> tuple[int, int, int, int, int]:
    """The counter's last three words, and the two of the key."""
    half = 1 << 16
    limits = Key(seed=1 << 64, fragment=half, round=1 << 32, replica=half - 1, part=half, shard=half)
    assert all(0 <= value < limit for value, limit in zip(key, limits, strict=True)), f"{key} is beyond {limits}"
    whose = (0 if common else key.replica + 1) + (key.shard << 16)
    return key.fragment + (key.part << 16), key.round, whose, key.seed & _LOW, key.seed >> 32


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Ten rounds on four 32-bit words in int64: products wrap at 64 bits, as the algorithm asks."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) & _LOW ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> 32) & _LOW ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]
