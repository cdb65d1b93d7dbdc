"""The digest of Θ in NumPy, from its definition; shares nothing with diloco."""

import numpy as np

ROWS, COLUMNS = 255, 256
a, b, c = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def digest(theta: np.ndarray) -> int:
    """The digest of a float32 vector."""
    bits = np.pad(theta.view(np.int32).astype(np.int64), (0, -len(theta) % (ROWS * COLUMNS)))
    sums = bits.reshape(-1, ROWS, COLUMNS).sum(axis=1).astype(np.int32).astype(np.int64).reshape(-1)
    y = (sums.view(np.uint64) + np.arange(1, len(sums) + 1, dtype=np.uint64) * a) * b
    return int(((y ^ (y >> np.uint64(32))) * c).sum())
