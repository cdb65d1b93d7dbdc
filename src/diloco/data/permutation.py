"""A keyed shuffle of [0, size) that is computed, not stored.

A balanced Feistel network is a bijection of [0, 2^2h) for every round function. Walking its cycles, that is
applying it again while the result is outside of [0, size), gives a bijection of [0, size) (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). As 2^2h ≤ 4 size, a position takes four turns at most on average.
"""

import numpy as np

_NUM_ROUNDS = 8


def permute(position_K: np.ndarray, *, size: int, seed: int, epoch_K: np.ndarray) -> np.ndarray:
    """The image of each position of [0, size) under its epoch's permutation: uint64, shape (K,).

    Positions and epochs are integers of shape (K,); 1 ≤ size ≤ 2^62; 0 ≤ seed < 2^64.

    >>> permute(np.arange(5), size=5, seed=0, epoch_K=np.zeros(5)).tolist()
    [4, 3, 2, 0, 1]
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    key_K = _mix(_mix(np.array([seed], dtype=np.uint64)) + epoch_K.astype(np.uint64))
    value_K = _feistel(position_K.astype(np.uint64), key_K, half_bits)
    while (outside_K := value_K >= size).any():
        value_K[outside_K] = _feistel(value_K[outside_K], key_K[outside_K], half_bits)
    return value_K


def _feistel(value_K: np.ndarray, key_K: np.ndarray, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left_K, right_K = value_K >> shift, value_K & mask
    for number in range(_NUM_ROUNDS):
        round_key_K = _mix(key_K + np.uint64(number))
        left_K, right_K = right_K, left_K ^ (_mix(right_K ^ round_key_K) & mask)
    return (left_K << shift) | right_K


def _mix(value_K: np.ndarray) -> np.ndarray:
    """One output of the generator splitmix64 (Steele, Lea and Flood, 2014) in the state `value_K`."""
    value_K = value_K + np.uint64(0x9E3779B97F4A7C15)
    value_K = (value_K ^ (value_K >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_K = (value_K ^ (value_K >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_K ^ (value_K >> np.uint64(31))
